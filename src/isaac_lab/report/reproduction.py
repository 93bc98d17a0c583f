"""What fills docs/reproduction.md: figure by figure the picture, the paper's words, ours, the verdict, how to run it again."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from isaac_lab.claims import counts
from isaac_lab.claims.evidence import Claim, Evidence, Finding, Verdict
from isaac_lab.report import paper, parts
from isaac_lab.report.docs import Blocks, escaped, wrapped
from isaac_lab.report.parts import Block, Heading, missing
from isaac_lab.report.tables import table
from isaac_lab.studies.paper import EXPERIMENTS
from isaac_lab.studies.paper.recipe import Experiment

#: After a number: of one claim, and of several.
VERBS: Mapping[str, tuple[str, str]] = {
    Verdict.HOLDS: ("holds", "hold"),
    Verdict.FAILS: ("does not", "do not"),
    Verdict.UNDECIDED: ("shows no difference", "show no difference"),
    Verdict.UNKNOWN: ("lacks data", "lack data"),
}


def blocks(ledger: Sequence[tuple[Claim, Finding]], evidence: Evidence, pictures: Path) -> Blocks:
    """What fills each block of the page: the ledger, and every figure with its claims."""
    return {
        "ledger": lambda: _summary(ledger),
        "figures": lambda: "\n\n".join(_section(own, ledger, evidence, pictures) for own in EXPERIMENTS.values()),
    }


def _summary(ledger: Sequence[tuple[Claim, Finding]]) -> str:
    words = ", ".join(f"{count} {VERBS[verdict][count != 1]}" for verdict, count in counts(ledger).items())
    rows = []
    for claim, finding in ledger:
        verdict = f"**{finding.verdict}**" if finding.verdict is Verdict.FAILS else str(finding.verdict)
        rows.append([f"[{claim.number}](#{_anchor(claim)})", EXPERIMENTS[claim.about].name, verdict, finding.scale or "–"])
    return f"## Ledger\n\nOf {len(ledger)} claims: {words}.\n\n{table(['Claim', 'About', 'Verdict', 'Scale'], rows).markdown()}"


def _section(experiment: Experiment, ledger: Sequence[tuple[Claim, Finding]], evidence: Evidence, pictures: Path) -> str:
    name, views = experiment.id, paper.views(evidence, experiment.id)
    found: list[Block] = [Heading(name, experiment.name), f"{experiment.shows[0].upper()}{experiment.shows[1:]}."]
    found += [] if views else [missing(experiment.name, f"reproduce {name} --scale quick")]
    for view in views:
        found += paper.blocks(view, evidence.summary(name, view.scale.name), "results/reproduce")
    claims = [_claim(claim, finding) for claim, finding in ledger if claim.about == name]
    claims = claims or ["No sentence of the paper about this figure alone can be checked."]
    return "\n\n".join([parts.markdown(found, pictures), *claims])


def _claim(claim: Claim, finding: Finding) -> str:
    # The name of an anchor may not hold a dot.
    quoted = wrapped(f"**{claim.number}: {finding.verdict}.** “{escaped(claim.text)}”")
    figures = finding.figures.split("; ")
    ours = [_bullet(f"Ours: {finding.figures}")]
    if len(figures) > 1:
        ours = ["- Ours:", *(wrapped(escaped(part), "    - ", "      ") for part in figures)]
    scale = [_bullet(f"Scale: {finding.scale}")] if finding.scale else []
    points = "\n".join([_bullet(f"Test: {claim.test}"), *ours, *scale])
    return f'<a id="{_anchor(claim)}"></a>\n\n{quoted}\n\n{points}'


def _bullet(text: str) -> str:
    return wrapped(escaped(text), "- ", "  ")


def _anchor(claim: Claim) -> str:
    return f"claim-{claim.number.lower().replace('.', '-')}"
