"""Runs the notebooks of examples/notebooks and shows them: outputs into the notebooks, pages into docs/notebooks.

`python tools/notebooks.py` runs all; `python tools/notebooks.py first-steps …` runs these. Cells are run as Jupyter runs them,
in order and in one namespace, but without a kernel, so that nothing has to be installed for it. What is shown of a value is its
SVG where it has one, else its text.
"""

import ast
import contextlib
import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FOLDER, PAGES = ROOT / "examples" / "notebooks", ROOT / "docs" / "notebooks"
#: In the order in which they are read.
NAMES = ("first-steps", "curvature", "damping", "figure-1", "hugging-face")


def load(name: str) -> dict[str, Any]:
    """A notebook as it is committed."""
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    return found


def run(name: str) -> dict[str, Any]:
    """The notebook with the outputs of this run."""
    notebook, namespace = load(name), {"__name__": "__main__"}
    with _beside():
        for number, cell in enumerate((one for one in notebook["cells"] if one["cell_type"] == "code"), start=1):
            shown = list(outputs("".join(cell["source"]), f"{name}.ipynb, cell {number}", namespace, number))
            cell |= {"execution_count": number, "outputs": shown}
    return notebook


@contextlib.contextmanager
def _beside() -> Iterator[None]:
    """In the folder of the notebooks, as a kernel is; what they import from there is forgotten again."""
    before, known = list(sys.path), set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    try:
        with contextlib.chdir(FOLDER):
            yield
    finally:
        sys.path[:] = before
        for name in set(sys.modules) - known:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(FOLDER)):
                del sys.modules[name]


def outputs(source: str, file: str, namespace: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
    """What was printed, and the value of the last line."""
    tree = ast.parse(source, file)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    value = None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, file, "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), file, "eval"), namespace)
    if printed.getvalue():
        yield {"name": "stdout", "output_type": "stream", "text": printed.getvalue().splitlines(keepends=True)}
    if value is not None:
        data = {"text/plain": [repr(value)]}
        if hasattr(value, "_repr_svg_"):
            data = {"image/svg+xml": value._repr_svg_().splitlines(keepends=True)} | data
        yield {"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"}


def text(notebook: dict[str, Any]) -> str:
    """As the file has it."""
    return json.dumps(notebook, ensure_ascii=False, indent=1) + "\n"


def page(name: str, notebook: dict[str, Any]) -> dict[str, str]:
    """The page of a notebook and its pictures, by file."""
    parts, files = [], {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            # Links are written as from the notebook.
            parts.append(source.replace("](../../docs/", "](../"))
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            picture = "".join(output.get("data", {}).get("image/svg+xml", ""))
            if picture:
                file = f"{name}-{len(files) + 1}.svg"
                files[file] = picture
                title = re.search(r"<title>(.*?)</title>", picture)
                parts.append(f"![{title[1] if title else name}]({file})")
            else:
                said = output.get("text") or output["data"]["text/plain"]
                parts.append(f"```text\n{''.join(said).rstrip()}\n```")
    made = f"<!-- Made by tools/notebooks.py from examples/notebooks/{name}.ipynb -->\n\n"
    return files | {f"{name}.md": made + "\n\n".join(parts) + "\n"}


def pages() -> dict[str, str]:
    """All pages and pictures, of the notebooks as they are committed."""
    return {file: own for name in NAMES for file, own in page(name, load(name)).items()}


def main(names: list[str]) -> None:
    """Run, and write what they show."""
    for name in names or NAMES:
        made = text(run(name))
        (FOLDER / f"{name}.ipynb").write_text(made, encoding="utf-8")
        print(f"{name}: {len(made) // 1024} KiB")
    PAGES.mkdir(exist_ok=True)
    found = pages()
    for path in PAGES.iterdir():
        if path.name not in found:
            path.unlink()
    for file, own in found.items():
        (PAGES / file).write_text(own, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
