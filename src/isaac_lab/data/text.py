"""Tasks on sentences, behind one `load`: three of GLUE from their tsv files, and three small ones that are generated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from isaac_lab.data import places, toy_text
from isaac_lab.data.catalogue import GENERATED, GLUE, SETS
from isaac_lab.data.files import DataError, md5

#: Is this a sentence of the language? Do both say the same? How similar is what they say?
Kind = Literal["acceptability", "paraphrase", "similarity"]
NAMES = (*GLUE, "toy-cola", "toy-mrpc", "toy-stsb")

KINDS: Mapping[str, Kind] = MappingProxyType({"cola": "acceptability", "mrpc": "paraphrase", "stsb": "similarity"})


@dataclass(frozen=True)
class Split:
    """Sentences, or the first and the second of each pair, with a label each; all tuples of one length.

    A label is 0 or 1 (1 for acceptable, and for the same meaning), or a score from 0.0 to 5.0 for similarity.
    """

    first: tuple[str, ...]
    second: tuple[str, ...] | None
    labels: tuple[int, ...] | tuple[float, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def of(self, numbers: Sequence[int]) -> "Split":
        """These examples."""
        columns: Any = (own and tuple(own[number] for number in numbers) for own in (self.first, self.second, self.labels))
        return Split(*columns)


@dataclass(frozen=True)
class TextTask:
    """A task on sentences: what is asked, what to train on, what to measure on (GLUE's test labels are not public)."""

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


#: Whether a line of names comes first, and the columns (from 0) of the sentences and the label. Nothing is quoted: `"` is a
#: letter like any other.
FORMATS: Mapping[str, tuple[bool, tuple[int, ...], int]] = MappingProxyType(
    {"cola": (False, (3,), 1), "mrpc": (True, (3, 4), 0), "stsb": (True, (7, 8), 9)}
)


def load(name: str, folder: Path | None = None) -> TextTask:
    """One of `NAMES`, read as `places.read` does, or generated."""
    if name not in NAMES:
        raise DataError(f"there is no task on sentences {name!r}; there are {', '.join(NAMES)}")
    if name in GENERATED:
        return _toy(name)
    train, dev = (_parse(content, name) for content in places.read(name, folder))
    return TextTask(name, SETS[name].title, KINDS[name], train, dev, SETS[name].checksum)


def _parse(content: bytes, name: str) -> Split:
    header, sentences, label = FORMATS[name]
    # MRPC begins with a byte order mark. Not splitlines: letters such as U+2028 would end a line too.
    lines = content.decode("utf-8-sig").removesuffix("\n").split("\n")[int(header) :]
    columns = list(zip(*(line.split("\t") for line in lines), strict=True))
    first, *second = (columns[number] for number in sentences)
    number = float if KINDS[name] == "similarity" else int
    return Split(first, second[0] if second else None, tuple(map(number, columns[label])))


def _toy(name: str) -> TextTask:
    made, kind = GENERATED[name], KINDS[name.removeprefix("toy-")]
    rows = toy_text.generate(kind, sum(made.examples))
    parts = (tuple(zip(*part, strict=True)) for part in (rows[: made.examples[0]], rows[made.examples[0] :]))
    train, dev = (Split(first, None if kind == "acceptability" else second, labels) for first, second, labels in parts)
    return TextTask(name, made.title, kind, train, dev, md5(repr(rows).encode()))
