"""The table behind `print(handle)`: every layer, what its last step cost and did, and why the others stay plain."""

import itertools
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from isaac_newton.api.tied import made_of, raw
from isaac_newton.core.layer import ConditionedLayer
from isaac_newton.core.options import Options, Run
from isaac_newton.core.statistics import Statistics

__all__ = ["table"]

#: From this many layers on, equal blocks are folded.
LONG = 24
#: No line is longer.
WIDTH = 120
_SHOWN = ("sharing", "max_rows", "keep_norm", "bias", "when", "decay", "refresh", "gather", "warm_up", "power", "spread")
_COSTS = ("rows", "side", "extra cost", "extra memory")
#: Shown after an inspection in place of the costs.
_INSIGHT = {"effective_rank": "effective rank", "largest_curvature": "curvature", "damping": "λ", "angle": "angle to ∇"}


def table(
    model: nn.Module,
    run: Run,
    sites: Mapping[str, ConditionedLayer],
    skipped: Mapping[str, str],
    gone: Mapping[str, str],
    newcomers: Mapping[str, nn.Module],
) -> str:
    """One line per layer with parameters; in a long table the layers of equal blocks share a line, with a range in the name.

    Args:
        model: What was attached.
        run: That of the attachment.
        sites: Its conditioned layers.
        skipped: Why the others are plain.
        gone: What happened to layers that are conditioned no longer.
        newcomers: Modules that were not there when the model was attached.
    """
    there = {id(module): name for name, module in model.named_modules()}
    states = {name: _state(name, site, run, sites, gone, id(site.module) in there) for name, site in sites.items()}
    lines: dict[str, _Line] = {}
    for name, site in sites.items():
        now = there.get(id(site.module), name)
        lines[now] = _Line(site.module, site, states[name])
        for part, module in site.parts.items():
            lines[there.get(id(module), part)] = _Line(module, None, _with(states[name], now))
    for name, user in raw(model, sites).items():
        now = there.get(id(sites[user].module), user)
        lines.setdefault(name, _Line(model.get_submodule(name), None, _with(states[user], now)))
    for name, module in model.named_modules():
        if name not in lines:
            verdict = _newcomer(name, module, lines) if name in newcomers else _skipped(skipped.get(name))
            if verdict is not None:
                lines[name] = _Line(module, None, verdict)
    order = {name: number for number, name in enumerate(there.values())}
    layers = [(name, *_cells(*lines[name])) for name in sorted(lines, key=lambda name: order.get(name, len(order)))]
    seen = {there.get(id(s.module), n): s.statistics for n, s in sites.items() if s.statistics.effective_rank is not None}
    live = {name: site for name, site in sites.items() if states[name].startswith("ζ") and "not seen yet" not in states[name]}
    return "\n".join([*_fitted(_rows(layers, seen)), *textwrap.wrap(_summary(model, run, live), WIDTH)])


class _Line(NamedTuple):
    """What is said of a module; `site` where it is conditioned itself."""

    module: nn.Module
    site: ConditionedLayer | None
    verdict: str


def _newcomer(name: str, module: nn.Module, lines: Mapping[str, _Line]) -> str | None:
    """What is said of a module that came after attach; None: nothing."""
    owner = name.partition(".parametrizations.")[0]
    own = list(module.parameters(recurse=False))
    if own and owner != name and owner in lines:
        return _with(lines[owner].verdict, owner)
    return "plain: came after attach" if any(p.dim() > 1 for p in own) else None


def _skipped(why: str | None) -> str | None:
    """What is said of a module that `attach` skipped for this reason; None: nothing, since it did not skip it."""
    return why if why is None or why.startswith("ζ*") else f"plain: {why}"


def _with(verdict: str, owner: str) -> str:
    """What is said of a part of a layer."""
    return f"{verdict}, with {owner or 'the model'}"


def _rows(layers: Sequence[tuple[str, ...]], seen: Mapping[str, Statistics]) -> list[tuple[str, ...]]:
    """The table, headings first; `seen`: the statistics of layers that were inspected."""
    rows = [("layer", "type", "weight", *(_INSIGHT.values() if seen else _COSTS), "gradient")]
    for same in _alike(layers) if len(layers) > LONG else [[layer] for layer in layers]:
        count = f" ×{len(same)}" if len(same) > 1 else ""
        name, verdict = _fold([layer[0] for layer in same]) or "(model)", _fold([layer[-1] for layer in same])
        middle = _insight([seen[layer[0]] for layer in same if layer[0] in seen]) if seen else same[0][3:-1]
        rows.append((name + count, *same[0][1:3], *middle, verdict))
    return rows


def _state(
    name: str, site: ConditionedLayer, run: Run, sites: Mapping[str, ConditionedLayer], gone: Mapping[str, str], is_there: bool
) -> str:
    """What becomes of a layer's gradient."""
    if not is_there:
        return "plain: replaced after attach"
    matrices = [p for p in site.module.parameters() if p.dim() > 1]
    if matrices and not any(p.requires_grad for p in matrices):
        return "plain: frozen"
    if name in gone:
        return f"plain: {gone[name]}"
    method = "ζ" if run.conditions_outputs else "ζ*"
    if site.statistics.elsewhere:
        method += ", what comes from outside of the layer " + ("too" if run.options.when == "step" else "stays plain")
    last, newest = site.statistics.backward_pass, max(other.statistics.backward_pass for other in sites.values())
    if last == newest:
        return method
    return f"{method}, not seen since pass {last}" if site.statistics.side else f"{method}, but not seen yet"


def _fitted(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows as lines, in columns: what does not fit goes on below."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    verdict, spaces = len(widths) - 1, 2 * (len(widths) - 1)
    # What there is too much of comes off the reasons first, then the names.
    for column, least in ((verdict, 40), (0, 32), (1, 20), (verdict, 24), (0, 16), (verdict, 12)):
        excess = sum(widths) + spaces - WIDTH
        widths[column] = max(min(widths[column], least), widths[column] - max(excess, 0))
    lines = []
    for row in rows:
        cells = [textwrap.wrap(cell, width) or [""] for cell, width in zip(row, widths, strict=True)]
        for number in range(max(map(len, cells))):
            parts = [cell[number] if number < len(cell) else "" for cell in cells]
            lines.append("  ".join(part.ljust(width) for part, width in zip(parts, widths, strict=True)).rstrip())
    return lines


def _alike(layers: Sequence[tuple[str, ...]]) -> list[list[tuple[str, ...]]]:
    """Layers that say the same, but for the numbers in their names and reasons."""
    groups: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for name, *cells, verdict in layers:
        key = (re.sub(r"\d+", "#", name), *cells, re.sub(r"\d+", "#", verdict))
        groups.setdefault(key, []).append((name, *cells, verdict))
    return list(groups.values())


def _cells(module: nn.Module, site: ConditionedLayer | None, verdict: str) -> tuple[str, ...]:
    own = list(module.parameters(recurse=False))
    weight = (
        getattr(module, "weight", None)
        if is_parametrized(module, "weight") or isinstance(vars(module).get("weight"), Tensor)
        else max(own, key=lambda p: p.numel(), default=None)
    )
    shape = "" if weight is None else "×".join(map(str, weight.shape)) or "1"
    kind = type(module).__name__.removeprefix("Parametrized")
    seen = site.statistics if site is not None else None
    if seen is None or not seen.side:
        return kind, shape, "", "", "", "", verdict
    share = 100 * seen.extra_multiplications / max(seen.own_multiplications, 1)
    return kind, shape, str(seen.rows), seen.side, f"{_percent(share)} %", f"{seen.extra_bytes / 1024:,.1f} KiB", verdict


def _insight(layers: Sequence[Statistics]) -> tuple[str, ...]:
    """What an inspection has shown: a number, or the range of several layers' numbers."""
    cells = []
    for name in _INSIGHT:
        values = [value for layer in layers if (value := getattr(layer, name)) is not None]
        ends = dict.fromkeys(f"{value:.3g}" for value in (min(values), max(values))) if values else {}
        cells.append("–".join(ends) + ("°" if ends and name == "angle" else ""))
    return tuple(cells)


def _summary(model: nn.Module, run: Run, live: Mapping[str, ConditionedLayer]) -> str:
    covered: dict[int, int] = {}
    for site in live.values():
        own = [*site.module.parameters(), *made_of(site.module)]
        matrices = {id(p): p.numel() for p in own if p.dim() > 1 and p.requires_grad}
        covered |= matrices or {id(site): site.statistics.weight_size}  # FSDP may have flattened it
    total = sum(p.numel() for p in model.parameters())
    share = 100 * sum(covered.values()) / max(total, 1)
    extra = sum(site.statistics.extra_multiplications for site in live.values())
    plain = sum(site.statistics.own_multiplications for site in live.values())
    cost = f", {_percent(100 * extra / plain)} % more multiply-adds in the last step" if plain else ""
    if run.clock.share is not None and live:
        cost += f", {_percent(100 * run.clock.share)} % of the step's time in conditioning (measured)"
    return f"{len(live)} layers conditioned, {share:.1f} % of {total:,} parameters{cost}; {', '.join(_options(run))}"


def _options(run: Run) -> list[str]:
    """The options that are not those of `attach(model)`."""
    others = [name for name in _SHOWN if getattr(run.options, name) != getattr(Options, name)]
    said = [f"damping={run.damping}", *(f"{name}={getattr(run.options, name)!r}" for name in others)]
    if run.conditions_outputs:
        said.append(f"output_damping={run.output_damping}, output_curvature={run.options.output_curvature!r}")
        said += [f"samples={run.options.samples}"] if run.options.samples != 1 else []
    if run.options.ranks is not None and run.options.when == "backward":
        said.append(f"process_group of {run.options.ranks.count}")
    if run.mask is not None:
        said.append(f"mask of {'×'.join(map(str, run.mask.shape))}")
    return said


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
