"""The table behind `print(handle)`: every layer, what its last step cost and did, and why the others stay plain."""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn

from isaac_newton.core.options import Run
from isaac_newton.core.statistics import Statistics

__all__ = ["table"]

#: From this many layers on, equal blocks are folded.
LONG = 24
_HEADINGS = ("layer", "type", "weight", "rows", "side", "extra cost", "extra memory")
#: Shown after an inspection, with the unit of each.
_INSIGHT = {"effective_rank": "effective rank", "largest_curvature": "curvature", "damping": "λ", "angle": "angle to ∇"}


class Conditioned(Protocol):
    """What the table needs to know of a conditioned layer."""

    @property
    def module(self) -> nn.Module: ...
    @property
    def parts(self) -> Mapping[str, nn.Module]: ...
    @property
    def statistics(self) -> Statistics: ...


def table(model: nn.Module, run: Run, sites: Mapping[str, Conditioned], skipped: Mapping[str, str]) -> str:
    """One line per layer with parameters; in a long table the layers of equal blocks share a line, with a range in the name."""
    method = "ζ" if run.conditions_outputs else "ζ*"
    verdicts = {name: f"plain: {reason}" for name, reason in skipped.items()}
    for name, site in sites.items():
        verdict = method if any(p.requires_grad and p.dim() > 1 for p in site.module.parameters()) else "plain: frozen"
        verdicts |= {name: verdict, **dict.fromkeys(site.parts, f"{verdict}, with {name or 'the model'}")}
    layers = [
        (name, *_cells(module, sites.get(name), verdicts[name])) for name, module in model.named_modules() if name in verdicts
    ]
    seen = {name: site.statistics for name, site in sites.items() if site.statistics.effective_rank is not None}
    rows = [(*_HEADINGS, *(_INSIGHT.values() if seen else ()), "gradient")]
    for same in _alike(layers) if len(layers) > LONG else [[layer] for layer in layers]:
        count = f" ×{len(same)}" if len(same) > 1 else ""
        name, verdict = _fold([layer[0] for layer in same]) or "(model)", _fold([layer[-1] for layer in same])
        insight = _insight([seen[layer[0]] for layer in same if layer[0] in seen]) if seen else ()
        rows.append((name + count, *same[0][1:-1], *insight, verdict))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    text = ["  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[-1]]) for row in rows]
    return "\n".join([*text, _summary(model, run, sites)])


def _alike(layers: Sequence[tuple[str, ...]]) -> list[list[tuple[str, ...]]]:
    """Layers that say the same, but for the numbers in their names and reasons."""
    groups: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for name, *cells, verdict in layers:
        key = (re.sub(r"\d+", "#", name), *cells, re.sub(r"\d+", "#", verdict))
        groups.setdefault(key, []).append((name, *cells, verdict))
    return list(groups.values())


def _cells(module: nn.Module, site: Conditioned | None, verdict: str) -> tuple[str, ...]:
    weight = max(module.parameters(recurse=False), key=Tensor.numel)
    shape = "×".join(map(str, weight.shape)) or "1"
    seen = site.statistics if site is not None else None
    if seen is None or not seen.side:
        return type(module).__name__, shape, "", "", "", "", verdict
    share = 100 * seen.extra_multiplications / max(seen.own_multiplications, 1)
    memory = f"{seen.extra_bytes / 1024:,.1f} KiB"
    return type(module).__name__, shape, str(seen.rows), seen.side, f"{_percent(share)} %", memory, verdict


def _insight(layers: Sequence[Statistics]) -> tuple[str, ...]:
    """What an inspection has shown: a number, or the range of several layers' numbers."""
    cells = []
    for name in _INSIGHT:
        values = [value for layer in layers if (value := getattr(layer, name)) is not None]
        ends = dict.fromkeys(f"{value:.3g}" for value in (min(values), max(values))) if values else {}
        cells.append("–".join(ends) + ("°" if ends and name == "angle" else ""))
    return tuple(cells)


def _summary(model: nn.Module, run: Run, sites: Mapping[str, Conditioned]) -> str:
    covered = {id(p): p.numel() for site in sites.values() for p in site.module.parameters() if p.dim() > 1 and p.requires_grad}
    total = sum(p.numel() for p in model.parameters())
    options = [f"damping={run.damping}"]
    if run.options.sharing != "expand":
        options.append(f"sharing={run.options.sharing!r}")
    if run.options.max_rows is not None:
        options.append(f"max_rows={run.options.max_rows}")
    if run.conditions_outputs:
        options.append(f"output_damping={run.output_damping}, output_curvature={run.options.output_curvature!r}")
    share = 100 * sum(covered.values()) / max(total, 1)
    extra = sum(site.statistics.extra_multiplications for site in sites.values())
    own = sum(site.statistics.own_multiplications for site in sites.values())
    cost = f", {_percent(100 * extra / own)} % more multiply-adds in the last step" if own else ""
    return f"{len(sites)} layers conditioned, {share:.1f} % of {total:,} parameters{cost}; {', '.join(options)}"


def _percent(share: float) -> str:
    return f"{share:.2g}" if share < 100 else f"{share:.0f}"


def _fold(names: Sequence[str]) -> str:
    """One text for several that differ in numbers only: `block.{0–11}.fc`."""
    pieces = [re.split(r"(\d+)", name) for name in names]
    folded = []
    for column in zip(*pieces, strict=True):
        values = list(dict.fromkeys(column))
        if len(values) == 1:
            folded.append(values[0])
        else:
            numbers = sorted(map(int, values))
            runs = []
            for _, run in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
                members = [number for _, number in run]
                runs.append(str(members[0]) if len(members) == 1 else f"{members[0]}–{members[-1]}")
            folded.append("{" + ",".join(runs) + "}")
    return "".join(folded)
