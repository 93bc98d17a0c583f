"""Public names are the promised ones, what README, pages and examples say runs, and every link leads somewhere."""

import ast
import pkgutil
import re
import runpy
import subprocess
import sys
import unicodedata
from itertools import takewhile
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
LINKED = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]


def prose(page: Path) -> str:
    """A page without its code, in which brackets are no links and hashes no headings."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def links(page: Path) -> list[str]:
    """Where the links of a page lead to, but for those to other sites."""
    targets = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose(page)))
    return [target for target in targets if not re.match(r"https?://|mailto:", target)]


def anchors(page: Path) -> set[str]:
    """What a link into a page may name: headings as GitHub and mkdocs both name them, and anchors set by hand."""
    names = set(re.findall(r'<a id="([^"]+)"', prose(page)))
    for heading in re.findall(r"^#{1,6} +(.*?) *$", prose(page), flags=re.MULTILINE):
        text = heading.replace("\\", "").replace("`", "").lower()
        here = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        there = re.sub(r"[^\w\s-]", "", unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode())
        if here == re.sub(r"[-\s]+", "-", there.strip()):
            names.add(here)
    return names


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


#: Those that run where there is no Triton.
PLAIN_KERNELS = ("__init__.py", "cpu.py", "eigenvalue.py", "permutation.py", "streams.py")


def test_the_library_needs_torch_and_jaxtyping_only() -> None:
    for path in (ROOT / "src" / "isaac_newton").rglob("*.py"):
        # Triton comes with torch where there is a GPU, and `kernels` imports its files only if it is there.
        # An integration imports its trainer, and nothing imports an integration.
        allowed = {"torch", "jaxtyping", "isaac_newton"}
        if path.parent.name == "kernels" and path.name not in PLAIN_KERNELS:
            allowed.add("triton")
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
    if "torch.compile(" in code:
        # The shape checks that the tests add to every call are not made to be compiled, hence a process of its own.
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return
    namespace: dict[str, object] = {}
    exec(compile(code, "snippet", "exec"), namespace)
    assert "isaac" in namespace


def test_the_readme_and_the_pages_have_snippets() -> None:
    assert len(SNIPPETS) >= 5
    for name in ("start.md", "how-it-works.md", "adding-a-layer.md", "recipes.md", "damping.md"):
        assert any(str(snippet.id).startswith(name) for snippet in SNIPPETS), name


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}"
        # mkdocs knows nothing of what is outside of its folder.
        assert page.parent != ROOT / "docs" or (ROOT / "docs") in target.parents, f"{page.name} links out of docs/: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {link}: {target.name} has no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    for name in re.findall(r"`((?:examples|tests|results|docs|src)/[\w./-]+)`", prose(page)):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.name)
def test_the_lines_of_a_table_have_as_many_cells_as_its_heading(page: Path) -> None:
    lines = [re.sub(r"\\\||`[^`]*`", "", line) for line in prose(page).split("\n")]
    for number, line in enumerate(lines):
        if not re.fullmatch(r"\|( *:?-+:? *\|)+", line):
            continue
        table = [lines[number - 1], *takewhile(lambda line: line and not line.startswith("<!--"), lines[number:])]
        assert {row.count("|") for row in table} == {line.count("|")}, f"{page.name}, the table with {table[0]!r}"


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    assert set(re.findall(r": ([\w-]+\.md)$", navigation, flags=re.MULTILINE)) == {page.name for page in PAGES[1:]}


def test_the_numbers_against_it_are_those_of_the_pages_they_are_from() -> None:
    rows = re.findall(
        r"^\|[^|\n]*\|([^|\n]*)\| \[[^]]*\]\(([\w-]+\.md)#[^)]*\) \|$", prose(ROOT / "docs" / "when-not.md"), flags=re.MULTILINE
    )
    assert len(rows) > 10
    for measured, source in rows:
        numbers = re.findall(r"\*\*(.+?)\*\*", measured)
        assert numbers, measured
        for number in numbers:
            text = (ROOT / "docs" / source).read_text(encoding="utf-8")
            assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d])", text), f"{number} of when-not.md is not in {source}"


def test_the_losses_of_examples_are_those_of_their_committed_runs() -> None:
    found = 0
    for part in re.split(r"\n\n|\n- ", prose(ROOT / "docs" / "when-not.md")):
        record = re.search(r"results/examples/\w+\.txt", part)
        for loss in re.findall(r"\b\d\.\d{4}\b", part) if record else []:
            assert loss in (ROOT / record[0]).read_text(encoding="utf-8"), f"{loss} of when-not.md is not in {record[0]}"
            found += 1
    assert found == 12


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ISAAC_EXAMPLE_STEPS", "3")  # a shortened form of the same run
    monkeypatch.delenv("ISAAC_DATA", raising=False)
    monkeypatch.setattr("sys.argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 60


@pytest.mark.parametrize(("name", "option"), [("mnist", "--data"), ("bert", "--model")])
def test_examples_refuse_a_folder_that_is_not_there(
    name: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [f"{name}.py", option, str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit) as refusal:
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    assert refusal.value.code == 2
    assert "nowhere" in capsys.readouterr().err
