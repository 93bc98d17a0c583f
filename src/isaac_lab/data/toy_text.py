"""Generated sentences for three tasks of the kinds of CoLA, MRPC and STS-B: small, and the same every time.

A sentence tells who did what to whom and where, each in one of two words that mean the same, the place before or after the
rest. Such a sentence is acceptable; with two neighbouring words exchanged it is not. A pair is a paraphrase if all five things
agree, and its score is how many of them agree.
"""

import random
from typing import Literal, NamedTuple

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


class Row(NamedTuple):
    """A sentence or a pair with its label; `second` is empty where there is none."""

    first: str
    second: str
    label: int | float


def generate(kind: Literal["acceptability", "paraphrase", "similarity"], count: int, *, seed: int = 0) -> list[Row]:
    """Different rows, the same for the same seed; half of the labels 0 and half 1, or the scores 0 to 5 equally often."""
    source = random.Random(f"{kind} {seed}")
    make = {"acceptability": _acceptability, "paraphrase": _paraphrase, "similarity": _similarity}[kind]
    labels = [number % (6 if kind == "similarity" else 2) for number in range(count)]
    source.shuffle(labels)
    rows: dict[tuple[str, str], Row] = {}
    for label in labels:
        row = make(label, source)
        while (row.first, row.second) in rows:
            row = make(label, source)
        rows[row.first, row.second] = row
    return list(rows.values())


def _acceptability(label: int, source: random.Random) -> Row:
    words = _words(_meaning(source), source)
    if not label:
        # No two neighbours are words of one kind, so no exchange gives a sentence again.
        place = source.randrange(len(words) - 1)
        words[place], words[place + 1] = words[place + 1], words[place]
    return Row(f"{' '.join(words)} .", "", label)


def _paraphrase(label: int, source: random.Random) -> Row:
    first = _meaning(source)
    second = first if label else _other(first, source.choice((1, 2)), source)
    return Row(_sentence(first, source), _sentence(second, source), label)


def _similarity(label: int, source: random.Random) -> Row:
    first = _meaning(source)
    return Row(_sentence(first, source), _sentence(_other(first, len(SLOTS) - label, source), source), float(label))


def _meaning(source: random.Random) -> Meaning:
    return tuple(source.randrange(len(slot)) for slot in SLOTS)


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
