"""Tasks on sentences, behind one `load`: three of GLUE from their tsv files, three small ones that are generated; and plays."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple

from isaac_lab.data.files import GENERATED, GLUE, SETS, DataError, File, check, md5, read, unpack

#: Is this a sentence of the language? Do both say the same? How similar is what they say?
Kind = Literal["acceptability", "paraphrase", "similarity"]
NAMES = (*GLUE, "toy-cola", "toy-mrpc", "toy-stsb")
KINDS: Mapping[str, Kind] = {"cola": "acceptability", "mrpc": "paraphrase", "stsb": "similarity"}


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
FORMATS: Mapping[str, tuple[bool, tuple[int, ...], int]] = {
    "cola": (False, (3,), 1),
    "mrpc": (True, (3, 4), 0),
    "stsb": (True, (7, 8), 9),
}
#: What fills each place of a sentence: qualities, people, actions, animals, spots; each with two words for it.
SLOTS = tuple(
    tuple(tuple(words.split("/")) for words in slot.split())
    for slot in (
        "big/large small/little quick/fast happy/glad angry/mad quiet/silent",
        "doctor/physician boy/lad teacher/tutor thief/robber king/ruler child/kid",
        "saw/noticed helped/aided found/discovered followed/pursued called/phoned",
        "dog/hound rabbit/bunny horse/pony snake/serpent cat/kitty donkey/mule",
        "road/street sea/ocean wood/forest shop/store rock/stone house/home",
    )
)
#: Every word that occurs, for tests that need a vocabulary.
WORDS = tuple(sorted({"the", "near", *(word for slot in SLOTS for words in slot for word in words)}))
#: Of each slot, the number of the thing.
Meaning = tuple[int, ...]


def load(name: str, folder: Path | None = None) -> TextTask:
    """One of `NAMES`, read as `files.read` does, or generated."""
    if name not in NAMES:
        raise DataError(f"there is no task on sentences {name!r}; there are {', '.join(NAMES)}")
    if name not in GENERATED:
        train, dev = (_parse(content, name) for content in read(name, folder))
        return TextTask(name, SETS[name].title, KINDS[name], train, dev, SETS[name].checksum)
    made, kind = GENERATED[name], KINDS[name.removeprefix("toy-")]
    rows = generate(kind, sum(made.examples))
    parts = (tuple(zip(*part, strict=True)) for part in (rows[: made.examples[0]], rows[made.examples[0] :]))
    train, dev = (Split(first, None if kind == "acceptability" else second, labels) for first, second, labels in parts)
    return TextTask(name, made.title, kind, train, dev, md5(repr(rows).encode()))


def _parse(content: bytes, name: str) -> Split:
    header, sentences, label = FORMATS[name]
    # MRPC begins with a byte order mark. Not splitlines: letters such as U+2028 would end a line too.
    lines = content.decode("utf-8-sig").removesuffix("\n").split("\n")[int(header) :]
    columns = list(zip(*(line.split("\t") for line in lines), strict=True))
    first, *second = (columns[number] for number in sentences)
    number = float if KINDS[name] == "similarity" else int
    return Split(first, second[0] if second else None, tuple(map(number, columns[label])))


class Row(NamedTuple):
    """A sentence or a pair with its label; `second` is empty where there is none."""

    first: str
    second: str
    label: int | float


def generate(kind: Kind, count: int, *, seed: int = 0) -> list[Row]:
    """Different rows, the same for the same seed; half of the labels 0 and half 1, or the scores 0 to 5 equally often.

    A sentence tells who did what to whom and where, each in one of two words that mean the same, the place before or after the
    rest. Such a sentence is acceptable; with two neighbouring words exchanged it is not. A pair is a paraphrase if all five
    things agree, and its score is how many of them agree.
    """
    source = random.Random(f"{kind} {seed}")
    labels = [number % (6 if kind == "similarity" else 2) for number in range(count)]
    source.shuffle(labels)
    rows: dict[tuple[str, str], Row] = {}
    for label in labels:
        row = _row(kind, label, source)
        while (row.first, row.second) in rows:
            row = _row(kind, label, source)
        rows[row.first, row.second] = row
    return list(rows.values())


def _row(kind: Kind, label: int, source: random.Random) -> Row:
    first = tuple(source.randrange(len(slot)) for slot in SLOTS)
    if kind == "acceptability":
        words = _words(first, source)
        if not label:
            # No two neighbours are words of one kind, so no exchange gives a sentence again.
            place = source.randrange(len(words) - 1)
            words[place], words[place + 1] = words[place + 1], words[place]
        return Row(f"{' '.join(words)} .", "", label)
    if kind == "paraphrase":
        second = first if label else _other(first, source.choice((1, 2)), source)
        return Row(_sentence(first, source), _sentence(second, source), label)
    return Row(_sentence(first, source), _sentence(_other(first, len(SLOTS) - label, source), source), float(label))


def _other(meaning: Meaning, changes: int, source: random.Random) -> Meaning:
    """The same with so many things replaced by others."""
    changed = list(meaning)
    for place in source.sample(range(len(SLOTS)), changes):
        # Any but the one that is there.
        changed[place] = (changed[place] + source.randrange(1, len(SLOTS[place]))) % len(SLOTS[place])
    return tuple(changed)


def _words(meaning: Meaning, source: random.Random) -> list[str]:
    quality, person, action, animal, spot = (source.choice(slot[number]) for slot, number in zip(SLOTS, meaning, strict=True))
    told, where = ["the", quality, person, action, "the", animal], ["near", "the", spot]
    return where + told if source.random() < 0.5 else told + where


def _sentence(meaning: Meaning, source: random.Random) -> str:
    return f"{' '.join(_words(meaning, source))} ."


#: 1.1 MB of plain text in the public domain, which comes with the package: "tiny Shakespeare", byte for byte.
SHAKESPEARE = File("shakespeare.txt", 1_115_394, "6fb458f1232090904fb40fe944165e91")


@cache
def shakespeare() -> str:
    """Plays, the whole text, checked."""
    name = f"{SHAKESPEARE.name}.gz"
    packed = resources.files(__package__).joinpath(name).read_bytes()
    return check(unpack(packed, SHAKESPEARE, name), SHAKESPEARE, name).decode("ascii")
