"""The first section: what ISAAC is, and the figures that a reader wants first, good or bad."""

from collections import Counter
from collections.abc import Mapping, Sequence

from isaac_lab.bench.published import PAPER
from isaac_lab.claims.evidence import Evidence, Verdict
from isaac_lab.report.parts import Section, Source, Tile, Tiles
from isaac_lab.report.summaries import Summary, checked
from isaac_lab.studies.race.standings import lowest, pairs

LEAD = (
    "ISAAC conditions the gradient of each weight by the curvature that the layer's own inputs carry: one b × b inverse per "
    "layer, no second backward pass, no state, and any optimizer on top. This page shows what our records say of it, next to "
    "what its paper says."
)


def section(evidence: Evidence, races: Sequence[Summary], verdicts: Mapping[str, int], records: Sequence[str]) -> Section:
    """A few tiles, each from records; none where there are none.

    Args:
        evidence: The records of the paper's experiments.
        races: Their summaries.
        verdicts: How many claims have which.
        records: Folders that all of it comes from.
    """
    tiles = [_race(races), _cost(evidence), _claims(verdicts)]
    source = Source(tuple(records), ("isaac-newton report",))
    return Section("summary", "In short", LEAD, (Tiles(tuple(tile for tile in tiles if tile is not None)), source))


def _race(races: Sequence[Summary]) -> Tile | None:
    found = [summary for summary in races if summary.scale != "smoke"]
    if not found:
        return None
    ends = []
    for summary in found:
        with checked(summary):
            adamw = next((pair.difference for pair in pairs(summary.data) if pair.label == "AdamW"), None)
            ends.append((adamw is not None and adamw.behind, lowest(summary.data) or "nobody"))
    winners = Counter(name for _, name in ends)
    label = f"short race{'' if len(found) == 1 else 's'} in which AdamW + ISAAC has the lowest loss of all at the end"
    detail = f"Lowest: {', '.join(f'{name} in {count}' for name, count in winners.most_common())}. "
    detail += f"AdamW + ISAAC ends below AdamW in {sum(below for below, _ in ends)} (p < 0.05). "
    detail += "Budgets are short and the tuning is uneven."
    return Tile(f"{winners['AdamW + ISAAC']} of {len(found)}", label, detail, "race")


def _cost(evidence: Evidence) -> Tile | None:
    parts = []
    for mode, name in (
        ("cuda-eager", "eager on a GPU"),
        ("cuda-captured", "as one CUDA graph"),
        ("cpu-1thread", "on one CPU thread"),
    ):
        ratios = [ratio for model in PAPER["gradient"] if (ratio := evidence.ratio(mode, model, "zeta_star")) is not None]
        if ratios:
            parts.append((f"{min(ratios):.2f}–{max(ratios):.2f} ×", name))
    if not parts:
        return None
    rest = ", ".join(f"{number} {name}" for number, name in parts[1:])
    label = f"the time of a step with ζ* over a plain step, {parts[0][1]}"
    detail = "The paper's networks at batch 60. Transformers and convolutions cost more in eager code."
    return Tile(parts[0][0], label, f"{detail} And {rest}." if rest else detail, "costs")


def _claims(verdicts: Mapping[str, int]) -> Tile:
    holds, fails, open_, unknown = (verdicts[str(verdict)] for verdict in Verdict)
    detail = (
        f"{fails} do{'es' if fails == 1 else ''} not hold; for {open_} the seeds show no difference (p ≥ 0.05); for {unknown} "
        "there is not enough data yet."
    )
    return Tile(f"{holds} of {sum(verdicts.values())}", "claims of the paper hold on our records", detail, "claims")
