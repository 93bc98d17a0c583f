"""The section of the claims: what the paper says, sentence by sentence, and what the records say of it."""

from collections.abc import Sequence

from isaac_lab.claims import counts
from isaac_lab.claims.evidence import Claim, Finding
from isaac_lab.report.parts import Ledger, Section, Source
from isaac_lab.studies.paper import EXPERIMENTS


def section(found: Sequence[tuple[Claim, Finding]], records: Sequence[str]) -> Section:
    """Every claim; `records` are the folders that decide them."""
    lead = (
        "Every sentence of the paper that can be checked, with the test that decides it and the verdict of our records. The "
        "tests were written before the records, but for those of Table 2, which take their thresholds from the paper's own "
        "words. Scale says which records decide."
    )
    names = {claim.about: EXPERIMENTS[claim.about].name for claim, _ in found}
    source = Source(tuple(records), ("isaac-newton claims",))
    return Section("claims", "The paper's claims", lead, (Ledger(found, counts(found), names), source))
