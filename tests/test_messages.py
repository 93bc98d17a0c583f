"""Every warning and error that the library can give is on the page that says what to do, and that page has no others."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from isaac_newton.layers.registry import REASONS

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "isaac_newton"
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
#: What a message says of its case.
HOLE = "…"


def text(node: ast.AST) -> str:
    """A message with a mark where a value stands."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else HOLE for part in node.values)
    if isinstance(node, ast.BinOp):
        return text(node.left) + text(node.right)
    return HOLE


def messages(path: Path) -> Iterator[str]:
    """What is raised and warned in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assign) and "{}" in text(node.value):
            yield text(node.value).replace("{}", HOLE)  # a template
        call = node.exc if isinstance(node, ast.Raise) else node
        if not isinstance(call, ast.Call) or not call.args:
            continue
        kind = ast.unparse(call.func)
        if kind == "warnings.warn" or (call is not node and kind != "AttributeError"):
            yield text(call.args[0])


SAID = sorted(
    {
        said
        for path in SOURCE.rglob("*.py")
        if "kernels" not in path.parts
        for said in messages(path)
        if said.strip(HOLE) and not said.startswith(f"{HOLE}.format")
    }
)


def listed() -> dict[str, re.Pattern[str]]:
    """What the page's tables of warnings and errors list, and which messages begin so."""
    part = PAGE[PAGE.index("## Warnings") :]
    cells = [line.split(" | ")[0] for line in part.splitlines() if line.startswith("| `")]
    quoted = [words for cell in cells for words in re.findall(r"`([^`]+)`", cell)]
    return {words: re.compile(".*".join(map(re.escape, words.split(HOLE))), re.DOTALL) for words in quoted}


@pytest.mark.parametrize("said", SAID)
def test_a_message_is_on_the_page(said: str) -> None:
    assert any(pattern.match(said) for pattern in listed().values()), said


def test_the_page_lists_no_message_that_is_gone() -> None:
    assert len(SAID) > 100
    gone = [words for words, pattern in listed().items() if not any(pattern.match(said) for said in SAID)]
    assert not gone


def test_the_reasons_on_the_page_are_those_that_layers_are_skipped_for() -> None:
    part = PAGE[PAGE.index("## A layer is not conditioned") : PAGE.index("## Warnings")]
    cells = [line.split(" | ")[0] for line in part.splitlines() if line.startswith("| `")]
    quoted = [words for cell in cells for words in re.findall(r"`([^`]+)`", cell)]
    code = " ".join(
        text(node)
        for name in ("api/attach.py", "api/tied.py", "layers/registry.py", "layers/linear.py", "layers/embedding.py")
        for node in ast.walk(ast.parse((SOURCE / name).read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant | ast.JoinedStr)
    )
    assert not [words for words in quoted if words not in code]
    assert not [why for why in REASONS.values() if not any(words in why for words in quoted)]
