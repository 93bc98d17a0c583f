"""What the paper claims, sentence by sentence, as checks on records: sections E1 to E5, the captions, the abstract.

Every claim has a test that was written down before there were records to apply it to, with the reason for its threshold; the
benchmarks of Table 2 had been run before, so the tests of E5 take their thresholds from the paper's own words and figures.
Records are taken at the largest scale at which a panel has been run whole: "paper", else "quick". Smoke records prove nothing.
A file for each section, the sentence beside the name of its check.
"""

from collections.abc import Sequence

from isaac_lab.claims import appendix, bert, e1, e2_e3, e5, general, resnet
from isaac_lab.claims.evidence import Claim, Evidence, Finding, Verdict


def ledger(evidence: Evidence) -> list[tuple[Claim, Finding]]:
    """Every claim with what the records say of it."""
    return [(claim, claim.check(evidence)) for claim in CLAIMS]


def counts(found: Sequence[tuple[Claim, Finding]]) -> dict[str, int]:
    """How many claims have each verdict."""
    return {str(verdict): sum(finding.verdict is verdict for _, finding in found) for verdict in Verdict}


def _larger_models(evidence: Evidence) -> Finding:
    """BERT on its three tasks, ResNet in its three settings; one that fails decides."""
    every = {claim.number: claim for claim in (*bert.BERT, *resnet.RESNET)}
    found = {number: every[number].check(evidence) for number in ("E4.1", "E4.2", "E4.3", "E4.6")}
    verdicts = {finding.verdict for finding in found.values()}
    verdict = next(v for v in (Verdict.FAILS, Verdict.UNDECIDED, Verdict.UNKNOWN, Verdict.HOLDS) if v in verdicts)
    scales = ", ".join(dict.fromkeys(finding.scale for finding in found.values() if finding.scale))
    return Finding(verdict, "; ".join(f"{number}: {finding.verdict}" for number, finding in found.items()), scales)


LARGER = Claim(
    "E4.0",
    "ζ* also improves the performance for training larger models such as BERT and ResNet.",
    "tab1",
    "E4.1, E4.2, E4.3 and E4.6 hold.",
    _larger_models,
)

CLAIMS: tuple[Claim, ...] = (
    *general.CLAIMS,
    *e1.CLAIMS,
    *e2_e3.CLAIMS,
    LARGER,
    *bert.BERT,
    *resnet.RESNET,
    *e5.CLAIMS,
    *appendix.CLAIMS,
)
