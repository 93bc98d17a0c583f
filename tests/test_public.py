"""The public names are the promised ones, and everything the README and the examples say runs."""

import ast
import pkgutil
import re
import runpy
from pathlib import Path

import pytest

import isaac_newton

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SNIPPETS = [
    pytest.param(code, id=f"{page.name}-{number}")
    for page in PAGES
    for number, code in enumerate(
        re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL), start=1
    )
]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_the_public_names_are_those_of_all_and_sorted() -> None:
    assert isaac_newton.__all__ == sorted(isaac_newton.__all__)
    submodules = {module.name for module in pkgutil.iter_modules(isaac_newton.__path__)}
    visible = {name for name in vars(isaac_newton) if not name.startswith("_")}
    assert visible - submodules | set(isaac_newton.__all__) == set(isaac_newton.__all__)
    promised = ["Ensemble", "Handle", "Likelihood", "Linear", "Relative", "Site"]
    promised += ["attach", "capture", "condition", "detach", "equations", "register", "suggest_damping"]
    assert isaac_newton.__all__ == promised


def test_the_equations_have_exactly_the_promised_names() -> None:
    assert isaac_newton.equations.__all__ == ["condition_rows", "kfac", "zeta", "zeta_star"]


def test_every_public_name_is_documented() -> None:
    for name in isaac_newton.__all__:
        assert getattr(isaac_newton, name).__doc__, name


def test_the_library_needs_torch_and_jaxtyping_only() -> None:
    for path in (ROOT / "src" / "isaac_newton").rglob("*.py"):
        # Triton comes with torch where there is a GPU, and only `kernels` imports `fused`, if it is there.
        # An integration imports its trainer, and nothing imports an integration.
        allowed = {"torch", "jaxtyping", "isaac_newton"} | ({"triton"} if path.name == "fused.py" else set())
        if path.parent.name == "integrations":
            allowed |= {"transformers", "lightning", "pytorch_lightning"}
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            for name in names:
                top = name.split(".")[0]
                assert top in allowed or top in __import__("sys").stdlib_module_names, f"{path.name} imports {name}"


@pytest.mark.parametrize("code", SNIPPETS)
def test_snippets_of_the_documentation_run(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    exec(compile(code, "snippet", "exec"), namespace)
    assert "isaac" in namespace


def test_the_readme_and_the_pages_have_snippets() -> None:
    assert len(SNIPPETS) >= 5


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ISAAC_EXAMPLE_STEPS", "3")  # a shortened form of the same run
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()
