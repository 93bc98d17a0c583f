"""Every layer and option agrees with explicit rows (patches, one-hot rows, means) and a dense float64 inverse."""

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import isaac_newton as isaac
from isaac_newton.core import rows
from isaac_newton.core.rows import Layout
from isaac_newton.core.use import Use
from isaac_newton.kernels.permutation import permuted
from isaac_newton.math import patches as patch_module
from isaac_newton.math.patches import Patches
from reference import assert_close

DAMPING = 0.3
CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


def right(gradient: Tensor, r: Tensor, damping: float = DAMPING) -> Tensor:
    """λ ∇ (rᵀr / k + λI)⁻¹ by a dense inverse."""
    return damping * gradient @ torch.linalg.inv(r.T @ r / len(r) + damping * torch.eye(r.shape[1], dtype=r.dtype))


def run(layer: nn.Module, *inputs: Tensor, **options: Any) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor, nn.Module]:
    """Gradients of an attached copy and of the plain layer for one random output gradient; outputs must be the same bits."""
    attached = copy.deepcopy(layer)
    isaac.attach(attached, DAMPING, **options)
    plain_inputs = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    inputs = tuple(x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs)
    expected, actual = layer(*plain_inputs), attached(*inputs)
    assert torch.equal(expected, actual)
    g = torch.randn_like(expected)
    expected.backward(g)
    actual.backward(g)
    for x, y in zip(inputs, plain_inputs, strict=True):
        if x.is_floating_point():
            assert_close(x.grad, y.grad, 1e-12)
    assert torch.equal(layer.eval()(*inputs), attached.eval()(*inputs))
    plain = {name: p.grad for name, p in layer.named_parameters()}
    return {name: p.grad for name, p in attached.named_parameters()}, plain, g, attached


@st.composite
def convolutions(draw: st.DrawFn, transposed: bool) -> tuple[Any, Tensor]:
    """A convolution of any settings and an input that fits it."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    dims = draw(st.integers(1, 3))
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    inputs, outputs = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    kernel = [draw(st.integers(1, 3)) for _ in range(dims)]
    stride = [draw(st.integers(1, 2)) for _ in range(dims)]
    dilation = [draw(st.integers(1, 2)) for _ in range(dims)]
    options: dict[str, Any] = {"groups": groups, "bias": draw(st.booleans()), "dtype": torch.float64}
    padding: Any = [draw(st.integers(0, 1)) for _ in range(dims)]
    if not transposed:
        mode = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
        named = draw(st.sampled_from([None, "same", "valid"]))
        if named is not None:
            padding = named
            stride = [1] * dims if named == "same" else stride
        layer = CONVOLUTIONS[dims](
            inputs, outputs, kernel, stride=stride, padding=padding, dilation=dilation, padding_mode=mode, **options
        )
    else:
        extra = [draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)]
        layer = TRANSPOSED[dims](
            inputs, outputs, kernel, stride=stride, padding=padding, dilation=dilation, output_padding=extra, **options
        )
    size = [5 if dims < 3 else 3 + 2 * (d > 1) for d in dilation]
    x = torch.randn(draw(st.integers(1, 3)), inputs, *size, dtype=torch.float64)
    return layer, x


def padded(layer: Any, x: Tensor) -> Tensor:
    sides: list[int] = []
    for k, d, p in zip(
        layer.kernel_size, layer.dilation, layer.padding if isinstance(layer.padding, tuple) else layer.kernel_size, strict=True
    ):
        total = d * (k - 1)
        before = {"same": total // 2, "valid": 0}.get(layer.padding, p) if isinstance(layer.padding, str) else p
        after = total - total // 2 if layer.padding == "same" else before
        sides = [before, after, *sides]
    return F.pad(x, sides, mode="constant" if layer.padding_mode == "zeros" else layer.padding_mode)


def explicit_patches(layer: Any, x: Tensor, group: int) -> Tensor:
    """(samples, places, features): the kernel laid on every place by hand, a Python loop over each."""
    x = padded(layer, x)
    per = layer.in_channels // layer.groups
    x = x[:, group * per : (group + 1) * per]
    places = [
        range(0, x.shape[2 + i] - layer.dilation[i] * (layer.kernel_size[i] - 1), layer.stride[i])
        for i in range(len(layer.kernel_size))
    ]
    found = []
    for corner in itertools.product(*places):
        window: tuple[Any, ...] = (slice(None), slice(None))
        for start, k, d in zip(corner, layer.kernel_size, layer.dilation, strict=True):
            window = (*window, slice(start, start + d * (k - 1) + 1, d))
        found.append(x[window].reshape(len(x), -1))
    return torch.stack(found, dim=1)


def chosen_rows(patches: Tensor, sharing: str) -> Tensor:
    return patches.mean(1) if sharing == "reduce" else patches.reshape(-1, patches.shape[-1])


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")  # torch's, about its own speed
@given(convolutions(transposed=False), st.sampled_from(["expand", "reduce"]))
def test_convolutions_are_conditioned_by_their_patches(case: tuple[Any, Tensor], sharing: str) -> None:
    layer, x = case
    actual, plain, g, _ = run(layer, x, sharing=sharing)
    per = layer.out_channels // layer.groups
    for group in range(layer.groups):
        part = slice(group * per, (group + 1) * per)
        patches = explicit_patches(layer, x, group)
        # The gradient from patches and output gradients written out, not torch's
        gradient = torch.einsum("nol,nlf->of", g[:, part].reshape(len(x), per, -1), patches)
        expected = right(gradient, chosen_rows(patches, sharing))
        assert_close(actual["weight"][part].reshape(per, -1), expected)
    if layer.bias is not None:
        assert torch.equal(actual["bias"], plain["bias"])


@given(convolutions(transposed=True), st.sampled_from(["expand", "reduce"]))
def test_transposed_convolutions_are_conditioned_by_the_places_of_their_input(case: tuple[Any, Tensor], sharing: str) -> None:
    layer, x = case
    actual, plain, _, _ = run(layer, x, sharing=sharing)
    per = layer.in_channels // layer.groups
    for group in range(layer.groups):
        part = slice(group * per, (group + 1) * per)
        places = x[:, part].reshape(len(x), per, -1).transpose(1, 2)
        expected = right(plain["weight"][part].reshape(per, -1).T, chosen_rows(places, sharing)).T
        assert_close(actual["weight"][part].reshape(per, -1), expected)
    if layer.bias is not None:
        assert torch.equal(actual["bias"], plain["bias"])


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 5, 3, padding=1, dtype=torch.float64),
        nn.Conv2d(4, 5, (3, 2), stride=2, dilation=(1, 2), bias=False, dtype=torch.float64),
        nn.Conv2d(4, 8, 3, groups=4, dtype=torch.float64),
    ],
)
def test_two_dimensional_convolutions_agree_with_unfold(layer: nn.Conv2d, sharing: str) -> None:
    x = torch.randn(3, 4, 7, 6, dtype=torch.float64)
    actual, _, g, _ = run(copy.deepcopy(layer), x, sharing=sharing)
    columns = F.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    size, per = columns.shape[1] // layer.groups, layer.out_channels // layer.groups
    for group in range(layer.groups):
        patches = columns[:, group * size : (group + 1) * size].transpose(1, 2)
        part = slice(group * per, (group + 1) * per)
        gradient = torch.einsum("nol,nlf->of", g[:, part].flatten(2), patches)
        assert_close(actual["weight"][part].flatten(1), right(gradient, chosen_rows(patches, sharing)))


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("innermost", [False, True])
@pytest.mark.parametrize("options", [{}, {"stride": 2, "padding": 1}, {"padding": (2, 0), "dilation": (1, 2), "groups": 2}])
def test_the_average_patch_is_the_same_by_one_product_and_by_one_for_each_dimension(
    options: dict[str, Any], innermost: bool, order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = nn.Conv2d(4, 6, (3, 2), **options)
    patches = Patches(layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.groups, channels_last=order)
    x = torch.randn(3, 4, 9, 8, dtype=torch.float64)
    x = x.to(memory_format=torch.channels_last) if innermost else x
    expected, count = patches.average(x)
    view, positions = patches(x)
    assert count == math.prod(view.shape[2:4])
    assert_close(expected, rows.average(view, positions, None).flatten(2), 1e-12)
    monkeypatch.setattr(patch_module, "_sums_by_dimension", patch_module._sums_at_once)  # what a GPU does
    assert_close(patches.average(x)[0], expected, 1e-12)


@pytest.mark.parametrize("sums", [patch_module._sums_by_dimension, patch_module._sums_at_once])
def test_an_empty_batch_has_no_averages(sums: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_module, "_sums_by_dimension", sums)
    means, places = Patches((3, 3), (1, 1), (1, 1), (1, 1)).average(torch.empty(0, 2, 5, 4))
    assert means.shape == (1, 0, 18)
    assert places == 20


def test_unbatched_convolutions_have_one_sample() -> None:
    for layer in (nn.Conv2d(3, 4, 3, dtype=torch.float64), nn.ConvTranspose2d(3, 4, 3, dtype=torch.float64)):
        x = torch.randn(3, 6, 6, dtype=torch.float64)
        single, _, g, _ = run(copy.deepcopy(layer), x)
        attached = copy.deepcopy(layer)
        isaac.attach(attached, DAMPING)
        attached(x[None]).backward(g[None])
        assert_close(single["weight"], attached.weight.grad)


def test_a_transposed_convolution_takes_its_output_size() -> None:
    layer = nn.ConvTranspose2d(3, 4, 3, stride=2, dtype=torch.float64)
    attached = copy.deepcopy(layer)
    isaac.attach(attached, DAMPING)
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    assert torch.equal(attached(x, output_size=[12, 12]), layer(x, output_size=[12, 12]))


@given(st.integers(1, 4), st.lists(st.integers(1, 4), max_size=2), st.integers(1, 6), st.booleans(), st.integers(0, 2**31))
def test_reduce_averages_the_positions_of_a_linear_layer(
    samples: int, positions: list[int], features: int, joint: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    layer = nn.Linear(features, 3, dtype=torch.float64)
    x = torch.randn(samples, *positions, features, dtype=torch.float64)
    actual, plain, _, _ = run(layer, x, sharing="reduce", bias="joint" if joint else "plain")
    r = x.reshape(samples, math.prod(positions), features).mean(1)
    if joint:
        r = torch.cat([r, torch.ones(samples, 1, dtype=torch.float64)], dim=1)
        expected = right(torch.cat([plain["weight"], plain["bias"][:, None]], dim=1), r)
        assert_close(actual["weight"], expected[:, :-1])
        assert_close(actual["bias"], expected[:, -1])
    else:
        assert_close(actual["weight"], right(plain["weight"], r))
        assert_close(actual["bias"], plain["bias"], 1e-14)


def test_a_joint_bias_of_a_convolution_is_a_column_of_ones() -> None:
    layer = nn.Conv1d(2, 6, 3, groups=2, dtype=torch.float64)
    x = torch.randn(4, 2, 8, dtype=torch.float64)
    actual, plain, _, _ = run(layer, x, bias="joint")
    for group in range(2):
        part = slice(3 * group, 3 * group + 3)
        patches = explicit_patches(layer, x, group).reshape(-1, 3)
        r = torch.cat([patches, torch.ones(len(patches), 1, dtype=torch.float64)], dim=1)
        expected = right(torch.cat([plain["weight"][part].flatten(1), plain["bias"][part, None]], dim=1), r)
        assert_close(actual["weight"][part].flatten(1), expected[:, :-1])
        assert_close(actual["bias"][part], expected[:, -1])


LAYERS_WITH_ROWS: dict[str, tuple[Callable[[], nn.Module], Sequence[int]]] = {
    "linear": (lambda: nn.Linear(6, 4, dtype=torch.float64), (5, 3, 6)),
    "convolution": (lambda: nn.Conv2d(2, 4, 3, dtype=torch.float64), (5, 2, 5, 6)),
    "transposed": (lambda: nn.ConvTranspose1d(4, 2, 3, dtype=torch.float64), (5, 4, 6)),
}


def arranged(layer: Any, x: Tensor) -> Tensor:
    """(rows, features) of an ungrouped layer."""
    if isinstance(layer, nn.Linear):
        return x.reshape(-1, x.shape[-1])
    if isinstance(layer, nn.Conv2d):
        return explicit_patches(layer, x, 0).reshape(-1, 18)
    return x.transpose(1, 2).reshape(-1, x.shape[1])


@pytest.mark.parametrize("kind", LAYERS_WITH_ROWS)
@pytest.mark.parametrize("max_rows", [1, 4, 7, 10_000])
def test_max_rows_conditions_with_a_subset_of_the_rows(kind: str, max_rows: int) -> None:
    make, shape = LAYERS_WITH_ROWS[kind]
    layer, x = make(), torch.randn(*shape, dtype=torch.float64)
    actual, plain, _, attached = run(layer, x, max_rows=max_rows)
    everything = arranged(layer, x)
    gradient = plain["weight"].flatten(1) if kind != "transposed" else plain["weight"].flatten(1).T
    result = actual["weight"].flatten(1) if kind != "transposed" else actual["weight"].flatten(1).T
    drawn: Tensor | slice = slice(None)
    if max_rows < len(everything):
        drawn = permuted(len(everything), max_rows, vars(attached)["forward"].run.seed, 0, "cpu")
    assert_close(result, right(gradient, everything[drawn]))


def test_max_rows_draws_from_the_averages_where_positions_are_reduced() -> None:
    layer, x = nn.Linear(6, 4, dtype=torch.float64), torch.randn(9, 3, 6, dtype=torch.float64)
    actual, plain, _, attached = run(layer, x, sharing="reduce", max_rows=4)
    drawn = permuted(9, 4, vars(attached)["forward"].run.seed, 0, "cpu")
    assert_close(actual["weight"], right(plain["weight"], x.mean(1)[drawn]))


@given(st.integers(2, 9), st.integers(1, 9), st.integers(1, 3))
def test_a_subset_of_rows_is_unbiased(count: int, max_rows: int, groups: int) -> None:
    view = torch.randn(groups, count, 3, dtype=torch.float64)
    exact = view.mT @ view / count
    kept = min(max_rows, count)
    draws = [rows.gather(view, 0, max_rows, None, seed) for seed in range(600)]
    assert all(draw.shape == (groups, kept, 3) for draw in draws)
    estimates = torch.stack([draw.mT @ draw / kept for draw in draws])
    noise = estimates.std(0) / math.sqrt(len(draws))
    assert ((estimates.mean(0) - exact).abs() <= 6 * noise + 1e-12).all()


def test_drawing_rows_follows_torchs_seed_and_leaves_its_generator_alone() -> None:
    layer, x = nn.Linear(6, 4), torch.randn(50, 6)
    handle = isaac.attach(layer, DAMPING, max_rows=5)

    def gradient(seed: int) -> Tensor:
        torch.manual_seed(seed)
        handle.backward_passes = 0
        layer.zero_grad()
        layer(x).square().sum().backward()
        assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(seed)))
        assert layer.weight.grad is not None
        return layer.weight.grad.clone()

    assert torch.equal(gradient(1), gradient(1))
    assert not torch.equal(gradient(1), gradient(2))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_masked_positions_neither_condition_nor_count(sharing: str) -> None:
    x = torch.randn(4, 5, 6, dtype=torch.float64)
    mask = torch.arange(5) < torch.tensor([5, 3, 1, 0])[:, None]
    layer, plain = (nn.Linear(6, 3, dtype=torch.float64) for _ in range(2))
    plain.load_state_dict(layer.state_dict())
    handle = isaac.attach(layer, DAMPING, sharing=sharing)
    handle.mask = mask
    output = layer(x)
    handle.mask = None  # what counts is the mask at the forward pass
    g = torch.randn_like(output)
    output.backward(g)
    plain(x).backward(g)
    if sharing == "expand":
        r = x[mask]
    else:
        r = torch.stack([x[i, : max(n, 1)].mean(0) * (n > 0) for i, n in enumerate([5, 3, 1, 0])])
    assert_close(layer.weight.grad, right(plain.weight.grad, r))


@pytest.mark.parametrize("lengths", [[5, 3, 1, 0], [0, 0, 0, 0], [5, 5, 5, 5]], ids=str)
@pytest.mark.parametrize("options", [{}, {"bias": "joint"}, {"sharing": "reduce"}], ids=str)
@pytest.mark.parametrize("damping", [DAMPING, isaac.Relative(0.3), lambda step: DAMPING / (1 + step), math.inf])
@pytest.mark.filterwarnings("ignore:handle.mask leaves out every position:RuntimeWarning")
def test_masked_rows_may_stay_as_zeros(
    damping: Any, options: dict[str, Any], lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU a mask is not looked at: what it says to leave out is zero there, whatever it was, and does not count."""
    x, g = torch.randn(4, 5, 6, dtype=torch.float64), torch.randn(4, 5, 3, dtype=torch.float64)
    mask = torch.arange(5) < torch.tensor(lengths)[:, None]
    layer = nn.Linear(6, 3, dtype=torch.float64)

    def gradients() -> list[Tensor]:
        own = copy.deepcopy(layer)
        handle = isaac.attach(own, damping, **options)
        for _ in range(2):
            own.zero_grad()
            handle.mask = mask
            own(x).backward(g)
        return [parameter.grad for parameter in own.parameters() if parameter.grad is not None]

    dropped = gradients()
    monkeypatch.setattr(rows, "_may_look", lambda use: False)
    for actual, expected in zip(gradients(), dropped, strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize(
    "options",
    [{}, {"sharing": "reduce"}, {"max_rows": 7}, {"bias": "joint"}, {"when": "step"}, {"sharing": "reduce", "bias": "joint"}],
    ids=str,
)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_the_order_of_weights_in_memory_changes_nothing(dims: int, groups: int, options: dict[str, Any]) -> None:
    """But the copies that are made."""
    torch.manual_seed(0)
    plain = CONVOLUTIONS[dims](4, 6, 3, padding=1, stride=2, groups=groups, dtype=torch.float64)
    x = torch.randn(3, 4, *[5] * dims, dtype=torch.float64)
    found = []
    for innermost in (False, True):
        layer = copy.deepcopy(plain)
        if innermost:
            layer.weight = nn.Parameter(layer.weight.detach().movedim(1, -1).contiguous().movedim(-1, 1))
            assert not layer.weight.is_contiguous()
        handle = isaac.attach(layer, DAMPING, **options)
        layer(x).square().sum().backward()
        if options.get("when") == "step":
            handle.step()
        assert layer.weight.grad is not None
        assert layer.weight.grad.stride() == layer.weight.stride()
        found.append([parameter.grad for parameter in layer.parameters() if parameter.grad is not None])
    for actual, expected in zip(*found, strict=True):
        assert_close(actual, expected)


def gathered(handle: isaac.Handle, x: Tensor, mask: Tensor | None, drop: bool, monkeypatch: pytest.MonkeyPatch) -> rows.Rows:
    """The rows of one use of a linear layer; without `drop`, as on a GPU."""
    monkeypatch.setattr(rows, "_may_look", lambda use: drop)
    site = vars(handle.conditioned[""])["forward"]
    (found,) = rows.rows([Use(site, Layout(rows.sequence), x, mask, False, 3)])
    return found


@pytest.mark.parametrize("drop", [True, False])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("shape", [(4, 5, 6), (4, 6)], ids=str)
def test_rows_of_half_precision_are_float32(
    shape: tuple[int, ...], sharing: Any, drop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(shape).bfloat16()
    handle = isaac.attach(nn.Linear(6, 3), DAMPING, sharing=sharing)
    for mask in (None, torch.ones(shape[:-1], dtype=torch.bool)):
        r = gathered(handle, x, mask, drop, monkeypatch).r
        expected = x.float().mean(1) if sharing == "reduce" and len(shape) == 3 else x.float().reshape(-1, 6)
        assert r.dtype is torch.float32
        torch.testing.assert_close(r, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("drop", [True, False])
def test_what_a_mask_leaves_out_need_not_be_finite(drop: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    x[~mask] = math.nan
    handle = isaac.attach(nn.Linear(6, 3), DAMPING)
    r, total, counted, *_ = gathered(handle, x, mask, drop, monkeypatch)
    assert total == 6
    assert r.isfinite().all()
    assert torch.equal(r if counted is None else r[counted], x[mask])
    assert r.shape[0] == (3 if drop else 6)


def test_a_mask_of_another_shape_is_not_for_this_layer() -> None:
    layer = nn.Linear(6, 3, dtype=torch.float64)
    handle = isaac.attach(layer, DAMPING)
    handle.mask = (torch.arange(9) < 4).expand(2, 9)
    x, g = torch.randn(4, 5, 6, dtype=torch.float64), torch.randn(4, 5, 3, dtype=torch.float64)
    with pytest.warns(RuntimeWarning, match=r"mask .* \(2, 9\)"):
        layer(x).backward(g)
    assert_close(layer.weight.grad, right(g.reshape(-1, 3).T @ x.reshape(-1, 6), x.reshape(-1, 6)))


def test_lazy_layers_and_norms_say_why_not_and_what_to_do() -> None:
    model = nn.ModuleDict({"lazy": nn.LazyLinear(3), "norm": nn.BatchNorm1d(3), "fc": nn.Linear(3, 3)})
    handle = isaac.attach(model)
    assert list(handle.conditioned) == ["fc"]
    assert "run one batch" in handle.skipped["lazy"]
    assert "normalization" in handle.skipped["norm"]


@pytest.mark.parametrize("make", [lambda dtype: nn.Linear(3, 2, dtype=dtype), lambda dtype: nn.Conv1d(3, 2, 2, dtype=dtype)])
def test_complex_layers_keep_their_gradient(make: Callable[[torch.dtype], nn.Module]) -> None:
    layer = make(torch.complex128)
    handle = isaac.attach(nn.ModuleList([layer, make(torch.float64)]))
    assert list(handle.conditioned) == ["1"]
    assert "complex" in handle.skipped["0"]
    with pytest.raises(ValueError, match="complex"):
        isaac.attach(layer)
    with pytest.raises(TypeError, match="real"):
        isaac.Linear(3, 2, dtype=torch.complex64)
    weight = torch.randn(2, 3, dtype=torch.complex64, requires_grad=True)
    with pytest.raises(TypeError, match="real"):
        isaac.condition(weight, None, torch.randn(4, 3), isaac.Linear(3, 2)._site)


def test_zeta_leaves_layers_plain_whose_outputs_it_cannot_see() -> None:
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten(), nn.Linear(9, 2))
    handle = isaac.attach(model, output_damping=0.1)
    assert list(handle.conditioned) == ["2"]
    assert "Conv1d" in handle.skipped["0"]
    assert "ζ*" in handle.skipped["0"]


def test_registering_a_layer_twice_is_loud() -> None:
    with pytest.raises(ValueError, match="already has the adapter"):
        isaac.register(nn.Linear)(lambda layer, site, x: x)


def test_a_mask_of_something_else_does_not_make_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The average patch of a convolution is had without forming any, also where a mask for sentences is set."""
    layer, x = nn.Conv2d(3, 4, 3), torch.randn(5, 3, 8, 8)
    handle = isaac.attach(layer, 0.3, sharing="reduce")
    layer(x).square().mean().backward()
    assert layer.weight.grad is not None
    expected, layer.weight.grad = layer.weight.grad, None
    handle.mask = torch.rand(5, 12) < 0.5
    monkeypatch.setattr(Tensor, "unfold", lambda *args: pytest.fail("patches were formed"))
    layer(x).square().mean().backward()
    assert torch.equal(layer.weight.grad, expected)


@pytest.mark.parametrize("with_outputs", [False, True])
def test_a_gradient_penalty_is_conditioned_although_the_outputs_are_gone(with_outputs: bool) -> None:
    """Helpers return a penalty and drop what the model returned; the weights' rows must outlive it, but not their graph."""
    plain = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    model, x = copy.deepcopy(plain), torch.randn(7, 3, 6, dtype=torch.float64)
    isaac.attach(model, DAMPING, sharing="reduce")
    kept: list[Tensor] = []

    def penalty(network: nn.Module) -> Tensor:
        inputs = x.clone().requires_grad_()
        output = network(inputs)
        kept.extend([output] if with_outputs else [])
        (g,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
        return (g.norm(dim=-1) - 1).square().mean()

    for each in (model, plain):
        penalty(each).backward()
    a = x
    for number in (0, 2, 4):
        assert_close(model[number].weight.grad, right(plain[number].weight.grad, a.mean(1)))
        a = torch.tanh(plain[number](a)).detach()
    third = penalty(model)
    if not with_outputs:
        with pytest.raises(RuntimeError, match="third derivatives"):
            torch.autograd.grad(third, model[0].weight, create_graph=True)
