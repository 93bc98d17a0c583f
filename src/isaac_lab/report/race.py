"""A race as people see it: its picture, its table with the rules below, the pages that show it, and its part of the report."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from isaac_lab.charts import lines
from isaac_lab.charts.draw import pictures
from isaac_lab.charts.figure import Figure, Method, identifier, look
from isaac_lab.charts.lines import Axis, Line, Panel, Target
from isaac_lab.record import Store
from isaac_lab.report import WORDS, parts, race_rules
from isaac_lab.report.docs import Blocks, DocsError
from isaac_lab.report.parts import Block, Heading, Notes, Section, Source, missing
from isaac_lab.report.tables import Row, Table, spread
from isaac_lab.report.tables import table as made
from isaac_lab.stats import LEVEL
from isaac_lab.studies import numbers
from isaac_lab.studies.race.race import BELOW_ONE, COURSES
from isaac_lab.studies.race.standings import CONTROL, lowest, pairs, summarize
from isaac_lab.words import number

Record = Mapping[str, Any]

#: The largest first.
SCALES = ("standard", "full", "quick", "smoke")
#: How numbers and their deviations are written.
FINE = (".3g", ".1g")
#: Quantities that are shares, and shown in per cent.
SHARES = ("accuracy", "test_accuracy", "f1")
#: Times the largest loss of an untrained network: what lies above has diverged, and would press the rest flat.
CEILING = 1.5
#: Raced before there were rules.
OLD = ("mnist-autoencoder", "char-gpt")
#: Of the lines of ours, and of the others.
WIDTHS = {True: 2.6, False: 1.6}
NOTES = WORDS["race"]


@dataclass(frozen=True)
class Summary:
    """What the records of a race at a scale say, and what the page calls their folder."""

    name: str
    scale: str
    data: dict[str, Any]


def summaries(races: Path, name: str = "") -> list[Summary]:
    """All of each workload, the largest scale first; smoke tests only where there is nothing else. `name` is the folder's."""
    order, found = [*COURSES, *OLD], []
    folders = sorted(path for path in races.glob("*") if path.is_dir())
    for folder in sorted(folders, key=lambda path: order.index(path.name) if path.name in order else len(order)):
        there = [scale for scale in SCALES if (folder / scale / "trials.jsonl").is_file()]
        for scale in [scale for scale in there if scale != "smoke"] or there:
            found.append(Summary(f"{name}/{folder.name}/{scale}", scale, summarize(Store(folder / scale))))
    return found


def ended(method: Record, *, higher: bool = False) -> tuple[bool, float]:
    """The order of a table: the best at the end first, then who did not run."""
    mean = (method["final"] or {}).get("mean")
    return not method["n"], math.inf if mean is None else -mean if higher else mean


def table(summary: Record) -> Table:
    """Where everybody ended, and who reached the target when; one that did not run has its reason."""
    steps = f"{summary['steps']:,} steps"
    columns = ["Method", "Settings", f"{summary['quantity_title']} at {steps}", *summary["metric_titles"].values()]
    columns += ["Steps to target", "Seconds to target", "ms per step", "n"]
    methods = sorted(summary["methods"], key=lambda method: ended(method, higher=summary.get("higher", False)))
    note = " ".join(NOTES[name] for name in ("table", *(["ruled"] if summary.get("rules") else [])))
    caption = f"{summary['title']}: at the budget of {steps}, and to the target"
    return made(columns, [_row(method, summary, len(columns)) for method in methods], columns[:2], caption, note)


def brief(summary: Record) -> Table:
    """The same for a terminal, of those that ran."""
    whole = table({**summary, "methods": [method for method in summary["methods"] if method["n"]]})
    kept = whole.only([0, 2, *range(len(whole.columns) - 4, len(whole.columns))])
    return replace(kept, columns=("Method", "At the end", "Steps", "Seconds", "ms per step", "n"))


def _row(method: Record, summary: Record, columns: int) -> Row:
    if not method["n"]:
        return Row((method["label"], f"not run: {method['reason']}", *["–"] * (columns - 2)), method["ours"])
    known = {summary["quantity"]: method["final"]} | {name: method["metrics"][name] for name in summary["metric_titles"]}
    each, ruled = method["seconds_per_step"], bool(summary.get("rules"))
    cells = [method["label"], _settings(method), *(spread(found, *_style(name)) for name, found in known.items())]
    cells.append(_reached(method["steps_to_target"], ",.0f", ruled=ruled))
    # Nobody knows the seconds of steps that have not been timed.
    cells.append("–" if each is None else _reached(method["seconds_to_target"], *FINE, ruled=ruled))
    cells.append("–" if each is None else f"{_milliseconds(each)} ({method['mode']})")
    cells.append(f"{method['n']}" + (f", {method['diverged']} diverged" if method["diverged"] else ""))
    bad = {columns - 1: method["diverged"], columns - 3: None in method["steps_to_target"]["values"]}
    return Row(tuple(cells), method["ours"], marks={place: "bad" for place, wrong in bad.items() if wrong})


def _style(quantity: str) -> tuple[str, ...]:
    return (".1%",) if quantity in SHARES else FINE


def _settings(method: Record) -> str:
    words = [
        f"{NOTES['letters'][name]} {value:{'.4g' if name in BELOW_ONE else '.2g'}}"
        for name, value in method["settings"].items()
    ]
    return " ".join(words) + (" (edge)" if method["edge"] else "")


def _reached(found: Record, *styles: str, ruled: bool = False) -> str:
    """The mean over seeds; by the rules the median, in which a seed that misses the target is infinite."""
    there = [value for value in found["values"] if value is not None]
    if not there:
        return "–" if found["values"] == [] else "never"
    if len(there) == len(found["values"]) and not ruled:
        return spread(found, *styles)
    share = "" if len(there) == len(found["values"]) else f" ({len(there)} of {len(found['values'])})"
    middle = found["median"] if ruled else found["mean"]
    return ("∞" if middle is None else format(middle, styles[0])) + share


def compared(summary: Record) -> Table:
    """Who is better than whom, by the comparisons that the rules name."""
    labels = {method["name"]: method["label"] for method in summary["methods"]}
    sign = 1 if summary["higher"] else -1
    rows = []
    for own in summary["compared"]:
        verdict = "not shown" if own["holm"] >= LEVEL else "better" if sign * own["value"] > 0 else "worse"
        numbers = (f"{own['value']:+.3g}", f"{own['p']:.2g}", f"{own['holm']:.2g}")
        rows.append(Row((*(labels[name] for name in own["names"]), *numbers, verdict), verdict == "better"))
    note = NOTES["compared"].format(seeds=summary["seeds"])
    columns = ("Method", "With", "Difference", "p", "p, Holm", "Verdict")
    return made(columns, rows, ("Method", "With", "Verdict"), "Compared at the end", note)


def clocks(summary: Record) -> Table:
    """The time of a step on both clocks, with ISAAC switched off, and until the first step is ready."""
    rows = []
    for method in summary["methods"]:
        if method["n"] and method["clocks"]:
            both = [_milliseconds(method["clocks"].get(mode)) for mode in ("eager", "captured")]
            ready = method["ready"].get(method["mode"])
            control = _milliseconds(method["control"].get(method["mode"])) if method["ours"] else ""
            rows.append(Row((method["label"], *both, control, "–" if ready is None else f"{ready:.2g}"), method["ours"]))
    columns = ("Method", "Eager, ms", "Captured, ms", f"{CONTROL.removeprefix(', ')}, ms", "Ready, s")
    return made(columns, rows, ("Method",), "The time of a step", NOTES["clocks"])


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1e3 * seconds:.3g}"


def said(summary: Record) -> list[str]:
    """What a reader has to know of the table."""
    target = "none" if summary["target"] is None else number(summary["target"], 4)
    found = [f"Target: {_lower(summary['quantity_title'])} {target} ({summary['target_by']})."]
    known = {method["name"]: method for method in summary["methods"] if method["n"]}
    for name in summary.get("published", {}).keys() & known.keys():
        style, mean = ".1%" if summary["quantity"] in SHARES else ".5g", known[name]["final"]["mean"]
        here = "diverges here" if mean is None else f"reaches {mean:{style}} here"
        found.append(f"{known[name]['label']} {here}; published: {summary['published'][name]:{style}}.")
    known = {name: summary.get(name) for name in ("trials", "seeds", "batch", "rules", "commit")}
    return [*found, *(line.format(**known) for line in NOTES["said" if summary.get("rules") else "said_first"])]


def _lower(title: str) -> str:
    """Within a sentence."""
    return title if title[:2].isupper() or title[:2] == "F1" else title[:1].lower() + title[1:]


def ends(found: Sequence[Summary], *, once: bool = False) -> Table:
    """Where each optimizer ended with ISAAC and without, with Welch's p over seeds; `once`: each race is named in one row."""
    rows = []
    for summary in found:
        race = summary.data
        scale = "smoke test" if summary.scale == "smoke" else summary.scale
        title, winner = f"{race['title']} ({scale}, n = {race['seeds']})", lowest(race) or "–"
        for pair in pairs(race):
            own, shown, mark = pair.difference, "–", ""
            if own is not None:
                shown = own.words.removeprefix("p = ")
                mark = "good" if own.behind else "bad" if own.ahead else ""
            means = ["–" if end["mean"] is None else f"{end['mean']:.4g}" for end in (pair.alone, pair.ours)]
            rows.append(Row((title, pair.label, *means, shown, winner), marks={4: mark} if mark else {}))
            title, winner = ("", "") if once else (title, winner)
    columns = ("Workload", "Optimizer", "Loss alone", "Loss with ISAAC", "p", "Lowest of all")
    caption = "Loss at the end of the budget, alone and with ISAAC"
    return made(columns, rows, ("Workload", "Optimizer", "Lowest of all"), caption, NOTES["ends"])


def write(store: Store) -> dict[str, Any]:
    """The picture, and every measurement as numbers.csv; returns the summary."""
    summary = summarize(store)
    numbers.write(store.folder / "numbers.csv", store.records())
    pictures(figure(summary), store.folder / "figure")
    return summary


def figure(summary: Record, name: str = "race") -> Figure:
    """The loss over steps and over seconds; what has ISAAC is solid, what it is compared with broken."""
    starts = [curve["loss"][0] for method in summary["methods"] for curve in method["curves"] if curve["loss"]]
    highest = max((loss for loss in starts if loss is not None), default=math.inf)
    ceiling = math.inf if summary.get("higher") else CEILING * highest
    methods: list[Method] = []
    drawn: list[Line] = []
    for method in sorted(summary["methods"], key=lambda own: _arrived(own, summary)):
        if method["curves"]:
            own = look(_known_as(method["name"]), len(methods))
            methods.append(Method(method["label"], replace(own, width=WIDTHS[method["ours"]]), method["ours"]))
            drawn += _lines(method["label"], method["curves"], ceiling)
    title, value, best = summary["quantity_title"], summary["target"], lowest(summary)
    logarithmic = Axis("seconds", "Seconds", label="Seconds (log)", logarithmic=True)
    timed = any(value for line in drawn for value in line.columns["seconds"])
    alt = (
        f"{title} of {len(methods)} methods over training, {summary['title']}. Solid lines have ISAAC. "
        f"{f'Best at the budget: {best}.' if best else ''} The numbers are in the table below."
    )
    return lines.figure(
        f"figure-{name}",
        [Panel(name, "", alt, drawn)],
        methods,
        [Axis("loss", title, ".4~g")],
        [Axis("step", "Steps", ",d"), Axis("seconds", "Seconds", ",.3~r"), logarithmic],
        logarithmic=not summary.get("higher"),
        target=Target(value, f"target {number(value, 3)}", summary["target_by"]) if value else None,
        picture=(500, 400),
        views=(({"Horizontal": "Steps"}, *([{"Horizontal": logarithmic.label}] if timed else [])),),
        title=summary["title"],
        subtitle=_subtitle(summary),
        caption=NOTES["caption"],
    )


def _arrived(method: Record, summary: Record) -> tuple[int, float]:
    """Who is at the target first in seconds comes first; then who never is, by the value at the end; then who did not run."""
    if not method["n"]:
        return 3, 0.0
    seconds, steps = method["seconds_to_target"], method["steps_to_target"]
    if None not in steps["values"]:
        return 0, steps["mean"] if seconds["mean"] is None else seconds["mean"]
    final = method["final"]["mean"]
    return (2, 0.0) if final is None else (1, -final if summary.get("higher") else final)


def _known_as(name: str) -> str:
    """The name of its look."""
    base = name.removeprefix("isaac-").removesuffix("-running")
    ours = f"{base}+isaac" if name.startswith("isaac-") else base
    return f"{ours} running" if name.endswith("-running") else ours


def _lines(label: str, curves: Sequence[Record], ceiling: float) -> list[Line]:
    """The mean over seeds, and each of them."""
    seeds = [_columns(curve, ceiling) for curve in curves]
    over = lines.mean(label, seeds, "step", ("loss",))
    each = [Line(label, f"seed {curve['seed']}", own) for curve, own in zip(curves, seeds, strict=True)]
    # Seeds that have no step in common have no mean, and are shown in place of it.
    return [*([over] if over else [replace(line, over_seeds=True) for line in each]), *each]


def _columns(curve: Record, ceiling: float) -> dict[str, list[float | None]]:
    rows = zip(curve["steps"], curve["seconds"], curve["loss"], strict=True)
    kept = [row for row in rows if row[2] is not None and row[2] <= ceiling]
    return {name: [row[place] for row in kept] for place, name in enumerate(("step", "seconds", "loss"))}


def _subtitle(summary: Record) -> str:
    smoke = f"{NOTES['smoke']} " if summary["scale"] == "smoke" else ""
    left = [method["label"] for method in summary["methods"] if not method["n"]]
    missing = f" Not run: {', '.join(left)}." if left else ""
    how = "each in one CUDA graph where it can be" if summary["mode"] == "captured" else "eager"
    return (
        f"{smoke}Mean of {summary['seeds']} seeds; bands from the lowest to the "
        f"highest. {len(summary['methods']) - len(left)} methods, {summary['trials']} tuning trials each. Seconds of training "
        f"steps, {how}. In the legend: who reaches the target first comes first.{missing}"
    )


def blocks(races: Path, pictures: Path) -> Blocks:
    """The one table, each race with its picture, and the rules; smoke tests say nothing of the methods."""

    def found() -> list[Summary]:
        raced = [summary for summary in summaries(races, "results/race") if summary.scale != "smoke"]
        if not raced:
            raise DocsError(f"{races} has no race but smoke tests")
        return raced

    return {
        "race": lambda: ends(found(), once=True).markdown(),
        "races": lambda: parts.markdown(_all(found()), pictures),
        "race-rules": lambda: race_rules.markdown("standard"),
    }


def section(found: Sequence[Summary]) -> Section:
    """All races on the page, the answer first."""
    answer: list[Block] = [ends(found)] if found else [missing("The race", "race --scale standard")]
    return Section.of("race", [*answer, *_all(found)])


def _all(found: Sequence[Summary]) -> list[Block]:
    """Each race with its picture, its tables and what a reader has to know of them."""
    shown: dict[str, list[Block]] = {}
    for summary in found:
        data, workload = summary.data, summary.data["workload"]
        # Of several scales the largest has the short name.
        name = identifier(workload) if identifier(workload) not in shown else identifier(workload, summary.scale)
        about = [data["data"], f"{data['steps']:,} steps of {data['batch']:,}", f"{data['seeds']} seeds", data["mode"]]
        shown[name] = [
            Heading(f"race-{name}", f"{data['title']}, scale “{summary.scale}”"),
            (f"**{NOTES['smoke']}** " if summary.scale == "smoke" else "") + f"{' · '.join(about)}.",
            parts.Figure(figure(data, f"curve-{name}"), f"race-{workload}-{summary.scale}"),
            table(data),
            *([compared(data), clocks(data)] if data.get("rules") else []),
            Notes(tuple(said(data))),
            Source.of([summary.name], [data]),
        ]
    return [block for own in shown.values() for block in own]
