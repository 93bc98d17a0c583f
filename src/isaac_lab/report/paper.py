"""The paper's figures and tables as files, on a terminal and on pages: what each experiment has."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from isaac_lab.charts.draw import pictures
from isaac_lab.charts.figure import Figure
from isaac_lab.claims import counts
from isaac_lab.claims.evidence import Claim, Evidence, Finding, Verdict
from isaac_lab.record import Store
from isaac_lab.report import benchmarks, curves, grids, larger, parts
from isaac_lab.report.docs import Blocks, escaped, wrapped
from isaac_lab.report.parts import Block, Heading, Source, missing
from isaac_lab.report.tables import Table
from isaac_lab.report.tables import table as made
from isaac_lab.report.views import calls_of, setting, source
from isaac_lab.studies import numbers
from isaac_lab.studies.paper import EXPERIMENTS, tab2
from isaac_lab.studies.paper.folder import View
from isaac_lab.studies.paper.recipe import Experiment, final_loss
from isaac_lab.words import damping

Summary = Mapping[str, Any]

#: Of the HTML page: which experiments each section shows.
SECTIONS = {"grids": tuple(grids.FIGURES), "curves": tuple(curves.FIGURES), "larger": ("tab1", "fig6")}
#: After a number: of one claim, and of several.
VERBS: Mapping[str, tuple[str, str]] = {
    Verdict.HOLDS: ("holds", "hold"),
    Verdict.FAILS: ("does not", "do not"),
    Verdict.UNDECIDED: ("shows no difference", "show no difference"),
    Verdict.UNKNOWN: ("lacks data", "lack data"),
}


def figure(view: View, about: Summary | None = None) -> Figure:
    """What an experiment shows; `about` is its summary. Raises `StoreError` where there is no run of it."""
    name = view.experiment.id
    if name in grids.FIGURES:
        return grids.figure(view)
    if name in curves.FIGURES:
        return curves.figure(view)
    if name == "tab2":
        return benchmarks.table2(tab2.records(view))
    return larger.courses(about or summary(view)) if name == "fig6" else larger.scores(about or summary(view))


def summary(view: View) -> Summary:
    """Of an experiment without panels."""
    return view.experiment.summary(view) if view.experiment.summary else {}


def table(view: View, about: Summary | None = None) -> Table | None:
    """Of the best run of each group; of an experiment without panels its own table, where there is one."""
    if view.outcomes:
        return _best(view)
    if view.experiment.id == "fig6":
        return larger.accuracies(view)
    return larger.fine_tuned(about or summary(view)) if view.experiment.id == "tab1" else None


def _best(view: View) -> Table:
    """Where the best run of each group ended, its learning rate, and how many diverged."""
    accuracy = any(r.points and r.points[-1].get("test_accuracy") is not None for o in view.outcomes for r in o.all())
    columns = ("Panel", "Group", "Rate", "λ_a", "λ_g", "Train\nloss", *(["Test\nacc."] if accuracy else []), "Diverged")
    rows = []
    for outcome in view.outcomes:
        for name, records in outcome.records.items():
            rate = outcome.rates[name]
            cells = ["–"] * (len(columns) - 3) + ["at every rate"]
            if records and rate is not None:
                best = min(records, key=final_loss)
                cells = [f"{rate:g}", damping(best.trial.damping), damping(best.trial.output_damping)]
                cells.append("–" if math.isinf(final_loss(best)) else f"{final_loss(best):.3g}")
                end = best.points[-1].get("test_accuracy") if best.points else None
                cells += (["–"] if end is None else [f"{end:.2%}"]) if accuracy else []
                cells.append(f"{sum(not record.finished for record in records)} of {len(records)}")
            rows.append((outcome.panel.name, name, *cells))
    note = "The run of each group with the lowest final training loss. Rate: chosen by short runs."
    return made(columns, rows, columns[:2], note=note)


def trained(view: View) -> list[str]:
    """What the training of each panel took, over all calls."""
    found = []
    for outcome in view.outcomes:
        if calls := [call for call in calls_of(view, outcome) if "panel" in call]:
            hows = dict.fromkeys(" on ".join(call[key] for key in ("executor", "device") if key in call) for call in calls)
            runs, seconds = (sum(call[key] for call in calls) for key in ("runs", "seconds"))
            found.append(f"Panel {outcome.panel.name}: {runs} runs trained in {seconds:.1f} s ({', '.join(hows)}).")
    return found


def stores(view: View) -> list[Store]:
    """Where its records are; figures that show another's runs use that one's."""
    homes = [view.directory.parent.parent / home / view.scale.name for home in view.about or [view.experiment.id]]
    return [store for home in homes if (store := Store(home)).path.exists()]


def write(view: View) -> None:
    """The picture, and every measurement as numbers.csv."""
    shown = figure(view)
    view.directory.mkdir(parents=True, exist_ok=True)
    if records := [record for store in stores(view) for record in store.records()]:
        numbers.write(view.directory / "numbers.csv", records)
    pictures(shown, view.directory / "figure")


def blocks(view: View, about: Summary, directory: str) -> list[Block]:
    """An experiment on a page, as it was run at one scale; `directory` is what the page calls the folder of all."""
    name, scale, own = view.experiment.id, view.scale.name, table(view, about)
    tables = [larger.settings(about)] if name == "tab1" else []
    if own and view.outcomes:
        tables = [replace(own, caption="Where the best run of each group ended")]
    shown = parts.Figure(figure(view, about), f"{name}-{scale}", tuple(tables), small=name not in curves.FIGURES)
    if view.outcomes:
        timed = " Seconds are steps × the time of a step, measured alone on one CPU thread." if view.steps else ""
        return [f"{setting(view)}.{timed}", shown, trained(view), source(view, directory)]
    where = Source.of([f"{directory}/{name}/{scale}"], [about])
    return [f"{about['model']} · scale “{scale}”.", shown, *([own] if own else []), about["notes"], where]


def known(evidence: Evidence, id: str, directory: str) -> list[Block]:
    """What there is of an experiment at each scale that counts, or how to make it."""
    found: list[Block] = []
    for view in evidence.views(id):
        about = evidence.summary(id, view.scale.name)
        found += blocks(view, about, directory) if view.outcomes or about else []
    return found or [missing(EXPERIMENTS[id].name, f"reproduce {id} --scale quick")]


def section(id: str, evidence: Evidence, directory: str) -> list[Block]:
    """Of the HTML page: these experiments at every scale."""
    found: list[Block] = []
    for experiment in (EXPERIMENTS[name] for name in SECTIONS[id]):
        found.append(Heading(f"{id}-{experiment.id}".lower(), f"{experiment.name}: {experiment.shows}"))
        found += known(evidence, experiment.id, directory)
    return found


def pages(ledger: Sequence[tuple[Claim, Finding]], evidence: Evidence, pictures: Path) -> Blocks:
    """What fills each block of docs/reproduction.md: the ledger, and every figure with its claims."""

    def section(own: Experiment) -> str:
        heading, shows = Heading(own.id, own.name), f"{own.shows[0].upper()}{own.shows[1:]}."
        found = parts.markdown([heading, shows, *known(evidence, own.id, "results/reproduce")], pictures)
        claims = [_claim(claim, finding) for claim, finding in ledger if claim.about == own.id]
        return "\n\n".join([found, *(claims or ["No sentence of the paper about this figure alone can be checked."])])

    return {"ledger": lambda: _ledger(ledger), "figures": lambda: "\n\n".join(map(section, EXPERIMENTS.values()))}


def _ledger(ledger: Sequence[tuple[Claim, Finding]]) -> str:
    words = ", ".join(f"{count} {VERBS[verdict][count != 1]}" for verdict, count in counts(ledger).items())
    rows = []
    for claim, finding in ledger:
        verdict = f"**{finding.verdict}**" if finding.verdict is Verdict.FAILS else str(finding.verdict)
        rows.append([f"[{claim.number}](#{_anchor(claim)})", EXPERIMENTS[claim.about].name, verdict, finding.scale or "–"])
    return f"## Ledger\n\nOf {len(ledger)} claims: {words}.\n\n{made(['Claim', 'About', 'Verdict', 'Scale'], rows).markdown()}"


def _claim(claim: Claim, finding: Finding) -> str:
    quoted = wrapped(f"**{claim.number}: {finding.verdict}.** “{escaped(claim.text)}”")
    figures = finding.figures.split("; ")
    points = [f"Test: {claim.test}", f"Ours: {finding.figures}" if len(figures) == 1 else "Ours:"]
    made = [wrapped(escaped(point), "- ", "  ") for point in points]
    made += [wrapped(escaped(figure), "    - ", "      ") for figure in figures if len(figures) > 1]
    made += [wrapped(escaped(f"Scale: {finding.scale}"), "- ", "  ")] if finding.scale else []
    return "\n\n".join([f'<a id="{_anchor(claim)}"></a>', quoted, "\n".join(made)])


def _anchor(claim: Claim) -> str:
    """Without the dot, which a name may not hold."""
    return f"claim-{claim.number.lower().replace('.', '-')}"
