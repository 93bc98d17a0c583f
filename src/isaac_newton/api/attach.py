"""`attach` and `detach`: which layers are conditioned, with what, and why not the others."""

import fnmatch
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from isaac_newton.api.handle import Handle
from isaac_newton.api.masks import hook_models, unhook_models
from isaac_newton.api.tied import apart
from isaac_newton.api.watch import Watch, listed
from isaac_newton.core import bucket as buckets
from isaac_newton.core.checks import check_choice, check_module
from isaac_newton.core.distributed import Ranks
from isaac_newton.core.layer import ConditionedLayer, child, live_layers
from isaac_newton.core.options import BiasMode, Options, OutputCurvature, OutputDamping, Run, Sharing, When
from isaac_newton.layers import Registration, find
from isaac_newton.math.damping import Damping, check

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Layers", "attach", "detach"]

#: Rows that feed a conditioner with `damping="auto"`, at most.
AUTO_ROWS = 64
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)

Predicate: TypeAlias = Callable[[str, nn.Module], bool]
Layers: TypeAlias = str | Iterable[str] | Predicate


def attach(
    model: nn.Module,
    damping: Damping | Literal["auto"] = "auto",
    *,
    layers: Layers | None = None,
    exclude: str | Iterable[str] = (),
    keep_norm: bool | None = None,
    sharing: Sharing | None = None,
    max_rows: int | None = None,
    bias: BiasMode = "plain",
    output_damping: OutputDamping = math.inf,
    output_curvature: OutputCurvature = "sampled",
    samples: int = 1,
    when: When = "backward",
    decay: float = 0.0,
    refresh: int = 1,
    gather: int | None = None,
    warm_up: int = 0,
    power: float = 1.0,
    spread: bool = False,
    process_group: "ProcessGroup | None" = None,
) -> "Handle":
    r"""Condition the weight gradients of a model's layers by their inputs; optimizer and training loop stay as they are.

    The model is changed in place and computes what it computed before. Its parameters, the keys of its `state_dict` and
    the types of its modules stay. From now on a backward pass leaves ζ* (or ζ) in the `.grad` of the conditioned
    weights, whatever `model.training` says: grad mode decides.

    Args:
        model: Any module; layers are looked for in all of its submodules.
        damping: "auto" chooses everything so that learning rates stay what they are: λ is a tenth of the largest eigenvalue
            of a layer's rows, at most 64 rows are drawn, each gradient keeps its norm, and embeddings stay plain. With a
            damping it is the paper's ζ*: $λ_a > 0$, small values condition strongly, `math.inf` not at all. A number,
            `Relative(ρ)`, or a function of the number of backward passes so far that returns one of these.
        keep_norm: Whether each conditioned gradient gets the norm of the plain one, layer by layer, so that learning rates
            stay what they are. None: with "auto" only.
        layers: Which layers: None for all supported ones, a glob pattern or several over module names ("encoder.*"), or a
            function `(name, module) -> bool`.
        exclude: Glob pattern(s) over module names to leave out.
        sharing: What a row is where a layer sees several positions of a sample (sequences, images): "expand", each position
            is one; "reduce", a sample's positions are averaged to one, which costs next to nothing. Embeddings take every
            token, which costs nothing either. None: "expand".
        max_rows: At most this many rows, a random subset drawn anew in each pass, feed a conditioner; follows
            `torch.manual_seed`. None: 64 with "auto", else all.
        bias: "plain" leaves bias gradients alone (the paper); "joint" conditions them with the weights by joining a
            column of ones to the inputs.
        output_damping: $λ_g > 0$. `math.inf` gives ζ*; a number gives ζ; "kfac" damps both sides alike, which is K-FAC: a
            K-FAC learning rate $η$ corresponds to $η / λ^2$.
        output_curvature: For ζ, where ḡ comes from: "sampled" labels (Remark 1), the "exact" root of the loss
            Hessian, or the "empirical" Fisher (Remark 4). The first two need `Handle.backward`, take every row, and serve
            linear layers and attention. The last one needs no extra pass, takes `max_rows`, and serves convolutions too.
        samples: Labels drawn per example for "sampled"; each costs one backward pass without weight gradients.
        when: "backward" conditions each backward pass by its own batch (the paper). "step" gathers the curvature of all
            backward passes, on all ranks, and conditions `.grad` once, right before the optimizer steps: call `Handle.bind`
            or `Handle.step`.
        decay: With "step", the share of the running average of the curvature that a step keeps; 0 for no average.
        refresh: With "step", renew the inverse every so many steps.
        gather: With "step" and `decay`, gather rows in the last so many of every `refresh` steps only. None: in each step.
        warm_up: With "step" and `decay`, the first so many steps only gather: they drop the model's gradients, so that the
            optimizer changes nothing, and count as steps.
        power: With "step", the exponent $p$ of $(I + a^\top a/(bλ))^{-p}$: 1 is ISAAC, ½ whitens halfway, 0 is the gradient.
        spread: With "step" and several ranks, keep each average and inverse on one rank, which sends the inverse at each step:
            less memory, more communication. Then every rank saves and loads a state of its own.
        process_group: Processes (of `torch.distributed`) whose batches count as one. With "backward", None conditions each
            rank by its own batch; with "step", None is the default group, because ranks share one gradient there.

    Returns:
        A handle to look at (`print(handle)`), to change the damping with, and to detach.
    """
    if isinstance(damping, torch.optim.Optimizer):
        raise TypeError(
            f"the second argument is the damping, got {type(damping).__name__}: attach(model, damping=1.0) leaves the "
            "optimizer as it is; with when='step', handle.bind(optimizer)"
        )
    check_choice("when", when, When)
    auto = isinstance(damping, str) and damping == "auto"
    is_plain = isinstance(output_damping, float) and output_damping == math.inf  # arrays, which are none, do not compare
    can_draw = is_plain or output_curvature == "empirical"
    options = Options(
        sharing="expand" if sharing is None else sharing,
        max_rows=AUTO_ROWS if auto and max_rows is None and can_draw else max_rows,
        keep_norm=auto if keep_norm is None else keep_norm,
        bias=bias,
        output_curvature=output_curvature,
        samples=samples,
        when=when,
        decay=decay,
        refresh=refresh,
        gather=gather,
        warm_up=warm_up,
        power=power,
        spread=spread,
        ranks=Ranks(process_group, aside=when == "backward") if when == "step" or process_group is not None else None,
    )
    run = Run(options, check(damping), output_damping)
    chosen, skipped = _select(model, layers, exclude, run, plain_embeddings=auto)
    sites: dict[str, ConditionedLayer] = {}
    for name, (module, registration) in chosen.items():
        parts = {child(name, part): module.get_submodule(part) for part in _parts(module, registration)}
        sites[name] = ConditionedLayer(name, run, module, registration.adapter, parts)
        sites[name].install()
    _fill_buckets(sites.values())
    _find_time_first(model, sites.values())
    hook_models(model, run)

    def is_wanted(name: str, module: nn.Module) -> bool:
        return not _picks(exclude, name, module) and (layers is None or _picks(layers, name, module))

    return Handle(model, run, sites, skipped, Watch(model, run, sites, is_wanted))


def _fill_buckets(sites: Iterable[ConditionedLayer]) -> None:
    """Neighbouring weights share a node of the graph: a few nodes for a model, in place of one for each layer."""
    bucket = buckets.Bucket()
    biases = Counter(id(getattr(site.module, "bias", None)) for site in sites)
    for site in sites:
        weight = getattr(site.module, "weight", None)
        if isinstance(weight, nn.Parameter) and weight.dim() > 1 and not isinstance(site.module, _EMBEDDINGS):
            if len(bucket.weights) == buckets.BUCKET:
                bucket = buckets.Bucket()
            bias = getattr(site.module, "bias", None)
            goes_along = isinstance(bias, nn.Parameter) and biases[id(bias)] == 1  # neither computed nor shared
            site.bucket = bucket, bucket.add(weight, bias if goes_along else None)


def _find_time_first(model: nn.Module, sites: Iterable[ConditionedLayer]) -> None:
    """In torch's transformers linear layers see what the attention beside them sees: by default positions before samples."""
    kinds = nn.TransformerEncoderLayer | nn.TransformerDecoderLayer
    around = [module for module in model.modules() if isinstance(module, kinds) and not module.self_attn.batch_first]
    turned = {id(inner) for module in around for inner in module.children()}
    for site in sites:
        site.is_time_first = id(site.module) in turned


def detach(model: nn.Module) -> None:
    """Make an attached model what it was. Works on copies and on models loaded from a file, where there is no handle."""
    check_module(model)
    modules = set(map(id, model.modules()))
    attached = [site for site in live_layers() if site.is_attached and id(site.module) in modules]
    if not attached:
        raise ValueError(f"nothing is attached to this {type(model).__name__}; isaac_newton.attach(model, damping=…) does that")
    for site in attached:
        site.detach()
    left = {id(site.run) for site in live_layers() if site.is_attached}
    for run in {id(site.run): site.run for site in attached if id(site.run) not in left}.values():
        unhook_models(model, run)
        if run.watch is not None:
            run.watch.stop()


def _select(
    model: nn.Module, layers: Layers | None, exclude: str | Iterable[str], run: Run, *, plain_embeddings: bool
) -> tuple[dict[str, tuple[nn.Module, Registration]], dict[str, str]]:
    """Split the modules that own parameters into those to condition and those to skip, with reasons."""
    check_module(model)
    candidates = {name: module for name, module in model.named_modules() if _owns(module) or is_parametrized(module)}
    if not candidates:
        raise ValueError(f"{type(model).__name__} has no parameters, so there is no gradient to condition")
    left_out = _left_out(candidates, layers, exclude)
    found = {name: find(module) for name, module in candidates.items()}
    parts = {
        child(name, part): name
        for name, registration in found.items()
        if isinstance(registration, Registration)
        for part in _parts(candidates[name], registration)
    }
    chosen: dict[str, tuple[nn.Module, Registration]] = {}
    skipped: dict[str, str] = {}
    for name, module in candidates.items():
        if name in parts:
            # What `layers` and `exclude` say of the whole holds for its parts.
            if parts[name] in skipped:
                skipped[name] = f"part of {parts[name]!r}, which is plain: {skipped[parts[name]]}"
            continue
        answer = left_out.get(name) or _served(name, module, found[name], run, plain_embeddings and layers is None)
        if isinstance(answer, str):
            skipped[name] = answer
        else:
            chosen[name] = module, answer
    if run.options.when == "step":
        for name, why in apart(model, chosen, joint=run.options.bias == "joint").items():
            del chosen[name]
            skipped[name] = why
    if not chosen:
        raise ValueError("no layer can be conditioned:\n" + "\n".join(f"  {name}: {why}" for name, why in skipped.items()))
    return chosen, skipped


def _left_out(candidates: Mapping[str, nn.Module], layers: Layers | None, exclude: str | Iterable[str]) -> dict[str, str]:
    """Which of these `layers` and `exclude` leave out, and which of the two it was."""
    excluded = dict.fromkeys(_match(candidates, exclude, "exclude"), f"excluded by exclude={exclude!r}")
    if layers is None:
        return excluded
    unselected = set(candidates) - _match(candidates, layers, "layers")
    named = getattr(layers, "__qualname__", "") or repr(layers)
    return dict.fromkeys(unselected, f"not selected by layers={named}") | excluded


def _served(name: str, module: nn.Module, found: Registration | str, run: Run, plain_embeddings: bool) -> Registration | str:
    """How a layer that was asked for is conditioned, or the reason why not."""
    if isinstance(vars(module).get("forward"), ConditionedLayer):
        raise ValueError(
            f"layer {listed([name])} is already attached; change handle.damping, or detach first: isaac_newton.detach(model)"
        )
    if isinstance(found, str):
        return found
    kind, options = type(module).__name__, run.options
    obstacles = {
        "damping='auto' leaves embeddings plain; name it with layers=, or give a damping, to condition it": (
            plain_embeddings and isinstance(module, _EMBEDDINGS)
        ),
        f"ζ needs the output gradients of {kind}, which only ζ* does without": run.conditions_outputs and not found.outputs,
        f"ζ of {kind} is made of its output's gradient: use output_curvature='empirical', or ζ*": (
            run.needs_extra_pass and found.outputs == "empirical"
        ),
        f"{kind} can be conditioned by its own batch only, without when='step' and process_group": (
            options.ranks is not None and not found.gathers
        ),
        "its weight is computed from other parameters, whose gradients when='step' cannot condition": (
            options.when == "step" and (is_parametrized(module) or _has_computed_weights(module))
        ),
    }
    return next((why for why, is_met in obstacles.items() if is_met), found)


def _parts(module: nn.Module, registration: Registration) -> list[str]:
    """Submodules whose weights are conditioned with the layer's own, by their names in it."""
    inside = [name for name, part in module.named_modules() if name.startswith("parametrizations.") and _owns(part)]
    return [*registration.parts, *inside]


def _owns(module: nn.Module) -> bool:
    """Whether it has parameters of its own."""
    return any(True for _ in module.parameters(recurse=False))


def _has_computed_weights(module: nn.Module) -> bool:
    """Whether a weight is made anew in each forward pass, as old-style `weight_norm`, `spectral_norm` and `prune` do."""
    attributes = vars(module).items()
    return any(isinstance(value, Tensor) and (value.requires_grad or name == "weight") for name, value in attributes)


def _match(candidates: Mapping[str, nn.Module], patterns: Layers, option: str) -> set[str]:
    """The names that a pattern, several, or a predicate picks; one that picks none is a mistake."""
    found: set[str] = set()
    for each in _several(patterns, option):
        names = {name for name, module in candidates.items() if _picks(each, name, module)}
        if not names and not isinstance(each, str):
            raise ValueError(f"{option}= picks no layer; there are: {listed(candidates)}")
        if not names:
            inside = f"{each}.*"
            better = f"; did you mean {inside!r}?" if any(fnmatch.fnmatchcase(name, inside) for name in candidates) else ""
            raise ValueError(f"{option}={each!r} matches no layer{better}; there are: {listed(candidates)}")
        found |= names
    return found


def _several(patterns: Layers, option: str) -> Sequence[str | Predicate]:
    """The patterns, or the one predicate."""
    if isinstance(patterns, str) or (callable(patterns) and not isinstance(patterns, type | nn.Module)):
        return [patterns]
    try:
        several = list(cast(Iterable[str], patterns))
    except TypeError:
        raise TypeError(f"{option} must be a glob pattern, several, or a function, got {patterns!r}") from None
    for pattern in several:
        if not isinstance(pattern, str):
            raise TypeError(f"{option} must be glob patterns over module names, got {pattern!r}")
    return several


def _picks(patterns: Layers, name: str, module: nn.Module) -> bool:
    """Whether a pattern, one of several, or a predicate picks this layer."""
    if callable(patterns):
        return patterns(name, module)
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in ([patterns] if isinstance(patterns, str) else patterns))
