"""The laboratory keeps its shape: small files, short functions, one of each, and a ceiling that only falls."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

LAB = Path(__file__).parent.parent / "src" / "isaac_lab"
#: All lines of the laboratory. It may be lowered; only new studies raise it.
CEILING = 15_107
FILES = sorted(LAB.rglob("*.py"))


def test_the_ceiling_holds() -> None:
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in FILES) <= CEILING


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(LAB).as_posix())
def test_files_and_functions_are_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            first, *rest = node.body
            documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            start = rest[0].lineno if documented and rest else first.lineno
            assert (node.end_lineno or 0) - start < 60, node.name


STUDIES = ["studies.paper", "studies.race.runner", "studies.recipes", "studies.dampings", "commands.studies"]
#: The one loop, the one store, the one `resolve`, and what they stand on.
ONES = ["study", "record", "training", "networks", "executors", "trial"]


def test_without_the_one_loop_store_or_resolve_there_is_no_study(tmp_path: Path) -> None:
    """Every study is imported in an interpreter that lacks one of them, and fails with its name."""
    program = """
import importlib, sys
ones, studies = (words.split(",") for words in sys.argv[1:3])
for one in ones:
    for study in studies:
        for name in [name for name in sys.modules if name.startswith("isaac_lab")]:
            del sys.modules[name]
        sys.modules[f"isaac_lab.{one}"] = None
        try:
            module = importlib.import_module(f"isaac_lab.{study}")
            if study == "commands.studies":
                module.demo(seeds=1, out=module.Path(sys.argv[3]))
        except ModuleNotFoundError as error:
            print(one, study, f"isaac_lab.{one}" in str(error))
        else:
            print(one, study, "is not needed")
"""
    found = subprocess.run(
        [sys.executable, "-c", program, ",".join(ONES), ",".join(STUDIES), str(tmp_path)], capture_output=True, text=True
    )
    said = [line for line in found.stdout.splitlines() if line.endswith(("True", "False", "needed"))]
    assert said == [f"{one} {study} True" for one in ONES for study in STUDIES], found.stderr[-2000:]


def test_one_file_writes_records_and_one_trains_them() -> None:
    """Steps that are benchmarked, which keep no records of this kind, are named here."""
    stepping = {path.relative_to(LAB).as_posix() for path in FILES if "optimizer.step()" in path.read_text(encoding="utf-8")}
    assert stepping <= {"methods/__init__.py", "networks.py", "bench/steps.py"}
    stores = {path.name for path in FILES if 'trials.jsonl"\n' in path.read_text(encoding="utf-8")}
    assert stores == {"record.py"}


def test_commands_that_train_go_through_one_function() -> None:
    """It shows progress, catches Ctrl-C and names errors."""
    folder = LAB / "commands"
    showing = {path.name for path in folder.glob("*.py") if "display(console)" in path.read_text(encoding="utf-8")}
    assert showing == {"training.py"}
    filling = {path.name for path in (LAB / "report").glob("*.py") if "docs.fill(" in path.read_text(encoding="utf-8")}
    assert not filling
