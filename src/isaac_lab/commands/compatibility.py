"""`isaac-newton compatibility`: run the conformance tests and write the page of what works with what."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from isaac_lab.report.compatibility import AREAS, page

__all__ = ["compatibility"]


def compatibility(
    out: Annotated[Path, typer.Option(help="The page.")] = Path("docs/compatibility.md"),
    tests: Annotated[Path, typer.Option(help="The folder of the tests.")] = Path("tests"),
    outcomes: Annotated[
        Path | None, typer.Option(help="Outcomes of an earlier run (pytest -p isaac_lab.report.outcomes --outcomes=FILE).")
    ] = None,
) -> None:
    """Run the conformance tests, or take the outcomes of an earlier run, and write docs/compatibility.md."""
    if outcomes is not None and not outcomes.is_file():
        raise typer.BadParameter(f"there is no file {outcomes}", param_hint="--outcomes")
    with tempfile.TemporaryDirectory() as folder:
        if outcomes is None:
            outcomes = Path(folder) / "outcomes.json"
            _run(tests, outcomes)
        found = json.loads(outcomes.read_text())
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page(found))
    failed = [test for test, outcome in found["tests"].items() if outcome["outcome"] == "failed"]
    typer.echo(f"{out}: {len(found['tests'])} tests, {len(failed)} failed")
    raise typer.Exit(code=1 if failed else 0)


def _run(tests: Path, outcomes: Path) -> None:
    files = [str(tests / name) for name in AREAS if (tests / name).is_file()]
    if not files:
        raise typer.BadParameter(f"there are no conformance tests in {tests}; run this in a checkout", param_hint="--tests")
    plugin = ["-p", "isaac_lab.report.outcomes", f"--outcomes={outcomes}"]
    subprocess.run([sys.executable, "-m", "pytest", "-q", *plugin, *files], check=False)
    if not outcomes.is_file():
        raise typer.BadParameter("pytest wrote no outcomes; is it installed?", param_hint="--tests")
