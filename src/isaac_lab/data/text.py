"""Tasks on sentences, behind one `load`: three of GLUE from their tsv files, and three small ones that are generated."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from isaac_lab.data import places, toy_text
from isaac_lab.data.catalogue import GENERATED, GLUE, SETS
from isaac_lab.data.files import DataError, check, md5
from isaac_lab.data.reading import stored

__all__ = ["NAMES", "DataError", "Kind", "Split", "TextTask", "load"]

#: Is this a sentence of the language? Do both say the same? How similar is what they say?
Kind = Literal["acceptability", "paraphrase", "similarity"]
NAMES = (*GLUE, "toy-cola", "toy-mrpc", "toy-stsb")

KINDS: Mapping[str, Kind] = MappingProxyType({"cola": "acceptability", "mrpc": "paraphrase", "stsb": "similarity"})
HIGHEST_SCORE = 5.0


@dataclass(frozen=True)
class Split:
    """Sentences, or pairs of them, with a label each; all tuples of one length.

    Attributes:
        first: The sentences, or the first of each pair.
        second: The second of each pair; None where the task has single sentences.
        labels: 0 or 1 (1 for acceptable, and for the same meaning), or a score from 0.0 to 5.0 for similarity.
    """

    first: tuple[str, ...]
    second: tuple[str, ...] | None
    labels: tuple[int, ...] | tuple[float, ...]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class TextTask:
    """A task on sentences: what is asked, what to train on, what to measure on.

    Attributes:
        name: One of `NAMES`.
        title: For people; it says when the sentences are generated.
        kind: What is asked.
        train: To train on.
        dev: To measure on; GLUE's test labels are not public.
        checksum: MD5 that stands for all the bytes, so that a record can say what it is from.
    """

    name: str
    title: str
    kind: Kind
    train: Split
    dev: Split
    checksum: str

    @property
    def outputs(self) -> int:
        """Of the last layer: a number for each of two classes, or one score."""
        return 1 if self.kind == "similarity" else 2

    @property
    def pairs(self) -> bool:
        """Whether an example is a pair of sentences."""
        return self.train.second is not None

    @property
    def generated(self) -> bool:
        """Whether no person wrote these sentences, so that no result on them is one on GLUE."""
        return self.name in GENERATED


@dataclass(frozen=True)
class Format:
    """Columns of a tsv file, from 0, and the line above them. Nothing is quoted: `"` is a letter like any other."""

    header: str | None
    columns: int
    first: int
    second: int | None
    label: int


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "cola": Format(None, 4, first=3, second=None, label=1),
        "mrpc": Format("Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", 5, first=3, second=4, label=0),
        "stsb": Format(
            "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore",
            10,
            first=7,
            second=8,
            label=9,
        ),
    }
)


def load(name: str, folder: Path | None = None) -> TextTask:
    """Read a task and check every byte of it, or generate it.

    Args:
        name: One of `NAMES`.
        folder: Looked at first for the files, before `ISAAC_DATA` and the cache. What is generated needs none.

    Raises:
        DataError: There is no such task, or its files are missing or corrupt.
    """
    if name not in NAMES:
        raise DataError(f"there is no task on sentences {name!r}; there are {', '.join(NAMES)}")
    if name in GENERATED:
        return _toy(name)
    files = SETS[name]
    place, directory = places.where(name, folder)
    splits = []
    try:
        for (file, source, content), rows in zip(stored(files, directory), files.examples, strict=True):
            # Parsed before the checksum is compared, because the number of a line says more than two of 32 digits.
            splits.append(_parse(content, name, source, rows))
            check(content, file, source)
    except DataError as error:
        raise DataError(f"{error}. {places.remedy(name, place)}") from None
    train, dev = splits
    return TextTask(name, files.title, KINDS[name], train, dev, files.checksum)


def _parse(content: bytes, name: str, source: str, expected: int) -> Split:
    form = FORMATS[name]
    try:
        # MRPC begins with a byte order mark.
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{source} is not UTF-8: byte {error.start:,} is {content[error.start]:#04x}") from None
    # Not splitlines: letters such as U+2028 would end a line too. CoLA's dev.tsv has no line feed at its end.
    lines = text.removesuffix("\n").split("\n")
    if form.header is not None and (header := lines.pop(0)) != form.header:
        raise DataError(f"{source} begins with {header[:60]!r}, expected the columns {form.header.split()}")
    if len(lines) != expected:
        raise DataError(f"{source} has a wrong number of rows: {len(lines):,}, expected {expected:,}")
    rows = [line.split("\t") for line in lines]
    first_line = 1 if form.header is None else 2
    for number, row in enumerate(rows, first_line):
        if len(row) != form.columns:
            raise DataError(f"{source}, line {number}: {len(row)} columns, expected {form.columns}")
    try:
        return Split(
            first=tuple(row[form.first] for row in rows),
            second=None if form.second is None else tuple(row[form.second] for row in rows),
            labels=_labels([row[form.label] for row in rows], KINDS[name], first_line),
        )
    except ValueError as error:
        raise DataError(f"{source}, {error}") from None


def _labels(texts: list[str], kind: Kind, first_line: int) -> tuple[int, ...] | tuple[float, ...]:
    if kind == "similarity":
        return tuple(_score(text, number) for number, text in enumerate(texts, first_line))
    for number, text in enumerate(texts, first_line):
        if text not in ("0", "1"):
            raise ValueError(f"line {number}: label {text!r}, expected 0 or 1")
    return tuple(map(int, texts))


def _score(text: str, number: int) -> float:
    try:
        score = float(text)
    except ValueError:
        score = -1.0
    if not 0 <= score <= HIGHEST_SCORE:
        raise ValueError(f"line {number}: score {text!r}, expected a number from 0 to {HIGHEST_SCORE:g}")
    return score


def _toy(name: str) -> TextTask:
    kind = KINDS[name.removeprefix("toy-")]
    rows = toy_text.generate(kind, sum(GENERATED[name].examples))
    training = GENERATED[name].examples[0]
    train, dev = (
        Split(
            first=tuple(row.first for row in part),
            second=None if kind == "acceptability" else tuple(row.second for row in part),
            labels=tuple(row.label for row in part),
        )
        for part in (rows[:training], rows[training:])
    )
    return TextTask(name, f"{name} (generated)", kind, train, dev, md5(repr(rows).encode()))
