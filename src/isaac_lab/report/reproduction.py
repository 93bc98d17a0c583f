"""What fills docs/reproduction.md: figure by figure the picture, the paper's words, ours, the verdict, how to run it again."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from isaac_lab.charts.draw import draw
from isaac_lab.claims import counts
from isaac_lab.claims.evidence import Claim, Evidence, Finding, Verdict
from isaac_lab.report import paper
from isaac_lab.report.docs import wrapped
from isaac_lab.report.tables import table
from isaac_lab.report.views import calls_of, data_of, setting
from isaac_lab.studies.paper import EXPERIMENTS
from isaac_lab.studies.paper.folder import View
from isaac_lab.studies.paper.recipe import Experiment, Outcome

#: After a number: of one claim, and of several.
VERBS: Mapping[str, tuple[str, str]] = {
    Verdict.HOLDS: ("holds", "hold"),
    Verdict.FAILS: ("does not", "do not"),
    Verdict.UNDECIDED: ("shows no difference", "show no difference"),
    Verdict.UNKNOWN: ("lacks data", "lack data"),
}


def blocks(ledger: Sequence[tuple[Claim, Finding]], evidence: Evidence, pictures: Path) -> dict[str, Callable[[], str]]:
    """What fills each block of the page: the ledger, and every figure with its claims.

    Args:
        ledger: Every claim with its finding.
        evidence: Where these come from.
        pictures: Directory for the pictures, beside the page.
    """

    def figures() -> str:
        parts = []
        for experiment in EXPERIMENTS.values():
            own = [(claim, finding) for claim, finding in ledger if claim.about == experiment.id]
            parts.append(_section(experiment, own, evidence, pictures))
        return "\n".join(parts)

    return {"ledger": lambda: _summary(ledger), "figures": figures}


def _summary(ledger: Sequence[tuple[Claim, Finding]]) -> str:
    words = ", ".join(f"{count} {VERBS[verdict][count != 1]}" for verdict, count in counts(ledger).items())
    rows = [
        [f"[{claim.number}](#{_anchor(claim)})", EXPERIMENTS[claim.about].name, _verdict(finding), finding.scale or "–"]
        for claim, finding in ledger
    ]
    return f"## Ledger\n\nOf {len(ledger)} claims: {words}.\n\n{table(['Claim', 'About', 'Verdict', 'Scale'], rows).markdown()}"


def _section(experiment: Experiment, own: Sequence[tuple[Claim, Finding]], evidence: Evidence, pictures: Path) -> str:
    shows = wrapped(_escape(f"{experiment.shows[0].upper()}{experiment.shows[1:]}."))
    parts = [f"## {experiment.name}\n\n{shows}\n"]
    views = [view for view in evidence.views(experiment.id) if view.outcomes or _has_figure(view)]
    for view in views:
        parts.append(_figure(view, pictures))
    if not views:
        parts.append(f"Not run yet: `isaac-newton reproduce {experiment.id} --scale quick`.\n")
    if not own:
        parts.append("No sentence of the paper about this figure alone can be checked.\n")
    for claim, finding in own:
        parts.append(_claim(claim, finding))
    return "\n".join(parts)


def _has_figure(view: View) -> bool:
    """Of an experiment without panels: whether it has been run."""
    return (view.directory / "trials.jsonl").exists()


def _figure(view: View, pictures: Path) -> str:
    name = f"{view.experiment.id}-{view.scale.name}.svg"
    draw(paper.figure(view), pictures / name)
    text = f"![{view.experiment.name}, scale {view.scale.name}]({pictures.name}/{name})\n\n"
    if not view.outcomes:
        return text + _trials(view)
    text += f"{_escape(setting(view))}.\n\n"
    rows = [row for outcome in view.outcomes if (row := _call(view, outcome))]
    headings = ["Panel", "Data", "Runs", "Trained in", "On", "Command"]
    return text + (table(headings, rows).markdown() if rows else "")


def _trials(view: View) -> str:
    """Of an experiment without panels: the table of its trials, or where else its numbers come from."""
    found = paper.table(view)
    if found is None:
        return "From the records of the [benchmarks](benchmarks.md), which name their commands.\n"
    about: Mapping[str, Any] = paper.summary(view)
    on = about["machine"].get("gpu") or about["machine"].get("cpu") or "?"
    rows = [[_escape(cell) for cell in row.cells] for row in found.rows]
    notes = "".join(f"{_bullet(note)}\n" for note in about["notes"])
    shown = table(found.columns, rows).markdown()
    return f"{shown}\n{notes}\n{on}, scale “{view.scale.name}”: `{about['command']}`\n"


def _call(view: View, outcome: Outcome) -> list[str]:
    panel, data = outcome.panel.name, data_of(outcome.all())
    calls = calls_of(view, outcome)
    if not calls:
        return []
    on = dict.fromkeys(call["machine"].get("gpu") or call["machine"]["cpu"] or "?" for call in calls)
    how = dict.fromkeys(call["executor"] for call in calls)
    seconds = sum(call["seconds"] for call in calls)
    commands = dict.fromkeys(f"`{call['command']}`" for call in calls)
    runs = sum(call["runs"] for call in calls)
    return [panel, data, str(runs), _duration(seconds), f"{', '.join(on)} ({', '.join(how)})", "<br>".join(commands)]


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _claim(claim: Claim, finding: Finding) -> str:
    # The name of an anchor may not hold a dot.
    quoted = wrapped(f"**{claim.number}: {finding.verdict}.** “{_escape(claim.text)}”")
    lines = [f'<a id="{_anchor(claim)}"></a>\n\n{quoted}\n', _bullet(f"Test: {claim.test}")]
    parts = finding.figures.split("; ")
    if len(parts) == 1:
        lines.append(_bullet(f"Ours: {finding.figures}"))
    else:
        lines += ["- Ours:", *(wrapped(_escape(part), "    - ", "      ") for part in parts)]
    lines += [_bullet(f"Scale: {finding.scale}")] if finding.scale else []
    return "\n".join(lines) + "\n"


def _bullet(text: str) -> str:
    return wrapped(_escape(text), "- ", "  ")


def _anchor(claim: Claim) -> str:
    return f"claim-{claim.number.lower().replace('.', '-')}"


def _verdict(finding: Finding) -> str:
    return f"**{finding.verdict}**" if finding.verdict is Verdict.FAILS else str(finding.verdict)


def _escape(text: str) -> str:
    for character in ("*", "_", "<", "|"):
        text = text.replace(character, f"\\{character}")
    return text
