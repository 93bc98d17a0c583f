"""Every name of torch that is not public, each with its reason; tests/test_torch_private.py says which one broke.

All were tried with torch 2.9.1, 2.10.0, 2.11.0, 2.13.0 and 2.15.0. Nothing else in this library uses a private name of torch.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

__all__ = [
    "BATCH_NORMS",
    "PARALLELIZED",
    "RECURRENT_KERNELS",
    "REPLICATE",
    "after_backward",
    "base",
    "bears_none",
    "break_graph",
    "call",
    "convolution_gradients",
    "copy_each",
    "current_pass",
    "detached",
    "differentiates_forward",
    "first_global_row",
    "full_precision",
    "has_values",
    "hint",
    "hooks_of",
    "is_autocast_on",
    "is_exported",
    "is_flattened",
    "is_hooked",
    "is_one_of_many",
    "is_quiet",
    "is_transformed",
    "keeps_graph",
    "may_be_watched",
    "no_view",
    "node_of",
    "parts_of",
    "raw_stream",
    "recurrent_kernel",
    "remove_forward_pre_hooks",
    "replica_of",
    "runs_step_hooks",
    "saves_elsewhere",
    "sparse_parts",
    "version",
    "wants_gradient",
    "while_compiling",
    "wide_norms",
    "will_compute",
    "will_compute_each",
]

_C: Any = torch._C
_ATEN: Any = torch.ops.aten
_NOTHING = nullcontext()

#: The number of the backward pass that runs in this thread, -1 outside of one: tells passes apart. No public name says it.
current_pass: Callable[[], int] = _C._current_graph_task_id
#: Whether this backward pass keeps its graph: only then are inputs needed for another one.
keeps_graph: Callable[[], bool] = _C._autograd._get_current_graph_task_keep_graph
#: Whether any autocast is on, in a tenth of the time of asking for each device.
is_autocast_on: Callable[[], bool] = _C._is_any_autocast_enabled
#: Whether torch.func is watching.
is_transformed: Callable[[], bool] = _C._are_functorch_transforms_active
#: The current CUDA stream of a device as a number, without making an object for it. A torch without CUDA never asks.
raw_stream: Callable[[int], int] = getattr(_C, "_cuda_getCurrentRawStream", int)

#: The common base of torch's batch norms.
BATCH_NORMS: type[nn.Module] = nn.modules.batchnorm._NormBase
#: Modules that tensor parallelism has changed have this attribute; FSDP2 leaves its shards in others.
PARALLELIZED = "_distribute_module_applied"
#: Under this name recurrent layers look their kernels up, once torch has checked what they were given.
RECURRENT_KERNELS = "_VF"


def will_compute(node: Any) -> bool:
    """Whether this backward pass computes the gradient of a leaf; `node` is what accumulates it, None if nobody does."""
    try:
        return node is None or bool(_C._will_engine_execute_node(node))
    except RuntimeError:
        return True  # torch raises where `autograd.grad` asks for that very leaf


def will_compute_each(nodes: Sequence[Any]) -> list[bool]:
    """`will_compute` of each, in a fraction of the time."""
    try:
        return [node is None or bool(_C._will_engine_execute_node(node)) for node in nodes]
    except RuntimeError:
        return [will_compute(node) for node in nodes]


def after_backward(callback: Callable[[], None]) -> None:
    """Call it when the backward pass that is running has ended. Public from torch 2.15 on, as `queue_callback`."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def saves_elsewhere() -> bool:
    """Whether hooks on saved tensors are on (activation checkpointing, offloading): then inputs may not be kept beside them."""
    return _saved_tensor_hooks(False) is not None


_saved_tensor_hooks: Callable[[bool], object] = _C._autograd._top_saved_tensors_default_hooks
_tracing_state: Callable[[], object] = _C._get_tracing_state


def is_quiet() -> bool:
    """Whether an ordinary forward pass runs whose gradients are wanted: all that the others here ask, in one call."""
    return (
        torch.is_grad_enabled()
        and not is_transformed()
        and _tracing_state() is None
        and _saved_tensor_hooks(False) is None
        and current_pass() < 0
        and forward_ad._current_level < 0
    )


def parts_of(module: nn.Module) -> tuple[dict[str, nn.Parameter | None], dict[int, Any], dict[int, Any]]:
    """Its parameters and both kinds of backward hooks, as it keeps them: to look an attribute up takes longer."""
    return module._parameters, module._backward_hooks, module._backward_pre_hooks


def has_values(x: Tensor) -> bool:
    """Whether values are there to be looked at: not those of traced tensors, nor of batched ones in torch.func."""
    return not (torch.compiler.is_compiling() or _C._functorch.is_functorch_wrapped_tensor(x))


def is_exported() -> bool:
    """Whether the forward pass is written down for use elsewhere, where nothing is trained: `torch.export`, `torch.jit.trace`.

    `torch.compiler.is_exporting` says the first too, but in compiled code of torch 2.9 to 2.11 it is always true.
    """
    return torch.compiler._is_exporting_flag or _tracing_state() is not None


def hint(size: Any) -> int:
    """A dynamic size, in the batch for which code is compiled."""
    return int(size.node.hint)


def while_compiling(function: Callable[[Any], None]) -> None:
    """Call it when the compiler reads this. Its argument has the caller's variables, as `get_local(name, stacklevel=1)`."""
    from torch._dynamo.comptime import comptime  # importing the compiler takes a second, and here it is there

    comptime(function)


def is_one_of_many(x: Tensor) -> bool:
    """Whether this is a gradient under `is_grads_batched=True`, which has a dimension that it does not show."""
    return bool(_C._functorch.is_legacy_batchedtensor(x))


def wants_gradient(x: Tensor) -> bool:
    """Whether it requires a gradient. Under `torch.func.vmap` a batch of tensors does not say so itself."""
    while not torch.compiler.is_compiling() and _C._functorch.is_batchedtensor(x):
        x = _C._functorch.get_unwrapped(x)
    return x.requires_grad


def differentiates_forward() -> bool:
    """Whether forward-mode differentiation is on."""
    return forward_ad._current_level >= 0


#: How often a tensor was changed in place.
version: Callable[[Tensor], int] = attrgetter("_version")


def detached(x: Tensor) -> Tensor:
    """The tensor without its graph, also where torch is tracing something else at this moment: graphs may go anywhere."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), temporarily_clear_interpreter_stack():
        return x.detach()


def full_precision(x: Tensor) -> AbstractContextManager[Any]:
    """No autocast, should the backward pass run inside one."""
    return torch.autocast(x.device.type, enabled=False) if is_autocast_on() else _NOTHING


#: What `DataParallel` calls to copy a module for each device; a copy shares what stands in the module's `__dict__`.
REPLICATE = "_replicate_for_data_parallel"


def replica_of(module: nn.Module) -> nn.Module:
    """What `DataParallel` would make of a module."""
    replica: nn.Module = getattr(type(module), REPLICATE)(module)
    return replica


def base(x: Tensor) -> Tensor | None:
    """The tensor that this one is a view of. A function, because the compiler cannot read an `attrgetter`."""
    return x._base


def node_of(output: Tensor) -> Any:
    """The node of a call. A view that is changed in place gets another node, and its base keeps the old one."""
    whole = output._base
    return output.grad_fn if whole is None or whole.grad_fn is None else whole.grad_fn


def is_hooked(parameter: Any) -> bool:
    """Whether somebody may look at a gradient of this parameter before the backward pass ends."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


#: The hooks on its gradient, if there are any.
hooks_of: Callable[[Tensor], Any] = attrgetter("_backward_hooks")


def bears_none(parameter: Any) -> bool:
    """Whether each of these says that it may be called without a gradient."""
    return all(getattr(hook, "bears_none", False) for hook in parameter._backward_hooks.values())


def runs_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `register_step_pre_hook` has an effect: torch wraps the `step` of a class when its constructor runs."""
    return bool(getattr(type(optimizer).step, "hooked", False))


def is_flattened(parameter: Tensor) -> bool:
    """Whether it is what FSDP makes of the weights of a module."""
    return getattr(parameter, "_is_flat_param", False)


def may_be_watched(module: nn.Module) -> bool:
    """Whether the gradient of its weight has to come by itself.

    Backward hooks of the module may read `.grad`. Hooks on saved tensors own the input. Tangents pass one weight at a time.
    """
    hooked = module._backward_hooks or module._backward_pre_hooks or forward_ad._current_level >= 0
    return bool(hooked or saves_elsewhere())


def remove_forward_pre_hooks(module: nn.Module, chosen: Callable[[Any], bool]) -> None:
    """Remove hooks from a module, those of a copy too: its handles are with the original."""
    for number in [number for number, hook in module._forward_pre_hooks.items() if chosen(hook)]:
        del module._forward_pre_hooks[number]
        module._forward_pre_hooks_with_kwargs.pop(number, None)


def call(function: type[torch.autograd.Function], *args: object) -> Any:
    """`function.apply(*args)` without what only torch.func needs: binding arguments takes longer than a product."""
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def no_view(x: Tensor) -> Tensor:
    """The same tensor, not known as a view: what a Function returns as a view may not be changed in place."""
    whole: Tensor = _ATEN._unsafe_view(x, x.shape)
    return whole


def recurrent_kernel(name: str) -> Callable[..., Any]:
    """What a recurrent layer or cell of torch calls. No public function takes the weights as arguments."""
    kernel: Callable[..., Any] = getattr(torch._VF, name)
    return kernel


def convolution_gradients(g: Tensor, x: Tensor, weight: Tensor, how: tuple[Any, ...], wanted: list[bool]) -> Sequence[Tensor]:
    """Gradients of a convolution's input and weight one by one. The public functions make a padded copy, or know no layout."""
    found: Sequence[Tensor] = _ATEN.convolution_backward(g, x, weight, None, *how, wanted)
    return found


def sparse_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """Values and indices of a sparse tensor as they are; the public names want them coalesced."""
    return x._values(), x._indices()


def wide_norms(xs: Sequence[Tensor]) -> list[Tensor]:
    """‖x‖ of each on a GPU, with squares in float64. The public function would copy all numbers to that type first."""
    return list(torch._foreach_norm(list(xs), 2, torch.float64))


def copy_each(to: Sequence[Tensor], xs: Sequence[Tensor]) -> None:
    """Copy each to its place, whatever the types, in few launches. No public function does that."""
    torch._foreach_copy_(list(to), list(xs))


def break_graph(reason: str) -> None:
    """End the graph that is being compiled."""
    dynamo: Any = torch._dynamo
    dynamo.graph_break(msg=reason)


def first_global_row(tensor: Any) -> int:
    """Where in a sharded tensor the rows of this rank begin."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return int(compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1][0])
