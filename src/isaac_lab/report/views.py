"""What figures, tables and pages say of an experiment as it was run: data, scale, network, where its numbers come from."""

from collections.abc import Iterable, Mapping
from typing import Any

from isaac_lab.report.parts import Source
from isaac_lab.studies.paper.folder import View
from isaac_lab.studies.paper.recipe import Outcome

DATA = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "digits": "digits of 8 × 8 (not the paper's data)"}


def setting(view: View) -> str:
    """One line: data, scale, epochs, batch, seeds, and settings that are not the recipe's."""
    records = [record for outcome in view.outcomes for record in outcome.all()]
    trials = [record.trial for record in records]
    # Groups of runs that were converted have the name beside its checksum.
    known = [record.about.get("data", "") for record in records]
    names = dict.fromkeys(str(found["name"] if isinstance(found, Mapping) else found) for found in known)
    parts = [" and ".join(DATA.get(name, name) for name in names if name) or "no data", f"scale “{view.scale.name}”"]
    if trials:
        epochs, seeds = sorted({trial.points for trial in trials}), len({trial.seed for trial in trials})
        parts.append(f"{_listed(epochs)} epoch{'' if epochs == [1] else 's'}")
        parts.append(f"batch {_listed(sorted({int(trial.get('batch', 60)) for trial in trials}))}")
        examples = sorted({int(trial.get("examples", 0)) for trial in trials} - {0})
        parts += [f"{_listed(examples)} training examples"] if examples else []
        parts.append(f"{seeds} seed{'' if seeds == 1 else 's'}")
    if smaller := sum(outcome.smaller for outcome in view.outcomes):
        parts.append(f"{smaller} with a smaller rate, where the chosen one diverges")
    settings = sorted({text for about in view.about.values() for text in about.get("settings", ())})
    return " · ".join([*parts, *([f"with {', '.join(settings)}"] if settings else [])])


def _listed(numbers: Iterable[int]) -> str:
    return " and ".join(f"{number:,}" for number in numbers)


def rate(outcome: Outcome, group: str) -> str:
    """The learning rate that was chosen, and whether it is the lowest or highest of those that were tried."""
    chosen = outcome.rates[group]
    if chosen is None:
        return "all diverged"
    like = {own.name: own.like for own in outcome.panel.groups}[group] or group
    tried = outcome.tried[like]
    return f"{chosen:g}" + (" (edge)" if len(tried) > 1 and chosen in (min(tried), max(tried)) else "")


def calls_of(view: View, outcome: Outcome) -> list[Mapping[str, Any]]:
    """The calls that trained a panel."""
    known = view.about[outcome.panel.home].get("calls", ())
    return [call for call in known if call.get("panel", outcome.panel.name) == outcome.panel.name]


def source(view: View, directory: str) -> Source:
    """The folders of records that a view is made from, with the calls that wrote the panels in it."""
    calls = [call for outcome in view.outcomes for call in calls_of(view, outcome)]
    return Source.of((f"{directory}/{outcome.panel.home}/{view.scale.name}" for outcome in view.outcomes), calls)
