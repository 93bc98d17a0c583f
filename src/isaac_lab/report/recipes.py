"""The recipe suite for people: its tables, its picture, and the blocks of its page."""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from isaac_lab.charts import dots
from isaac_lab.charts.figure import Figure, Look, Method
from isaac_lab.record import Store
from isaac_lab.records import StoreError
from isaac_lab.report import WORDS, parts, tables
from isaac_lab.report.docs import Blocks
from isaac_lab.report.parts import Block
from isaac_lab.report.tables import Row, Table
from isaac_lab.studies.recipes import ARMS, RECIPES, RULES
from isaac_lab.studies.verdicts import Sample, Standing, standings, summed_up
from isaac_lab.words import number

LINE, TUNED = Method("with the line", Look("red")), Method("plain, best of five rates", Look("black"))
NOTES = WORDS["recipes"]


def table(found: Sequence[Standing]) -> Table:
    """The verdicts."""
    columns = ["Recipe", "Measured", "Plain", "With the line", "Plain, best rate", "Gain (95 %)", "Margin"]
    columns += ["p better", "p not worse", "Step", "Verdict"]
    rows = []
    for own in found:
        gain, low, high = (_scaled(own, value) for value in own.gain)
        interval = "–" if math.isnan(gain) else f"{_signed(gain)} ({_signed(low)} to {_signed(high)})"
        cells = [own.recipe.title, f"{_title(own)} {'↑' if own.recipe.higher else '↓'}"]
        cells += [*(_mean(own, own.samples[arm]) for arm in ARMS), interval, number(_scaled(own, own.margin), 2)]
        cells += [_p(own.p_better), _p(own.p_not_worse), f"{own.step[1] / own.step[0]:.2f} ×" if own.step else "–"]
        rows.append(Row((*cells, own.verdict), own.verdict == "better"))
    note = NOTES["verdicts"].format(seeds=RULES.seeds[found[0].scale] if found else 0)
    return tables.table(columns, rows, ("Recipe", "Measured", "Verdict"), "With one line, and nothing else", note)


def brief(found: Sequence[Standing]) -> Table:
    """The same for a terminal."""
    return table(found).only([0, 2, 3, 4, -4, -3, -2, -1])


def losses(found: Sequence[Standing]) -> Table:
    """What stands behind the verdicts: losses, the best of five rates, and the time of a step."""
    others = ("with the line", "best rate")
    measured = ("Training loss: plain", *others, "Test loss: plain", *others)
    columns = ("Recipe", *measured, "Rate", "Best of five", "p against it", "ms a step: plain", others[0])
    rows = []
    for own in found:
        each = [number(own.samples[arm].losses[which], 4) for which in (0, 1) for arm in ARMS]
        rate = "–" if own.rate is None else f"{own.rate:.3g}" + (" (edge)" if own.edge else "")
        steps = [f"{1e3 * value:.3g}" for value in own.step] if own.step else ["–", "–"]
        rows.append((own.recipe.title, *each, f"{own.recipe.settings['learning_rate']:.3g}", rate, _p(own.p_tuned), *steps))
    return tables.table(columns, rows, ("Recipe",), "Losses, rates and times", NOTES["losses"])


def rules(scale: str) -> Table:
    """The recipes as they are run."""
    rows = []
    for recipe in RECIPES.values():
        budget = recipe.budget(scale)
        settings = {name.replace("_", " "): value for name, value in {**recipe.settings, **budget.settings}.items()}
        words = (f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in settings.items())
        cells = (recipe.title, recipe.source, recipe.method, ", ".join(words), recipe.schedule)
        rows.append((*cells, f"{budget.steps:,}", f"{budget.margin:g}"))
    columns = ("Recipe", "Script", "Optimizer", "Settings", "Schedule", "Steps", "Margin")
    return tables.table(columns, rows, columns[:5], "The recipes")


def figure(found: Sequence[Standing], scale: str) -> Figure:
    """Gains in margins, with their intervals; below −1 a loss counts as harm."""
    rows: list[dict[str, object]] = []
    for own in found:
        for method, gain in ((LINE, own.gain), (TUNED, own.tuned)):
            value, low, high = (None if math.isnan(x) else round(x / own.margin, 4) for x in gain)
            words = "not known" if value is None else f"{_signed(_scaled(own, gain[0]))}, margin {_scaled(own, own.margin):g}"
            row: dict[str, object] = {"model": own.recipe.title, "method": method.label, "words": words}
            rows.append(row | {"value": value, "low": low, "high": high, "limit": -1, "limit_words": "the margin"})
    alt = f"Gain over the plain recipe in units of its margin. {summed_up(found)} The numbers are in the table."
    chart = dots.chart(f"recipes-{scale}", "", alt, rows, (LINE, TUNED), wide=True, width=640)
    title = "Public training scripts with one line added"
    subtitle = NOTES["picture"].format(scale=scale, seeds=RULES.seeds[scale])
    return Figure(f"figure-recipes-{scale}", (chart,), title, subtitle, methods=(LINE, TUNED))


def write(store: Store, scale: str) -> list[Standing]:
    """Tables and picture beside the records."""
    found = standings(store, scale)
    if not found:
        raise StoreError(f"there is no run of the recipes in {store.folder} that these rules made; leave out --draw-only")
    parts.leave(store.folder, f"Recipes, scale {scale}", figure(found, scale), _shown(found))
    return found


def blocks(out: Path, pictures: Path) -> Blocks:
    """What fills each block of a page: a scale each, and the rules."""

    def block(scale: str) -> str:
        if not (found := standings(Store(out / scale), scale)):
            return "No record has been made by the rules as they are."
        return parts.markdown([parts.Figure(figure(found, scale), f"recipes-{scale}"), *_shown(found)], pictures)

    made = {f"recipes-{scale}": partial(block, scale) for scale in ("quick", "standard")}
    return {**made, "recipes-rules": lambda: rules("standard").markdown()}


def _shown(found: Sequence[Standing]) -> list[Block]:
    """The tables, below each a point for each sentence."""
    shown: list[Block] = [summed_up(found)]
    for own in (table(found), losses(found)):
        shown += [own, [f"{part.rstrip('.')}." for part in own.note.split(". ")]]
    return shown


def _title(own: Standing) -> str:
    return str(NOTES["titles"].get(own.recipe.metric, own.recipe.metric))


def _scaled(own: Standing, value: float) -> float:
    """In per cent where the quantity is a share."""
    return 100 * value if "%" in _title(own) else value


def _mean(own: Standing, sample: Sample) -> str:
    if not sample.values:
        return "diverged" if sample.diverged else "–"
    text, deviation = number(_scaled(own, sample.mean), 4), _scaled(own, sample.deviation)
    text += "" if math.isnan(deviation) else f" ± {number(deviation, 2)}"
    return text + (f", {sample.diverged} diverged" if sample.diverged else "")


def _signed(value: float) -> str:
    return f"{'−' if value < 0 else '+'}{number(abs(value), 3)}"


def _p(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2g}"
