"""Writes docs/gallery.md: of each example its name, its first sentence, and a picture or what it printed.

`python tools/gallery.py` makes the page. `python tools/gallery.py mnist …` runs these scripts at full length before, and puts
what they print into results/examples.
"""

import ast
import re
import subprocess
import sys
import textwrap
from itertools import takewhile
from pathlib import Path

from notebooks import NAMES, PAGES, ROOT

PAGE, RECORDS = ROOT / "docs" / "gallery.md", ROOT / "results" / "examples"
#: Of a line of the page; of what a script printed, longer ones are left out.
COLUMNS = 120
HEAD = """# Gallery

Everything in `examples/` runs by itself on a CPU, with data that is embedded or generated. These are short runs, most
of one seed, and few rates were tried. They show how to type it, and are no evidence that it helps: [Which
form](which.md) has what was measured.

To run a notebook you need a checkout, Jupyter and the extra `lab`; for the last one, transformers and accelerate too.
"""


def script(path: Path) -> tuple[str, str]:
    """Its first sentence, and how it is called: "What it shows: python examples/it.py (or …)"."""
    first = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").splitlines()[0]
    said, colon, command = first.rstrip(".").rpartition(": ")
    called = colon and re.match(r"python|torchrun", command)
    return (said, command) if called else (first.rstrip("."), f"python examples/{path.name}")


def printed(name: str) -> str:
    """Its record, but for lines that do not fit on a page and for the table of layers at the end."""
    path = RECORDS / f"{name}.txt"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    before = takewhile(lambda line: not line.startswith("layer "), lines)
    return "\n".join(line for line in before if line.strip() and len(line) <= COLUMNS)


def notebook(name: str) -> tuple[str, str, str]:
    """Title, first sentence and first picture of its page."""
    text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    title, sentence = re.findall(r"^# (.+)\n\n(.+(?:\n.+)*)", text, re.MULTILINE)[0]
    picture = re.findall(r"^!\[(.+)\]\((.+)\)$", text, re.MULTILINE)[0]
    return title, sentence, f"![{picture[0]}](notebooks/{picture[1]})"


def page() -> str:
    """The whole page."""
    parts = [HEAD, "## Notebooks\n"]
    for name in NAMES:
        title, sentence, picture = notebook(name)
        where = f"`examples/notebooks/{name}.ipynb`"
        parts.append(f"### [{title}](notebooks/{name}.md)\n\n{sentence}\n\n{picture}\n\n{where}\n")
    parts.append("## Scripts\n")
    for path in sorted((ROOT / "examples").glob("*.py")):
        said, command = script(path)
        said, result = textwrap.fill(said.replace("*", "\\*") + ".", COLUMNS), printed(path.stem)
        shown = f"\n\n```text\n{result}\n```" if result else ""
        parts.append(f"### {path.stem}\n\n{said}\n\n`{command}`{shown}\n")
    return "\n".join(parts)


def main(names: list[str]) -> None:
    """Run, and write the page."""
    for name in names:
        path = ROOT / "examples" / f"{name}.py"
        done = subprocess.run([sys.executable, str(path)], stdout=subprocess.PIPE, text=True, check=True)
        (RECORDS / f"{name}.txt").write_text(done.stdout, encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
