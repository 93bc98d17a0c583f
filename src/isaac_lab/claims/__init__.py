"""What the paper claims, sentence by sentence, as checks on records: `claims.toml` has each sentence beside its check.

Records are taken at the largest scale at which a panel has been run whole: "paper", else "quick". Smoke records prove nothing.
"""

import tomllib
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.resources import files

from isaac_lab.claims import costs, curves, grids, larger
from isaac_lab.claims.evidence import Claim, Evidence, Finding, Verdict

#: By file of this folder, its checks by name.
_CHECKS = {"costs": vars(costs), "curves": vars(curves), "grids": grids.CHECKS, "larger": vars(larger), "claims": globals()}


def ledger(evidence: Evidence) -> list[tuple[Claim, Finding]]:
    """Every claim with what the records say of it."""
    return [(claim, claim.check(evidence)) for claim in CLAIMS]


def counts(found: Sequence[tuple[Claim, Finding]]) -> dict[str, int]:
    """How many claims have each verdict."""
    return {str(verdict): sum(finding.verdict is verdict for _, finding in found) for verdict in Verdict}


def all_hold(evidence: Evidence, of: Sequence[str]) -> Finding:
    """Other claims, all of which have to hold; one that fails decides."""
    found = {claim.number: claim.check(evidence) for claim in CLAIMS if claim.number in of}
    verdicts = {finding.verdict for finding in found.values()}
    verdict = next(v for v in (Verdict.FAILS, Verdict.UNDECIDED, Verdict.UNKNOWN, Verdict.HOLDS) if v in verdicts)
    scales = ", ".join(dict.fromkeys(finding.scale for finding in found.values() if finding.scale))
    return Finding(verdict, "; ".join(f"{number}: {finding.verdict}" for number, finding in found.items()), scales)


def _read() -> Iterator[Claim]:
    known = tomllib.loads((files(__package__) / "claims.toml").read_text(encoding="utf-8"))
    for entry in known["claims"]:
        again = entry.pop("again", {})
        for own in [entry, entry | again] if again else [entry]:
            number, text, about, test, check = (own.pop(name) for name in ("number", "text", "about", "test", "check"))
            module, name = check.split(".")
            decide = partial(_CHECKS[module][name], **own)
            yield Claim(number, text, about, test.format(**known["words"]), decide)


CLAIMS: tuple[Claim, ...] = tuple(_read())
