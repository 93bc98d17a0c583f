"""The notebooks run as they are committed, assert what they say, and are shown: their pages and the gallery are current."""

import importlib
import re
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
FOLDER, PAGES = ROOT / "examples" / "notebooks", ROOT / "docs" / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def tool(name: str) -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tools"))
        return importlib.import_module(name)


notebooks, gallery, prose = tool("notebooks"), tool("gallery"), tool("prose")


def code(name: str) -> list[dict[str, object]]:
    return [cell for cell in notebooks.load(name)["cells"] if cell["cell_type"] == "code"]


def test_every_notebook_is_named_once_in_its_order() -> None:
    assert sorted(notebooks.NAMES) == NAMES
    assert len(NAMES) >= 5


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_and_what_it_says_holds(name: str) -> None:
    before = time.process_time()
    made = notebooks.run(name)
    assert time.process_time() - before < 20, "of one CPU thread, at most"
    assert "pictures" not in sys.modules
    kinds = [[output["output_type"] for output in cell.get("outputs", [])] for cell in made["cells"]]
    assert kinds == [[output["output_type"] for output in cell.get("outputs", [])] for cell in notebooks.load(name)["cells"]]


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_committed_and_the_headline_is_asserted(name: str) -> None:
    cells = code(name)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    last = cells[-1]
    assert re.search(r"^ *assert ", "".join(last["source"]), re.MULTILINE)  # type: ignore[arg-type]
    assert last["outputs"], "the headline is printed"
    assert any("image/svg+xml" in output.get("data", {}) for cell in cells for output in cell["outputs"])  # type: ignore[attr-defined]


def test_notebooks_and_their_pages_are_small() -> None:
    assert sum(path.stat().st_size for folder in (FOLDER, PAGES) for path in folder.iterdir() if path.is_file()) < 1_500_000


def test_an_assertion_that_does_not_hold_is_an_error() -> None:
    with pytest.raises(AssertionError, match="3 is not 4"):
        list(notebooks.outputs("assert 3 == 4, '3 is not 4'", "a cell", {}, 1))


def test_a_cell_shows_what_it_prints_and_its_last_value_as_jupyter_does() -> None:
    class Drawn:
        def _repr_svg_(self) -> str:
            return "<svg/>"

        def __repr__(self) -> str:
            return "Drawn()"

    printed, value = notebooks.outputs("print('before')\nmade", "a cell", {"made": Drawn()}, 2)
    assert printed == {"name": "stdout", "output_type": "stream", "text": ["before\n"]}
    assert value["data"] == {"image/svg+xml": ["<svg/>"], "text/plain": ["Drawn()"]}
    assert list(notebooks.outputs("made = 1", "a cell", {}, 3)) == []


def test_the_pages_are_those_of_the_notebooks() -> None:
    found = {path.name: path.read_text(encoding="utf-8") for path in PAGES.iterdir()}
    assert found == notebooks.pages(), "run python tools/notebooks.py"


def test_the_gallery_is_current() -> None:
    assert gallery.PAGE.read_text(encoding="utf-8") == gallery.page(), "run python tools/gallery.py"


def test_the_gallery_has_every_example() -> None:
    page = gallery.PAGE.read_text(encoding="utf-8")
    assert all(f"### {path.stem}\n" in page for path in (ROOT / "examples").glob("*.py"))
    assert all(gallery.printed(path.stem) for path in (ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_the_page_of_a_notebook_is_plain_in_the_navigation_and_links_to_pages(name: str) -> None:
    page = PAGES / f"{name}.md"
    assert prose.check(page) == []
    assert f": notebooks/{name}.md\n" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert links
    assert all((PAGES / link.partition("#")[0]).is_file() for link in links), links
