"""A pytest plugin that writes down how each test ended and which promises it shows: `pytest -p outcomes`.

A promise is a mark, `@pytest.mark.conformance(area, promise, notes)`. The file is named by `--outcomes`.
"""

import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

__all__: list[str] = []

#: What a result may depend on, where it is installed.
PACKAGES = ("torch", "transformers", "lightning", "accelerate", "onnxruntime")


def pytest_addoption(parser: Any) -> None:
    """The option."""
    parser.addoption("--outcomes", type=Path, help="File for the outcomes of the tests, as JSON.")


def pytest_configure(config: Any) -> None:
    """Where reports come together: not in the workers of pytest-xdist."""
    if config.getoption("--outcomes") is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Outcomes(config.getoption("--outcomes")))


def pytest_itemcollected(item: Any) -> None:
    """Hand the marks on to the reports, which come from other processes under pytest-xdist."""
    marks = [[*mark.args, *[""] * (3 - len(mark.args))] for mark in item.iter_markers("conformance")]
    item.user_properties.append(("conformance", marks))


class _Outcomes:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Each of set-up, call and tear-down reports; the first that does not pass decides."""
        test = self._tests.setdefault(report.nodeid, {"outcome": "passed", "reason": "", "promises": []})
        test["promises"] = dict(report.user_properties).get("conformance", [])
        if report.outcome != "passed" and test["outcome"] == "passed":
            test["outcome"] = report.outcome
            test["reason"] = report.longrepr[2] if report.outcome == "skipped" else ""

    def pytest_sessionfinish(self) -> None:
        """Write all of it."""
        versions = {"python": platform.python_version()}
        for package in PACKAGES:
            try:
                versions[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
        self._path.write_text(json.dumps({"versions": versions, "tests": self._tests}, indent=1))
