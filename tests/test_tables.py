"""One table in three forms, and pages with blocks that are filled."""

import io
import shutil
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from isaac_lab.cli import app
from isaac_lab.report import docs
from isaac_lab.report.tables import Row, Table, table

ROOT = Path(__file__).parents[1]
TABLE = Table(
    "A caption <b>",
    ("Method", "Loss", "Why"),
    (
        Row(("ζ*", "0.1", "a|b"), ours=True, marks={1: "good"}),
        Row(("SGD", "**0.2**", "`x` [red]")),
        Row(("K-FAC", "not run: <no reason>", "")),
    ),
    frozenset({"Method", "Why"}),
    "A note.",
)


def test_markdown_has_every_cell_and_its_alignment() -> None:
    assert TABLE.markdown().splitlines() == [
        "| Method | Loss | Why |",
        "| --- | --: | --- |",
        r"| **ζ\*** | 0.1 | a\|b |",
        "| SGD | **0.2** | `x` [red] |",
        "| K-FAC | not run: <no reason> |  |",
    ]
    assert table(["A\nb"], [["1\n2"]]).markdown() == "| A b |\n| --- |\n| 1 2 |\n"
    assert table(["A", "B"], [["1"]]).markdown() == "| A | B |\n| --- | --- |\n| 1 |  |\n"


def test_a_terminal_shows_the_same_cells_without_marks_of_markdown() -> None:
    console = Console(width=80, file=io.StringIO())
    with console.capture() as capture:
        console.print(TABLE.terminal())
    text = capture.get()
    for words in ("A caption <b>", "ζ*", "0.1", "a|b", "0.2", "x [red]", "not run: <no reason>", "A note."):
        assert words in text
    assert "**" not in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_html_is_escaped_and_says_which_cells_are_words_good_or_ours() -> None:
    text = TABLE.html()
    assert 'aria-label="A caption &lt;b&gt;"' in text
    assert '<tr class="ours">\n<th scope="row">ζ*</th>\n<td class="good">0.1</td>\n<td class="words">a|b</td>\n</tr>' in text
    assert "<td>not run: &lt;no reason&gt;</td>" in text
    assert '<th scope="col" class="words">Method</th>\n<th scope="col">Loss</th>' in text
    assert text.endswith('<p class="small">A note.</p>\n')
    long = table(["A", "B"], [["a", "b" * 25]]).html()
    assert '<td class="words wide">' in long


@pytest.mark.parametrize(
    ("cell", "shown"),
    [
        ("0.35 ± 0.01 (captured)", "0.35\u00a0±\u00a00.01 (captured)"),
        ("1,071 ± 31", "1,071\u00a0±\u00a031"),
        ("0.24, no difference shown", "0.24, no difference shown"),
        ("never", "never"),
        ("not run: no reason", "not run: no reason"),
    ],
)
def test_a_figure_stays_on_one_line_and_what_is_said_of_it_may_go_to_the_next(cell: str, shown: str) -> None:
    assert f"<td>{shown}</td>" in table(["A", "B"], [["a", cell]], ["A"]).html()


def test_some_columns_alone_keep_their_kind_and_marks() -> None:
    some = TABLE.only([0, 1])
    assert some.markdown().splitlines()[:3] == ["| Method | Loss |", "| --- | --: |", r"| **ζ\*** | 0.1 |"]
    assert (some.rows[0].marks, some.rows[2].cells) == ({1: "good"}, ("K-FAC", "not run: <no reason>"))
    assert TABLE.only([1, 0]).rows[0].marks == {0: "good"}


PAGE = "Words.\n<!-- one -->\nold\n<!-- /one -->\nMore `<!-- none -->` words.\n\n<!-- two -->\n<!-- /two -->\nend\n"


def test_only_the_blocks_of_a_page_are_filled() -> None:
    assert docs.blocks(PAGE) == {"one": "old\n", "two": ""}
    made = docs.filled(PAGE, {"one": lambda: "new\n\n", "three": lambda: "x"})
    assert made == PAGE.replace("old", "new")
    assert docs.filled(made, {"one": lambda: "new"}) == made
    assert docs.filled(PAGE, {"two": lambda: "| a |"}).endswith("<!-- two -->\n| a |\n<!-- /two -->\nend\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no block", r"page.md has no <!-- one --> … <!-- /one -->"),
        ("<!-- one -->\nold", "the block one does not end"),
        ("<!-- one -->\n<!-- /one -->\n<!-- one -->\n<!-- /one -->\n", "the block one begins twice"),
    ],
)
def test_a_page_that_cannot_be_filled_is_named_and_stays(tmp_path: Path, text: str, message: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    with pytest.raises(docs.DocsError, match=message):
        docs.fill(page, {"one": lambda: "new"})
    assert page.read_text(encoding="utf-8") == text


def test_what_fails_while_a_page_is_filled_leaves_it_as_it_was(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE, encoding="utf-8")

    def broken() -> str:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        docs.fill(page, {"one": lambda: "new", "two": broken})
    assert page.read_text(encoding="utf-8") == PAGE
    assert list(tmp_path.iterdir()) == [page]


def test_a_page_that_is_not_there_is_made_of_its_blocks(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "page.md"
    docs.fill(page, {"one": lambda: "1", "two": lambda: "2"})
    assert page.read_text(encoding="utf-8") == "<!-- one -->\n1\n<!-- /one -->\n\n<!-- two -->\n2\n<!-- /two -->\n"


@pytest.mark.parametrize("name", ["benchmarks.md", "reproduction.md"])
def test_committed_pages_and_pictures_are_what_the_records_say(name: str, tmp_path: Path) -> None:
    """With the two tests of the races' pages and that of the scaling page, every block of the documentation."""
    committed = ROOT / "docs" / name
    page = tmp_path / name
    shutil.copyfile(committed, page)
    bench, records = str(ROOT / "results" / "bench"), str(ROOT / "results" / "reproduce")
    arguments = ["bench", "page", "--records", bench, "--out", str(page)]
    if name == "reproduction.md":
        arguments = ["claims", "--records", records, "--bench", bench, "--page", str(page)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert page.read_text(encoding="utf-8") == committed.read_text(encoding="utf-8")
    drawn = list((tmp_path / "figures").glob("*.svg"))
    assert drawn
    for picture in drawn:
        assert picture.read_bytes() == (committed.parent / "figures" / picture.name).read_bytes(), picture.name


@pytest.mark.parametrize("wrong", ["{", "[1]", ""], ids=["torn", "foreign", "empty"])
def test_a_damaged_benchmark_is_named_and_the_page_stays(tmp_path: Path, wrong: str) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text("old", encoding="utf-8")
    (tmp_path / "table2.json").write_text(wrong, encoding="utf-8")
    result = CliRunner().invoke(app, ["bench", "page", "--records", str(tmp_path), "--out", str(page)])
    assert result.exit_code == 2
    assert "'--records': cannot read" in result.output
    assert "table2.json" in result.output.replace("\n", "")
    assert page.read_text(encoding="utf-8") == "old"
