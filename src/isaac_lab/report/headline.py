"""The first section: what ISAAC is, and the figures that a reader wants first, good or bad."""

from collections import Counter
from collections.abc import Mapping, Sequence

from isaac_lab.bench.published import PAPER
from isaac_lab.claims.evidence import Evidence, Verdict
from isaac_lab.report.parts import Section, Source, Tile, Tiles
from isaac_lab.report.race import Summary
from isaac_lab.studies.race.standings import lowest, pairs

MODES = {"cuda-eager": "eager on a GPU", "cuda-captured": "as one CUDA graph", "cpu-1thread": "on one CPU thread"}


def section(evidence: Evidence, races: Sequence[Summary], verdicts: Mapping[str, int], records: Sequence[str]) -> Section:
    """A few tiles, each from records; none where there are none. All of it comes from the folders `records`."""
    tiles = (*_race([race for race in races if race.scale != "smoke"]), *_cost(evidence), _claims(verdicts))
    return Section.of("summary", [Tiles(tiles), Source(tuple(records), ("isaac-newton report",))])


def _race(found: Sequence[Summary]) -> list[Tile]:
    ours = [next((pair.difference for pair in pairs(race.data) if pair.label == "AdamW"), None) for race in found]
    below = sum(difference is not None and difference.behind for difference in ours)
    winners = Counter(lowest(race.data) or "nobody" for race in found)
    label = f"short race{'' if len(found) == 1 else 's'} in which AdamW + ISAAC has the lowest loss of all at the end"
    detail = (
        f"Lowest: {', '.join(f'{name} in {count}' for name, count in winners.most_common())}. AdamW + ISAAC ends below AdamW "
        f"in {below} (p < 0.05). Budgets are short and the tuning is uneven."
    )
    return [Tile(f"{winners['AdamW + ISAAC']} of {len(found)}", label, detail, "race")] if found else []


def _cost(evidence: Evidence) -> list[Tile]:
    parts = []
    for mode, name in MODES.items():
        ratios = [ratio for model in PAPER["gradient"] if (ratio := evidence.ratio(mode, model, "zeta_star")) is not None]
        parts += [(f"{min(ratios):.2f}–{max(ratios):.2f} ×", name)] if ratios else []
    if not parts:
        return []
    (number, where), *others = parts
    detail = "The paper's networks at batch 60. Transformers and convolutions cost more in eager code."
    detail += f" And {', '.join(' '.join(other) for other in others)}." if others else ""
    return [Tile(number, f"the time of a step with ζ* over a plain step, {where}", detail, "costs")]


def _claims(verdicts: Mapping[str, int]) -> Tile:
    holds, fails, open_, unknown = (verdicts[str(verdict)] for verdict in Verdict)
    detail = (
        f"{fails} do{'es' if fails == 1 else ''} not hold; for {open_} the seeds show no difference (p ≥ 0.05); for {unknown} "
        "there is not enough data yet."
    )
    return Tile(f"{holds} of {sum(verdicts.values())}", "claims of the paper hold on our records", detail, "claims")
