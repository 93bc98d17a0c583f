"""What Figure 6 and Table 1 share: a learning rate and a damping are searched for each method, and then other seeds are run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from isaac_lab import times
from isaac_lab.record import Store
from isaac_lab.stats import sample
from isaac_lab.studies import rules
from isaac_lab.studies.calls import Means, modes
from isaac_lab.trial import Trial, Value

Rates: TypeAlias = Mapping[str, Sequence[float]]
#: By table and scale.
KNOWN: Mapping[str, Any] = rules("paper/larger.toml")


@dataclass(frozen=True)
class Method:
    """A way to condition: its name in tables, its settings, and whether it is none."""

    label: str
    settings: tuple[tuple[str, str | int], ...] = ()
    plain: bool = False

    def on(self, base: Trial, damping: float | None, **settings: Value | None) -> Trial:
        """A run of the plain gradient, conditioned this way; the gradient has no damping."""
        if self.plain:
            return base.having(**settings)
        own = replace(base, method=f"{base.method}+isaac")
        return own.having(damping=damping, **{**dict(self.settings), **settings})

    def row(self, name: str, cells: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
        """Of a table."""
        return {"label": self.label, "method": name, "ours": not self.plain, "cells": cells}


@dataclass(frozen=True)
class Budget:
    """How much is searched and run at a scale, as `larger.toml` says it."""

    epochs: int
    seeds: int
    plain_rates: Rates
    rates: Rates
    dampings: Sequence[float]
    rounds: int = 10

    def tried(self, base: Trial, method: Method) -> tuple[Trial, ...]:
        """A run with each of the settings that a method may choose from."""
        rates, dampings = (self.plain_rates, [None]) if method.plain else (self.rates, self.dampings)
        return tuple(method.on(base, own, learning_rate=rate) for rate in rates[base.method] for own in dampings)


def by_processes(means: Means, command: str, *, small: bool) -> Means:
    """Several at once, where that is asked for; another process takes longer to start than a small network to train."""
    executor = "processes" if means.call.workers > 1 and not small else "local"
    return replace(means, call=replace(means.call, executor=executor, command=command))


def clocks(what: str, timed: Mapping[str, Mapping[str, Trial]], rounds: int, store: Store, means: Means, **about: Any) -> None:
    """Time the steps of all methods, given by mode, in each mode that the device has; `about` is kept beside the times."""
    call = means.call
    for mode in modes(call.device):
        if mode not in store.times():
            means.say(f"{what}: the time of a step, {mode}")
            how: dict[str, Any] = {"device": call.device, "folder": call.folder, "rounds": rounds}
            store.add_times(mode, times.measure(timed[mode], captured=mode == "captured", **how) | about)


def ratios(record: Mapping[str, Any], methods: Mapping[str, Method], form: str) -> str:
    """The times of steps over that of ∇, with their quartiles, for people."""
    entries = ((methods[name], own["ratio"]) for name, own in record["methods"].items())
    return ", ".join(form.format(label=method.label, **ratio) for method, ratio in entries if not method.plain)


def cell(values: Sequence[float | None], chosen: Trial, diverged: int, before: str = "") -> dict[str, Any]:
    """Of a table: what the seeds reached, with the settings that were chosen."""
    settings = f"{before}η {chosen.learning_rate:g}" + (f", λ {chosen.damping:g}" if chosen.get("damping") else "")
    settings += f", {diverged} diverged" if diverged else ""
    return sample(values) | {"diverged": diverged, "settings": settings}
