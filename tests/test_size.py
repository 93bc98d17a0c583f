"""How large the library's parts are: a file is read in one sitting, a function at one look."""

import ast
from pathlib import Path

import pytest

import isaac_newton as isaac

LIBRARY = Path(isaac.__file__).parent
FILES = sorted(str(path.relative_to(LIBRARY)) for path in LIBRARY.rglob("*.py"))


def lengths(source: str) -> dict[str, int]:
    """Lines of each function from its first statement on: signature and docstring, which explain, are not counted."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            said = ast.get_docstring(node) is not None
            first, last = node.body[1 if said and len(node.body) > 1 else 0], node.body[-1]
            found[f"{node.name}, line {node.lineno}"] = (last.end_lineno or last.lineno) - first.lineno + 1
    return found


def test_neither_signature_nor_docstring_counts_as_length() -> None:
    source = 'def one(\n    x: int,\n) -> int:\n    """One.\n\n    More.\n    """\n    y = x\n\n    return y\n'
    assert lengths(source) == {"one, line 1": 3}
    assert lengths(source + "\n\nclass Two:\n    def three(self) -> None: ...\n") == {"one, line 1": 3, "three, line 14": 1}


@pytest.mark.parametrize("name", FILES)
def test_a_file_has_at_most_400_lines_and_a_function_60(name: str) -> None:
    source = (LIBRARY / name).read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 400
    assert not {function: lines for function, lines in lengths(source).items() if lines > 60}


def test_all_of_the_library_is_measured() -> None:
    assert len(FILES) > 50
    assert {"__init__.py", "api/attach.py", "core/gradient.py", "kernels/inverse_small.py"} <= set(FILES)
