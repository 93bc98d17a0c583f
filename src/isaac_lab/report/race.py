"""A race as people see it: its picture, its table with the rules below, the pages that show it, and its part of the report."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from isaac_lab.charts import lines
from isaac_lab.charts.draw import pictures
from isaac_lab.charts.figure import Figure, Method, identifier, look
from isaac_lab.charts.lines import Axis, Line, Panel, Target
from isaac_lab.record import Store
from isaac_lab.report import WORDS, parts
from isaac_lab.report.docs import Blocks, DocsError
from isaac_lab.report.parts import Block, Heading, Source, missing
from isaac_lab.report.tables import Row, Table, spread
from isaac_lab.report.tables import table as made
from isaac_lab.stats import LEVEL
from isaac_lab.studies import numbers
from isaac_lab.studies.race.race import BELOW_ONE, COURSES, ENTRANTS, RULES, Course, entrants
from isaac_lab.studies.race.race import SCALES as BUDGETS
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
RULE = ("Rule", "What")


def summaries(races: Path, name: str = "") -> list[dict[str, Any]]:
    """All of each workload, the largest scale first; smoke tests only where there is nothing else.

    `name` is what a page calls the folder of all; "folder" in a summary is where its records are.
    """
    order, found = [*COURSES, *OLD], []
    folders = sorted(path for path in races.glob("*") if path.is_dir())
    for folder in sorted(folders, key=lambda path: order.index(path.name) if path.name in order else len(order)):
        there = [scale for scale in SCALES if (folder / scale / "trials.jsonl").is_file()]
        for scale in [scale for scale in there if scale != "smoke"] or there:
            found.append(summarize(Store(folder / scale)) | {"folder": f"{name}/{folder.name}/{scale}"})
    return found


def table(summary: Record) -> Table:
    """Where everybody ended, the best first, and who reached the target when; one that did not run has its reason."""
    steps, ruled = f"{summary['steps']:,} steps", bool(summary["rules"])
    columns = ["Method", "Settings", f"{summary['quantity_title']} at {steps}", *summary["metric_titles"].values()]
    columns += ["Steps to target", "Seconds to target", "ms per step", "n"]
    rows = []
    for method in sorted(summary["methods"], key=lambda method: _ended(method, summary)):
        if not method["n"]:
            rows.append(Row((method["label"], f"not run: {method['reason']}", *["–"] * (len(columns) - 2)), method["ours"]))
            continue
        settings = (
            f"{NOTES['letters'][name]} {value:{'.4g' if name in BELOW_ONE else '.2g'}}"
            for name, value in method["settings"].items()
        )
        cells = [method["label"], " ".join(settings) + (" (edge)" if method["edge"] else "")]
        known = {summary["quantity"]: method["final"]} | {name: method["metrics"][name] for name in summary["metric_titles"]}
        cells += [spread(found, *((".1%",) if name in SHARES else FINE)) for name, found in known.items()]
        cells.append(_reached(method["steps_to_target"], ",.0f", ruled=ruled))
        each, bad = method["seconds_per_step"], []
        # Nobody knows the seconds of steps that have not been timed.
        cells.append("–" if each is None else _reached(method["seconds_to_target"], *FINE, ruled=ruled))
        cells.append("–" if each is None else f"{_milliseconds(each)} ({method['mode']})")
        cells.append(f"{method['n']}" + (f", {method['diverged']} diverged" if method["diverged"] else ""))
        bad += [len(cells) - 1] if method["diverged"] else []
        bad += [len(cells) - 3] if None in method["steps_to_target"]["values"] else []
        rows.append(Row(tuple(cells), method["ours"], dict.fromkeys(bad, "bad")))
    note = " ".join(NOTES[name] for name in ("table", *(["ruled"] if ruled else [])))
    return made(columns, rows, columns[:2], f"{summary['title']}: at the budget of {steps}, and to the target", note)


def _ended(method: Record, summary: Record) -> tuple[bool, float]:
    """The best at the end first, then who did not run."""
    mean = method["final"]["mean"] if method["n"] else None
    return not method["n"], math.inf if mean is None else -mean if summary["higher"] else mean


def brief(summary: Record) -> Table:
    """The same for a terminal, of those that ran."""
    kept = table({**summary, "methods": [method for method in summary["methods"] if method["n"]]}).only([0, 2, -4, -3, -2, -1])
    return replace(kept, columns=("Method", "At the end", "Steps", "Seconds", "ms per step", "n"))


def _reached(found: Record, *styles: str, ruled: bool = False) -> str:
    """The mean over seeds; by the rules the median, in which a seed that misses the target is infinite."""
    there = [value for value in found["values"] if value is not None]
    if not there:
        return "–" if found["values"] == [] else "never"
    whole = len(there) == len(found["values"])
    if whole and not ruled:
        return spread(found, *styles)
    middle = found["median"] if ruled else found["mean"]
    return ("∞" if middle is None else format(middle, styles[0])) + (
        "" if whole else f" ({len(there)} of {len(found['values'])})"
    )


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
    title = summary["quantity_title"]
    # Within a sentence.
    title = title if title[:2].isupper() or title[:2] == "F1" else title[:1].lower() + title[1:]
    found = [f"Target: {title} {target} ({summary['target_by']})."]
    known = {method["name"]: method for method in summary["methods"] if method["n"]}
    for name in summary["published"].keys() & known.keys():
        style, mean = ".1%" if summary["quantity"] in SHARES else ".5g", known[name]["final"]["mean"]
        here = "diverges here" if mean is None else f"reaches {mean:{style}} here"
        found.append(f"{known[name]['label']} {here}; published: {summary['published'][name]:{style}}.")
    known = {name: summary[name] for name in ("trials", "seeds", "batch", "rules", "commit")}
    return [*found, *(line.format(**known) for line in NOTES["said" if summary["rules"] else "said_first"])]


def ends(found: Sequence[Record], *, once: bool = False) -> Table:
    """Where each optimizer ended with ISAAC and without, with Welch's p over seeds; `once`: each race is named in one row."""
    rows = []
    for race in found:
        scale = "smoke test" if race["scale"] == "smoke" else race["scale"]
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
    ceiling = math.inf if summary["higher"] else CEILING * highest
    drawn: list[Line] = []
    ran = [method for method in summary["methods"] if method["curves"]]
    for place, method in enumerate(sorted(ran, key=lambda own: _arrived(own, summary))):
        base = method["name"].removeprefix("isaac-").removesuffix("-running")
        known = f"{base}+isaac" if method["name"].startswith("isaac-") else base
        own = look(f"{known} running" if method["name"].endswith("-running") else known, place)
        shown = Method(method["label"], replace(own, width=WIDTHS[method["ours"]]))
        seeds = {}
        for curve in method["curves"]:
            rows = zip(curve["steps"], curve["seconds"], curve["loss"], strict=True)
            kept = [row for row in rows if row[2] is not None and row[2] <= ceiling]
            columns = {name: [row[place] for row in kept] for place, name in enumerate(("step", "seconds", "loss"))}
            seeds[f"seed {curve['seed']}"] = columns
        drawn += lines.seeds(shown, seeds, "step", ("loss",))
    title, value, best = summary["quantity_title"], summary["target"], lowest(summary)
    logarithmic = Axis("seconds", "Seconds", label="Seconds (log)", logarithmic=True)
    timed = any(value for line in drawn for value in line.columns["seconds"])
    alt = f"{title} of {len(ran)} methods over training, {summary['title']}. Solid lines have ISAAC. "
    alt += f"{f'Best at the budget: {best}.' if best else ''} The numbers are in the table below."
    left = [method["label"] for method in summary["methods"] if not method["n"]]
    about = f"{NOTES['smoke']} " if summary["scale"] == "smoke" else ""
    about += f"Mean of {summary['seeds']} seeds; bands from the lowest to the highest. "
    about += f"{len(ran)} methods, {summary['trials']} tuning trials each. Seconds of training steps, "
    about += "each in one CUDA graph where it can be" if summary["mode"] == "captured" else "eager"
    about += ". In the legend: who reaches the target first comes first."
    about += f" Not run: {', '.join(left)}." if left else ""
    return lines.figure(
        f"figure-{name}",
        [Panel(name, "", alt, drawn)],
        [Axis("loss", title, ".4~g")],
        [Axis("step", "Steps", ",d"), Axis("seconds", "Seconds", ",.3~r"), logarithmic],
        logarithmic=not summary["higher"],
        target=Target(value, f"target {number(value, 3)}", summary["target_by"]) if value else None,
        picture=(500, 400),
        views=(({"Horizontal": "Steps"}, *([{"Horizontal": logarithmic.label}] if timed else [])),),
        title=summary["title"],
        subtitle=about,
        caption=NOTES["caption"],
    )


def _arrived(method: Record, summary: Record) -> tuple[int, float]:
    """Who is at the target first in seconds comes first; then who never is, by the value at the end."""
    seconds, steps = method["seconds_to_target"], method["steps_to_target"]
    if None not in steps["values"]:
        return 0, steps["mean"] if seconds["mean"] is None else seconds["mean"]
    return (2, 0.0) if method["final"]["mean"] is None else (1, _ended(method, summary)[1])


def blocks(races: Path, pictures: Path) -> Blocks:
    """The one table, each race with its picture, and the rules; smoke tests say nothing of the methods."""

    def found() -> list[dict[str, Any]]:
        raced = [summary for summary in summaries(races, "results/race") if summary["scale"] != "smoke"]
        if not raced:
            raise DocsError(f"{races} has no race but smoke tests")
        return raced

    return {
        "race": lambda: ends(found(), once=True).markdown(),
        "races": lambda: parts.markdown(_all(found()), pictures),
        "race-rules": lambda: rules_for_page("standard"),
    }


def section(found: Sequence[Record]) -> list[Block]:
    """All races on the page, the answer first."""
    return [ends(found) if found else missing("The race", "race --scale standard"), *_all(found)]


def _all(found: Sequence[Record]) -> list[Block]:
    """Each race with its picture, its tables and what a reader has to know of them."""
    shown: dict[str, list[Block]] = {}
    for race in found:
        workload, scale = race["workload"], race["scale"]
        # Of several scales the largest has the short name.
        name = identifier(workload) if identifier(workload) not in shown else identifier(workload, scale)
        about = [race["data"], f"{race['steps']:,} steps of {race['batch']:,}", f"{race['seeds']} seeds", race["mode"]]
        shown[name] = [
            Heading(f"race-{name}", f"{race['title']}, scale “{scale}”"),
            (f"**{NOTES['smoke']}** " if scale == "smoke" else "") + f"{' · '.join(about)}.",
            parts.Figure(figure(race, f"curve-{name}"), f"race-{workload}-{scale}"),
            table(race),
            *([compared(race), clocks(race)] if race["rules"] else []),
            said(race),
            Source.of([race["folder"]], [race]),
        ]
    return [block for own in shown.values() for block in own]


def rules(scale: str) -> list[Table]:
    """All of them at a scale."""
    return [_shared(scale), _search(), *(_course(course, scale) for course in COURSES.values())]


def rules_for_page(scale: str) -> str:
    """What is shared, what is searched, and a row for each workload."""
    rows = []
    for course in COURSES.values():
        own, better = BUDGETS[scale], "higher" if course.higher else "lower"
        cells = (course.name, f"{course.metric}, {better}", _target(course), f"{course.blank(own).steps:,}")
        rows.append((*cells, str(len(entrants(course))), f"`{course.rules(own)}`"))
    columns = ("Workload", "Scored by", "Target", "Steps", "Methods", "Hash")
    found = (_shared(scale), _search(), made(columns, rows, ("Workload", "Scored by", "Target", "Hash")))
    return "\n".join(one.markdown() for one in found)


def _target(course: Course) -> str:
    return f"{course.target:g}" if not isinstance(course.target, str) else f"mean of {ENTRANTS[course.target].label}"


def _shared(scale: str) -> Table:
    own = BUDGETS[scale]
    least, most = (own.first + (rounds - 1) * own.more for rounds in (own.least, own.rounds))
    known = {"first": own.first, "more": own.more, "least": least, "most": most, "comparisons": len(RULES["compared"])}
    known |= {name: RULES[name] for name in ("search_seed", "first_seed")}
    known["last_seed"] = RULES["first_seed"] + own.seeds - 1
    rows = ((name, text.format(**known)) for name, text in NOTES["rules"].items())
    return made(RULE, rows, caption=f"All workloads, scale {scale}")


def _search() -> Table:
    rows = []
    for entrant in ENTRANTS.values():
        words = [f"{NOTES['letters'][name]} {own.low:g} to {own.high:g}" for name, own in entrant.search.items()]
        rows.append(Row((entrant.label, ", ".join(words), "plain" if entrant.plain else "adaptive"), entrant.ours))
    note = f"In the logarithm; of {' and '.join(NOTES['letters'][name] for name in BELOW_ONE)} in that of what they lack to 1."
    return made(("Method", "Range", "Rates times"), rows, caption="What is searched", note=note)


def _course(course: Course, scale: str) -> Table:
    own, blank = BUDGETS[scale], course.blank(BUDGETS[scale])
    variant = ", ".join(f"{name} {value}" for name, value in blank.variant) or "as it is"
    recipe = [f"{course.schedule} after {course.warm_up:.0%} of warm-up"]
    recipe += [f"{name} {value}" for name, value in course.settings.items()]
    recipe += [f"weight decay {value:g} {how}" for how, value in course.decay.items()]
    rows = {
        "Source": course.source,
        "Trained": f"{blank.workload}, {variant}; {blank.steps:,} steps",
        "Scored by": f"{course.metric}, {'higher' if course.higher else 'lower'} is better",
        "Target": _target(course),
        "Recipe of all": "; ".join(recipe),
        "ISAAC": ", ".join(f"{name} {value}" for name, value in course.conditioned.items()) or "expand, absolute λ",
        "Rates times": f"adaptive {course.adaptive:g}, plain {course.plain:g}",
        "Methods": "everyone" if course.all else ", ".join(entrant.name for entrant in entrants(course)),
        "Hash": course.rules(own),
    }
    return made(RULE, rows.items(), caption=course.name)
