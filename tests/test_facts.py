"""One value for each figure: docs/facts.toml has it, the record gives it, and every page that states it states this one."""

import functools
import json
import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from isaac_lab import times
from isaac_lab.record import Store
from isaac_lab.report import docs
from isaac_lab.report import rates as report
from isaac_lab.report.race import summaries
from isaac_lab.stats import LEVEL, contrast, holm
from isaac_lab.studies.rates import Cell, cells
from isaac_lab.studies.verdicts import Standing, standings

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
FACTS: dict[str, Any] = tomllib.loads((DOCS / "facts.toml").read_text(encoding="utf-8"))
PAGES = {page.name: page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *sorted(DOCS.glob("*.md")))}


def words(text: str) -> str:
    return " ".join(re.sub(r"<!--.*?-->|</?\w[^>]*>", " ", text, flags=re.DOTALL).split())


@functools.cache
def record(path: str) -> Any:
    return json.loads((ROOT / "results" / f"{path}.json").read_text(encoding="utf-8"))


def method(kind: str, name: str, case: str) -> dict[str, Any]:
    """Of a benchmark's case; `reduce` is ζ* with "reduce" too, and a size is width/batch."""
    for own in record(f"bench/{kind}")["cases"]:
        if case in (own["name"], f"{own.get('width')}/{own.get('batch')}"):
            return next(one for one in own["methods"] if one["name"] in (name, f"zeta_star {name}"))
    raise LookupError(case)


def ratio(kind: str, name: str, *cases: str) -> str:
    found = [float(method(kind, name, case)["ratio"]["median"]) for case in cases]
    ends = dict.fromkeys(f"{end:.3g}" if end >= 10 else f"{end:.2f}" for end in (min(found), max(found)))
    return " to ".join(ends)


def ratio3(kind: str, name: str, case: str) -> str:
    return f"{method(kind, name, case)['ratio']['median']:.3f}"


def launches(kind: str, name: str, case: str) -> str:
    return f"{method(kind, name, case)['launches']:,}"


def memory(kind: str, case: str) -> str:
    plain, ours = (method(kind, name, case)["peak_bytes"] for name in ("gradient", "zeta_star"))
    return f"{100 * (ours / plain - 1):.1f} %"


def _over_plain(quantity: str, kind: str, name: str, cases: tuple[str, ...]) -> list[float]:
    return [method(kind, name, case)[quantity] / method(kind, "gradient", case)[quantity] for case in cases]


def busy(kind: str, name: str, *cases: str) -> str:
    found = _over_plain("device_seconds", kind, name, cases)
    return " to ".join(f"{end:.3g}" for end in (min(found), max(found)))


def peak(kind: str, name: str, *cases: str) -> str:
    more = 100 * (max(_over_plain("allocated_bytes", kind, name, cases)) - 1)
    return f"{more:.1f} %" if more < 1 else f"{more:.0f} %"


@functools.cache
def recipes(scale: str = "quick") -> dict[str, Standing]:
    return {own.recipe.name: own for own in standings(Store(ROOT / "results" / "recipes" / scale), scale)}


def full(name: str, what: str) -> str:
    return recipe(name, what, "standard")


def recipe(name: str, what: str, scale: str = "quick") -> str:
    own = recipes(scale)[name]
    if what == "holm":
        known = {each: one.p_better for each, one in recipes(scale).items() if one.verdict != "not run whole"}
        return f"{holm(known)[name]:.2g}"
    if what in ("p", "p_tuned"):
        return f"{own.p_better if what == 'p' else own.p_tuned:.2g}"
    value = own.samples[what].mean
    if "accuracy" in own.recipe.metric:
        return f"{100 * value:.2f} %"
    return f"{value:.3f}" if value < 1 else f"{value:.4g}"


@functools.cache
def race_ends() -> dict[str, list[float]]:
    return {
        f"{summary['workload']}/{summary['scale']} {own['name']}": own["final"]["values"]
        for summary in summaries(ROOT / "results" / "race")
        for own in summary["methods"]
        if own["n"]
    }


def race(where: str, *names: str) -> str:
    found = [race_ends()[f"{where} {name}"] for name in names]
    return f"{contrast(*found).p:.2g}" if len(found) == 2 else f"{sum(found[0]) / len(found[0]):.3g}"


def digits(first: str, *rest: str) -> str:
    demo = record("demo/records")
    if first == "p":
        ends = [
            [run["measurements"][-1]["train_loss"] for run in demo["runs"] if run["method"].replace(" ", "") == name]
            for name in rest
        ]
        return f"{contrast(*ends).p:.2g}"
    known = {own["method"].replace(" ", ""): own for own in demo["summary"]}
    if first == "slower":
        plain, ours = (known[name]["seconds_per_epoch"] for name in rest)
        return f"{ours / plain:.2f}"
    settings = {own["name"].replace(" ", ""): own for own in demo["config"]["methods"]}
    return f"{(known[first] | settings[first])[rest[0]]:.2g}"


def cell(page: str, row: str, column: str) -> str:
    line = next(line for line in PAGES[page].splitlines() if line.startswith(f"| {row} |"))
    return line.removeprefix(f"| {row} |").strip("| ").split(" | ")[int(column)].strip()


@functools.cache
def rates_cells() -> tuple[Cell, ...]:
    return tuple(cells(Store(ROOT / "results" / "rates" / "quick"), "quick"))


def tuned(what: str) -> str:
    """In how many recipes plain at the best of five rates ends ahead of the line, or behind it."""
    sure = [own for own in recipes().values() if own.p_tuned < LEVEL]
    ahead = sum(own.tuned[0] > own.gain[0] for own in sure)
    return str({"ahead": ahead, "behind": len(sure) - ahead}[what])


def rates(optimizer: str, what: str) -> str:
    """The best rate of each arm; `higher`: at how many rates the line is ahead, p < 0.05 after Holm."""
    own = [cell for cell in rates_cells() if cell.optimizer == optimizer]
    if what == "higher":
        p = holm({str(cell.rate): contrast(cell.line, cell.plain).p for cell in own})
        return str(sum(p[str(cell.rate)] < LEVEL and fmean(cell.line) > fmean(cell.plain) for cell in own))
    plain, line = (max((getattr(cell, arm) for cell in own), key=fmean) for arm in ("plain", "line"))
    return f"{contrast(line, plain).p:.2g}" if what == "p" else f"{100 * fmean({'plain': plain, 'line': line}[what]):.1f} %"


def step(folder: str, device: str, plain: str, ours: str) -> str:
    """The time of a step with the line over a plain one, methods taking turns."""
    seconds = times.seconds(Store(ROOT / "results" / folder).times()[device])
    return f"{seconds[ours] / seconds[plain]:.2f}"


KINDS: dict[str, Callable[..., str]] = {
    own.__name__: own
    for own in (ratio, ratio3, launches, memory, busy, peak, step, recipe, full, tuned, rates, race, digits, cell)
}


@pytest.mark.parametrize("name", FACTS)
def test_a_fact_is_what_its_record_says(name: str) -> None:
    kind, *given = shlex.split(FACTS[name]["of"])
    assert KINDS[kind](*given) == FACTS[name]["value"]


@pytest.mark.parametrize("name", FACTS)
def test_pages_state_the_fact_with_one_value(name: str) -> None:
    for pattern in FACTS[name]["said"]:
        stated = {page: found for page, text in PAGES.items() for found in re.findall(pattern, words(text))}
        assert stated, f"no page says {pattern!r}: take it out, or correct how pages say it"
        other = {page: found for page, found in stated.items() if found.rstrip(",;.") != FACTS[name]["value"]}
        assert not other, f"{other} in place of {FACTS[name]['value']}"


def test_the_block_of_learning_rates_is_that_of_its_record(tmp_path: Path) -> None:
    (tmp_path / "figures").mkdir()
    copy = tmp_path / "which.md"
    copy.write_text(PAGES["which.md"], encoding="utf-8")
    docs.fill(copy, report.blocks(ROOT / "results" / "rates", tmp_path / "figures"))
    assert copy.read_text(encoding="utf-8") == PAGES["which.md"]
    name = "figures/rates-quick.svg"
    assert (tmp_path / name).read_text(encoding="utf-8") == (DOCS / name).read_text(encoding="utf-8")
