"""The page of what works with what: a row for each promise, with the tests that show it and how they ended.

`python tests/compatibility.py` runs the conformance tests and writes docs/compatibility.md.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["AREAS", "compatibility", "page"]

TESTS = Path(__file__).parent

#: The files whose tests are rows, in this order. Tests without a mark of their own belong to the area of their file.
AREAS = {
    "test_conformance.py": "Training",
    "test_step.py": 'when="step": accumulation, averages, binding to an optimizer',
    "test_distributed.py": "Distributed: gloo processes on one machine",
    "test_restart.py": "Distributed: elastic restart",
    "test_integrations.py": "Trainers",
}

INTRODUCTION = """\
# Compatibility

{verdict} A promise holds when every test behind it passes. "Skipped" means that
something the test needs was not there. ζ* is meant unless ζ is named, and `when="backward"` unless `when="step"` is.

Nothing on this page is typed by hand: `python tests/compatibility.py` runs the tests named here and writes it, with
{versions}.
"""


@dataclass
class Row:
    """One promise."""

    notes: str
    outcomes: list[str] = field(default_factory=list)
    reasons: set[str] = field(default_factory=set)
    tests: list[str] = field(default_factory=list)

    @property
    def result(self) -> str:
        """In a word."""
        if "failed" in self.outcomes:
            return f"**fails** ({self.outcomes.count('failed')} of {len(self.outcomes)})"
        if set(self.outcomes) == {"skipped"}:
            return "skipped: " + "; ".join(sorted(self.reasons))
        return "holds"

    @property
    def shown_by(self) -> str:
        """The test, or how many cases of it."""
        functions = sorted({test.partition("[")[0] for test in self.tests})
        if len(self.tests) == 1:
            return f"`{self.tests[0]}`"
        return ", ".join(f"`{function}`" for function in functions) + f", {len(self.tests)} cases"


def page(outcomes: Mapping[str, Any]) -> str:
    """The whole page, from what `outcomes.py` wrote."""
    areas: dict[str, dict[str, Row]] = {}
    for test, outcome in sorted(outcomes["tests"].items(), key=lambda entry: _place(entry[0])):
        for area, promise, notes in outcome["promises"] or [_by_name(test)]:
            row = areas.setdefault(area, {}).setdefault(promise, Row(notes))
            row.outcomes.append(outcome["outcome"])
            row.tests.append(test.rpartition("/")[2])
            if outcome["reason"]:
                row.reasons.add(outcome["reason"].removeprefix("Skipped: "))
    versions = ", ".join(f"{name} {version}" for name, version in outcomes["versions"].items())
    results = [row.result.partition(" ")[0].strip(":*") for rows in areas.values() for row in rows.values()]
    counts = ", ".join(f"{result}: {count}" for result, count in sorted(Counter(results).items()))
    parts = [INTRODUCTION.format(verdict=f"{len(results)} promises; {counts}.", versions=versions)]
    for area, rows in areas.items():
        lines = [f"## {area}", "", "| Promise | Result | Notes | Shown by |", "|---|---|---|---|"]
        for promise, row in rows.items():
            cells = (promise, row.result, row.notes, row.shown_by)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _place(test: str) -> int:
    files = list(AREAS)
    name = _file(test)
    return files.index(name) if name in files else len(files)


def _file(test: str) -> str:
    return test.partition("::")[0].rpartition("/")[2]


def _by_name(test: str) -> tuple[str, str, str]:
    """Tests are named after what they show; where several processes run many checks, the check says what."""
    function, _, case = test.partition("::")[2].partition("[")
    words = function.removeprefix("test_").replace("_", " ")
    words = words[:1].upper() + words[1:]
    check = re.fullmatch(r"\d+ ranks-(.*)\]", case)
    return AREAS.get(_file(test), "Others"), f"{words}: {check[1]}" if check else words, ""


def compatibility(
    out: Annotated[Path, typer.Option(help="The page.")] = Path("docs/compatibility.md"),
    tests: Annotated[Path, typer.Option(help="The folder of the tests.")] = TESTS,
    outcomes: Annotated[
        Path | None,
        typer.Option(help="Outcomes of an earlier run (pytest -p outcomes --outcomes=FILE)."),
    ] = None,
) -> None:
    """Run the conformance tests, or take the outcomes of an earlier run, and write docs/compatibility.md."""
    if outcomes is not None and not outcomes.is_file():
        raise typer.BadParameter(f"there is no file {outcomes}", param_hint="--outcomes")
    with tempfile.TemporaryDirectory() as folder:
        if outcomes is None:
            outcomes = Path(folder) / "outcomes.json"
            _run(tests, outcomes)
        found = json.loads(outcomes.read_text(encoding="utf-8"))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page(found), encoding="utf-8")
    failed = [test for test, outcome in found["tests"].items() if outcome["outcome"] == "failed"]
    typer.echo(f"{out}: {len(found['tests'])} tests, {len(failed)} failed")
    raise typer.Exit(code=1 if failed else 0)


def _run(tests: Path, outcomes: Path) -> None:
    files = [str(tests / name) for name in AREAS if (tests / name).is_file()]
    if not files:
        raise typer.BadParameter(f"there are no conformance tests in {tests}; run this in a checkout", param_hint="--tests")
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "outcomes", f"--outcomes={outcomes}", *files]
    subprocess.run(command, check=False, env=os.environ | {"PYTHONPATH": path})
    if not outcomes.is_file():
        raise typer.BadParameter("pytest wrote no outcomes; is it installed?", param_hint="--tests")


if __name__ == "__main__":
    typer.run(compatibility)
