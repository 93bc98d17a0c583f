"""The rules of the race for people: what all workloads share, what is searched, and a table for each workload."""

from isaac_lab.report import WORDS
from isaac_lab.report.tables import Row, Table, table
from isaac_lab.studies.race.race import BELOW_ONE, COURSES, ENTRANTS, RULES, SCALES, Course, entrants

#: Of the paper, for what is tuned.
LETTERS = WORDS["race"]["letters"]
RULE = ("Rule", "What")


def rules(scale: str) -> list[Table]:
    """All of them at a scale."""
    return [_shared(scale), _search(), *(_course(course, scale) for course in COURSES.values())]


def markdown(scale: str) -> str:
    """For a page: what is shared, what is searched, and a row for each workload."""
    rows = []
    for course in COURSES.values():
        own, better = SCALES[scale], "higher" if course.higher else "lower"
        cells = (course.name, f"{course.metric}, {better}", _target(course), f"{course.blank(own).steps:,}")
        rows.append((*cells, str(len(entrants(course))), f"`{course.rules(own)}`"))
    columns = ("Workload", "Scored by", "Target", "Steps", "Methods", "Hash")
    found = (_shared(scale), _search(), table(columns, rows, ("Workload", "Scored by", "Target", "Hash")))
    return "\n".join(table.markdown() for table in found)


def _target(course: Course) -> str:
    return f"{course.target:g}" if not isinstance(course.target, str) else f"mean of {ENTRANTS[course.target].label}"


def _shared(scale: str) -> Table:
    own = SCALES[scale]
    least, most = (own.first + (rounds - 1) * own.more for rounds in (own.least, own.rounds))
    known = {"first": own.first, "more": own.more, "least": least, "most": most, "comparisons": len(RULES["compared"])}
    known |= {name: RULES[name] for name in ("search_seed", "first_seed")}
    known["last_seed"] = RULES["first_seed"] + own.seeds - 1
    rows = ((name, text.format(**known)) for name, text in WORDS["race"]["rules"].items())
    return table(RULE, rows, caption=f"All workloads, scale {scale}")


def _search() -> Table:
    rows = []
    for entrant in ENTRANTS.values():
        words = [f"{LETTERS[name]} {own.low:g} to {own.high:g}" for name, own in entrant.search.items()]
        rows.append(Row((entrant.label, ", ".join(words), "plain" if entrant.plain else "adaptive"), entrant.ours))
    note = f"In the logarithm; of {' and '.join(LETTERS[name] for name in BELOW_ONE)} in that of what they lack to 1."
    return table(("Method", "Range", "Rates times"), rows, caption="What is searched", note=note)


def _course(course: Course, scale: str) -> Table:
    own, blank = SCALES[scale], course.blank(SCALES[scale])
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
    return table(RULE, rows.items(), caption=course.name)
