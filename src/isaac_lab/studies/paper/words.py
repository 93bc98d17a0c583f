"""How figures, tables and pages name what was run: data, scale, network."""

from collections.abc import Iterable, Mapping
from typing import Any

from isaac_lab.record import Record
from isaac_lab.studies.paper.folder import View

__all__ = ["DATA", "data_of", "setting"]

DATA = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "digits": "digits of 8 × 8 (not the paper's data)"}


def _name(about: Mapping[str, Any]) -> str:
    # Groups of runs that were converted have the name beside its checksum.
    found = about.get("data", "")
    return str(found["name"] if isinstance(found, Mapping) else found)


def data_of(records: Iterable[Record]) -> str:
    """The data sets, for people."""
    return " and ".join(DATA.get(name, name) for name in dict.fromkeys(_name(record.about) for record in records) if name)


def setting(view: View) -> str:
    """One line: data, scale, epochs, batch, seeds, and settings that are not the recipe's."""
    records = [record for outcome in view.outcomes for record in outcome.all()]
    trials = [record.trial for record in records]
    parts = [data_of(records) or "no data", f"scale “{view.scale.name}”"]
    epochs = sorted({trial.points for trial in trials})
    batches = sorted({int(trial.get("batch", 60)) for trial in trials})
    seeds = len({trial.seed for trial in trials})
    examples = sorted({int(trial.get("examples", 0)) for trial in trials} - {0})
    parts += [f"{_listed(epochs)} epoch{'' if epochs == [1] else 's'}", f"batch {_listed(batches)}"] if trials else []
    parts += [f"{_listed(examples)} training examples"] if examples else []
    parts += [f"{seeds} seed{'' if seeds == 1 else 's'}"] if trials else []
    settings = sorted({text for about in view.about.values() for text in about.get("settings", ())})
    parts += [f"with {', '.join(settings)}"] if settings else []
    return " · ".join(parts)


def _listed(numbers: Iterable[int]) -> str:
    return " and ".join(f"{number:,}" for number in numbers)
