"""Lists hard prose: sentences over 30 words, paragraphs over six lines, lines over 120 columns.

`python tools/prose.py` checks all pages and fails if it finds anything; `python tools/prose.py FILE …` checks these.
Left out: code, headings, tables (but for their width in the README), and the paper's own sentences between “ and ”.
The standard library is enough.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
#: The pages that are held to it. The changelog is a list of short notes.
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")))
WORDS, LINES, COLUMNS, README_LINES = 30, 6, 120, 150


def paragraphs(text: str) -> Iterator[tuple[int, list[str]]]:
    """Each paragraph or point of a list, with the number of its first line."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->", lambda code: "\n" * code[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)
    found: list[str] = []
    start = 0
    for number, line in enumerate([*text.split("\n"), ""], start=1):
        words = line.strip()
        item = re.match(r"([-*+]|\d+\.) +", words)
        ends = not words or words.startswith(("|", "#", "<", "![", "[!["))
        if found and (ends or item):
            yield start, found
            found = []
        if not ends:
            start = start if found else number
            found.append(words[item.end() :] if item else words)


def sentences(paragraph: list[str]) -> Iterator[str]:
    """Those of a paragraph, without quotations, with the text of links in place of links and one word for code."""
    text = re.sub(r"“.*”", "“…”", " ".join(paragraph))
    text = re.sub(r"`[^`]*`", "Code", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text))
    yield from re.split(r"(?<=[.!?])[*_)”\"]* +(?=[^a-z])", text)


def check(path: Path) -> list[str]:
    """What is hard to read in a page."""
    text, found = path.read_text(encoding="utf-8"), []
    name, lines = path.name, text.split("\n")
    readme = path.resolve() == ROOT / "README.md"
    fenced = False
    for number, line in enumerate(lines, start=1):
        fenced ^= line.startswith("```")
        if len(line) > COLUMNS and (readme or not (line.startswith("|") or fenced)):
            found.append(f"{name}:{number}: {len(line)} columns")
    if readme and len(lines) - 1 > README_LINES:
        found.append(f"{name}: {len(lines) - 1} lines, at most {README_LINES}")
    for number, paragraph in paragraphs(text):
        if len(paragraph) > LINES:
            found.append(f"{name}:{number}: a paragraph of {len(paragraph)} lines")
        for sentence in sentences(paragraph):
            # A figure or a symbol is no word.
            count = len([word for word in sentence.split() if re.search(r"[^\W\d_]{2}", word)])
            if count > WORDS:
                found.append(f"{name}:{number}: a sentence of {count} words: {sentence[:60]}…")
    return found


def main(names: list[str]) -> int:
    """The number of findings decides the exit status."""
    found = [line for page in (names or [ROOT / page for page in PAGES]) for line in check(Path(page))]
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
