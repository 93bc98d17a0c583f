"""The section of the claims: what the paper says, sentence by sentence, and what the records say of it."""

from collections.abc import Sequence

from isaac_lab.claims import Claim, counts
from isaac_lab.claims.evidence import Finding
from isaac_lab.report.parts import Item, Ledger, Section, Source
from isaac_lab.studies.paper import EXPERIMENTS

__all__ = ["section"]


def section(found: Sequence[tuple[Claim, Finding]], records: Sequence[str]) -> Section:
    """Every claim; `records` are the folders that decide them."""
    items = tuple(
        Item(c.number, EXPERIMENTS[c.about].name, c.text, c.test, str(f.verdict), f.figures, f.scale) for c, f in found
    )
    experiments = tuple(dict.fromkeys(item.about for item in items))
    lead = (
        "Every sentence of the paper that can be checked, with the test that decides it and the verdict of our records. The "
        "tests were written before the records, but for those of Table 2, which take their thresholds from the paper's own "
        "words. Scale says which records decide."
    )
    source = Source(tuple(records), ("isaac-newton claims",))
    return Section("claims", "The paper's claims", lead, (Ledger(items, counts(found), experiments), source))
