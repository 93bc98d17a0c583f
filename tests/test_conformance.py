"""What people do to a model in training, done to an attached one: the rows of docs/compatibility.md.

`@pytest.mark.conformance(area, promise, notes)` makes a test a row of that page, or several.
"""

import copy
import fcntl
import functools
import importlib.util
import io
import json
import math
import os
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import isaac_newton as isaac
from conformance.compiled import Convolutions, Encoder, images, tokens
from reference import assert_close, zeta_star

row = pytest.mark.conformance


def mlp(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(9, 16), nn.ReLU(), nn.Linear(16, 3)).to(dtype)


def batch(step: int = 0, rows: int = 12, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(step)
    return torch.randn(rows, 9, generator=random, dtype=dtype), torch.randint(3, (rows,), generator=random)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def attached(when: str = "backward", dtype: torch.dtype = torch.float32, lr: float = 0.1, **options: Any) -> tuple[Any, ...]:
    model = mlp(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    handle = isaac.attach(model, **{"damping": 0.1, "when": when, **options})
    if when == "step":
        handle.bind(optimizer)
    return model, optimizer, handle


# torch.compile, in processes of its own


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], dict[str, Any]]:
    """What a check under torch.compile found; a group of checks runs once, whatever the number of test workers."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def find(group: str, check: str) -> dict[str, Any]:
        path = folder / f"compiled-{group}.json"
        with (folder / f"compiled-{group}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                source = Path(__file__).parent.parent / "src"
                environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
                script = Path(__file__).parent / "conformance" / "compiled.py"
                done = subprocess.run(
                    [sys.executable, str(script), group, str(path)], env=environment, capture_output=True, text=True
                )
                assert done.returncode == 0, done.stderr[-4000:]
        found = json.loads(path.read_text())[check]
        if "missing" in found:
            pytest.skip(found["missing"])
        assert "raised" not in found, found["raised"]
        return found

    return find


COMPILE = "torch.compile"
DYNAMIC = "one graph, no breaks, equal to eager; other batch sizes compile once more and no further"


APART = "With every row, layers that receive one tensor (q, k, v) compute a conditioner each in compiled code."


@pytest.mark.parametrize(
    ("check", "most"),
    [
        pytest.param("linear", 2, marks=row(COMPILE, f"Linear layers: {DYNAMIC}")),
        pytest.param("convolutions", 2, marks=row(COMPILE, f"Convolutions with groups, transposed, padded: {DYNAMIC}")),
        pytest.param("encoder", 2, marks=row(COMPILE, f"Embedding and nn.TransformerEncoderLayer: {DYNAMIC}", APART)),
        pytest.param("cells", 2, marks=row(COMPILE, f"LSTM, GRU and RNN cells: {DYNAMIC}")),
        pytest.param("automatic", 2, marks=row(COMPILE, f"The automatic form: {DYNAMIC}")),
        pytest.param(
            "bert", 1, marks=row(COMPILE, "A Hugging Face BERT in the automatic form: one graph, no breaks, equal to eager")
        ),
        pytest.param("gpt2", 1, marks=row(COMPILE, "A Hugging Face GPT-2: one graph, no breaks, equal to eager")),
        pytest.param("inductor", 1, marks=row(COMPILE, "The inductor backend, every kind of layer: equal to eager")),
    ],
)
def test_compiled_models_equal_eager_ones(compiled, check: str, most: int) -> None:
    found = compiled("models", check)
    if "skipped" in found:
        pytest.skip(found["skipped"])
    assert found["error"] <= 1e-12
    assert found["breaks"] == 0
    assert found["graphs"] <= most


@pytest.mark.parametrize(
    "check",
    [
        pytest.param("reduce", marks=row(COMPILE, 'sharing="reduce": one graph, equal to eager')),
        pytest.param("max_rows", marks=row(COMPILE, "max_rows: one graph, the same rows are drawn as in eager")),
        pytest.param("joint", marks=row(COMPILE, 'bias="joint" and a relative damping: one graph, equal to eager')),
        pytest.param("mask", marks=row(COMPILE, "handle.mask, changing: one graph, equal to eager")),
        pytest.param("step", marks=row(COMPILE, 'when="step": one graph, equal to eager')),
        pytest.param("step with an average", marks=row(COMPILE, 'when="step" with decay and power: one graph, equal to eager')),
        pytest.param(
            "step, gathered now and then",
            marks=row(COMPILE, 'when="step" with gather and warm_up: one graph, equal to eager'),
        ),
        pytest.param(
            "damping",
            marks=row(
                COMPILE,
                "handle.damping, changed between steps to any number or Relative: used at once, nothing compiled anew",
                "Where rows are drawn or averaged, a Relative in the place of a number compiles once more.",
            ),
        ),
        pytest.param(
            "checkpointed",
            marks=row(
                COMPILE, "Activation checkpointing inside of compiled code, the automatic form: one graph, equal to eager"
            ),
        ),
        pytest.param(
            "empirical", marks=row(COMPILE, 'ζ with output_curvature="empirical" and a scaled loss: one graph, equal to eager')
        ),
        pytest.param("autocast", marks=row(COMPILE, "bf16 autocast: one graph, equal to eager")),
    ],
)
def test_options_and_settings_hold_in_compiled_code(compiled, check: str) -> None:
    found = compiled("options", check)
    assert found["error"] <= 1e-12
    assert found["breaks"] == 0
    assert found["graphs"] == 1


@row(COMPILE, "The automatic form, λ and the batch size changing in 20 steps: two graphs, equal to eager in each step")
def test_neither_damping_nor_batch_compile_anew(compiled) -> None:
    found = compiled("options", "changes")
    assert found["error"] <= 1e-12
    assert found["passes"] == [20, 20]
    assert found["graphs"] == 2


@row(
    COMPILE,
    "Draws, Gram matrices and products of a BERT are torch's own operations; q, k and v share one inverse, an operator",
    "λ, the drawn positions and the count of passes come in through one operator each.",
)
def test_the_compiler_sees_through_the_automatic_form(compiled) -> None:
    found = compiled("models", "bert")
    assert found["forward"] == {}
    # Eight linear layers, three of which receive one tensor; an embedding is divided by counts in an operator.
    assert found["backward"] == {"strength": 1, "draw": 1, "passing": 1, "inverse": 6}


@row(COMPILE, "A damping schedule counts the backward passes of compiled code")
def test_a_schedule_goes_on_in_compiled_code(compiled) -> None:
    found = compiled("options", "schedule")
    assert found["error"] <= 1e-12
    assert found["passes"] == [4, 4]
    assert found["graphs"] == 1


@row(COMPILE, "handle.statistics of compiled code are those of eager code")
def test_compiled_code_counts_as_eager_code_does(compiled) -> None:
    assert compiled("options", "statistics")["same"]


@row(COMPILE, "Digits that float32 cannot keep are counted and warned about in compiled code too")
def test_compiled_code_says_where_digits_are_lost(compiled) -> None:
    found = compiled("options", "digits")
    assert found["lost"] == {"0": 1, "2": 1}
    assert any("digits were lost in layer" in message for message in found["said"])


@row(COMPILE, "Blocks compiled one by one: every layer keeps its own conditioner")
def test_blocks_can_be_compiled_by_themselves(compiled) -> None:
    found = compiled("options", "blocks")
    assert found["error"] <= 1e-12
    assert found["same"]


@row(
    COMPILE,
    'ζ with output_curvature="sampled" or "exact": equal to eager',
    "Each conditioned layer breaks the graph, because ḡ takes extra passes; with fullgraph=True the error says so.",
)
def test_zeta_with_extra_passes_runs_outside_of_graphs_and_says_why(compiled) -> None:
    found = compiled("options", "sampled")
    assert found["error"] <= 1e-12
    assert "compile without fullgraph, or use output_curvature='empirical'" in found["message"]


@row(
    COMPILE,
    "ζ of drawn rows, and in convolutions: equal to eager",
    "Each conditioned layer breaks the graph: it looks at its output's gradient. With fullgraph=True the error says so.",
)
def test_zeta_of_drawn_rows_runs_outside_of_graphs_and_says_why(compiled) -> None:
    found = compiled("options", "drawn")
    assert found["error"] <= 1e-12
    assert "looks at the gradient of the output" in found["message"]


@row(
    COMPILE,
    "nn.LSTM, nn.GRU and nn.RNN: equal to eager",
    "They break the graph, as torch's do by themselves; with torch's allow_rnn and fullgraph=True the error says why.",
)
def test_recurrent_layers_run_outside_of_graphs_and_say_why(compiled) -> None:
    found = compiled("models", "recurrent")
    assert found["error"] <= 1e-12
    assert "write the loop with nn.LSTMCell" in found["message"]


@row(
    COMPILE,
    "torch.func inside of compiled code: equal to eager",
    "It breaks the graph there; with fullgraph=True the error says so.",
)
def test_torch_func_runs_outside_of_graphs_and_says_why(compiled) -> None:
    found = compiled("options", "torch.func")
    assert found["error"] <= 1e-12
    # That of torch 2.9 says where the graph would end, and not why.
    why = "compile without fullgraph, so that torch.func runs outside"
    assert why in found["message"] or "Graph break under" in found["message"]


# Mixed precision

PRECISION = "Mixed precision"


@pytest.mark.parametrize("when", ["backward", "step"])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@row(PRECISION, "bf16 and fp16 autocast: outputs bit for bit, ζ* as close to float64 as the gradient is")
def test_autocast_conditions_as_accurately_as_it_differentiates(half: torch.dtype, when: str) -> None:
    x, y = batch()
    model, optimizer, _ = attached(when, lr=0.0)
    plain, exact = mlp(), mlp(torch.float64)
    handle = isaac.attach(exact, damping=0.1)
    F.cross_entropy(exact(x.double()), y).backward()
    with torch.autocast("cpu", half):
        output = model(x)
        assert torch.equal(output, plain(x))
        loss = F.cross_entropy(output.float(), y)
        F.cross_entropy(plain(x).float(), y).backward()
    loss.backward()
    optimizer.step()
    handle.detach()
    truth = mlp(torch.float64)
    F.cross_entropy(truth(x.double()), y).backward()
    for name, gradient in gradients(model).items():
        assert gradient.dtype == torch.float32
        ours = (gradient - gradients(exact)[name]).norm() / gradients(exact)[name].norm()
        theirs = (gradients(plain)[name] - gradients(truth)[name]).norm() / gradients(truth)[name].norm()
        assert ours <= 4 * theirs + 1e-3


@pytest.mark.parametrize("options", [{}, {"when": "step", "decay": 0.5}, {"output_damping": 1.0}], ids=["ζ*", "step", "ζ"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bf16", "float64"])
@row(PRECISION, "Models in pure bf16 and in float64 train")
def test_models_in_one_precision_train(dtype: torch.dtype, options: dict[str, Any]) -> None:
    model, optimizer, handle = attached(**{"dtype": dtype, "lr": 0.5, "damping": 1.0, **options})
    losses = []
    x, y = batch(dtype=torch.float64)
    for _ in range(60):
        optimizer.zero_grad()
        output = model(x.to(dtype))
        loss = F.cross_entropy(output, y)
        if "output_damping" in options:
            handle.backward(loss, output, F.cross_entropy)
        else:
            loss.backward()
        assert all(p.grad.dtype == dtype for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


METHODS = {
    "ζ*": {},
    "step": {"when": "step"},
    "step, average": {"when": "step", "decay": 0.9},
    "sampled": {"output_damping": 0.2, "output_curvature": "sampled"},
    "exact": {"output_damping": 0.2, "output_curvature": "exact"},
    "empirical": {"output_damping": 0.2, "output_curvature": "empirical"},
}
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": F.cross_entropy,
    "squared": nn.MSELoss(),
    "binary": nn.BCEWithLogitsLoss(),
}


def scaled_run(options: dict[str, Any], loss_name: str, *, set_to_none: bool, bad: bool, half: bool) -> tuple[Tensor, float]:
    """Five steps under a GradScaler; the first and third batch overflow, or are not there."""
    model, optimizer, handle = attached(**options)
    scaler, loss_fn = torch.amp.GradScaler("cpu", init_scale=1024.0), LOSSES[loss_name]
    for step in range(5):
        if step in (0, 2) and not bad:
            continue
        x, y = batch(step)
        target = y if loss_name == "cross-entropy" else F.one_hot(y, 3).float()
        torch.manual_seed(step)
        optimizer.zero_grad(set_to_none=set_to_none)
        with torch.autocast("cpu", torch.float16, enabled=half):
            output = model(x * math.inf if step == 2 else x)
        output = output.float()
        loss = loss_fn(output, target)
        loss = loss * math.inf if step == 0 else loss
        if "output_damping" in options:
            handle.backward(scaler.scale(loss), output, loss_fn)
        else:
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return flat(model), scaler.get_scale()


@pytest.mark.parametrize("half", [False, True], ids=["float32", "fp16"])
@pytest.mark.parametrize("set_to_none", [True, False], ids=["to none", "to zero"])
@pytest.mark.parametrize("name", METHODS)
@row(PRECISION, "GradScaler: a batch that overflows is skipped and leaves no trace, for ζ*, ζ and both `when`")
def test_an_overflow_skips_the_step_and_leaves_no_trace(name: str, set_to_none: bool, half: bool) -> None:
    losses = LOSSES if "output_damping" in METHODS[name] else {"cross-entropy"}
    for loss_name in losses:
        with_overflow, scale = scaled_run(METHODS[name], loss_name, set_to_none=set_to_none, bad=True, half=half)
        without, _ = scaled_run(METHODS[name], loss_name, set_to_none=set_to_none, bad=False, half=half)
        assert scale == 256.0  # halved by each overflow
        assert with_overflow.isfinite().all()
        assert_close(with_overflow, without, 1e-3 if half else 1e-5)


@pytest.mark.parametrize("loss_name", LOSSES)
@pytest.mark.parametrize("curvature", ["sampled", "exact", "empirical"])
@row(PRECISION, "A scaled loss gives ζ times the scale, whatever ḡ comes from", "A loss of one's own says its scale= itself.")
def test_a_scaled_loss_gives_scaled_zeta(curvature: str, loss_name: str) -> None:
    model, _, handle = attached(dtype=torch.float64, output_damping=0.2, output_curvature=curvature)
    x, y = batch(dtype=torch.float64)
    target = y if loss_name == "cross-entropy" else F.one_hot(y, 3).double()
    results = []
    for scale in (1.0, 1024.0, 0.25):
        torch.manual_seed(0)
        model.zero_grad()
        output = model(x)
        handle.backward(LOSSES[loss_name](output, target) * scale, output, LOSSES[loss_name])
        results.append({name: gradient / scale for name, gradient in gradients(model).items()})
    for result in results[1:]:
        for name in result:
            assert_close(result[name], results[0][name], 1e-12)


@row(PRECISION, 'ζ with "empirical" and a loss whose scale cannot be seen asks for it')
def test_a_scale_that_cannot_be_seen_has_to_be_said() -> None:
    class OwnLoss:
        reduction = "mean"

        def __call__(self, output: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(output, target)

        def terms(self, output: Tensor) -> int:
            return len(output)

        def sample(self, output: Tensor) -> Tensor:
            raise NotImplementedError

        def root(self, output: Tensor) -> Iterator[Tensor]:
            raise NotImplementedError

    model, _, handle = attached(dtype=torch.float64, output_damping=0.2, output_curvature="empirical")
    x, y = batch(dtype=torch.float64)
    output = model(x)
    handle.backward(F.cross_entropy(output, y), output, F.cross_entropy)
    expected = gradients(model)
    model.zero_grad()
    output = model(x)
    with pytest.raises(ValueError, match="pass scale="):
        handle.backward(8 * OwnLoss()(output, y), output, OwnLoss())
    with pytest.raises(ValueError, match="pass scale="):
        handle.backward(F.cross_entropy(output, y) + F.cross_entropy(2 * output, y), output, F.cross_entropy)
    handle.backward(8 * OwnLoss()(output, y), output, OwnLoss(), scale=8.0)
    for name, gradient in gradients(model).items():
        assert_close(gradient, 8 * expected[name], 1e-12)


# Memory, optimizers, parameters

TRAINING = "Training loops"


@pytest.mark.parametrize("when", ["backward", "step"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@row(
    TRAINING,
    "Activation checkpointing, both variants: nothing is counted twice",
    "Reentrant: each segment counts as a backward pass for a damping schedule; set handle.backward_passes, or use the other.",
)
def test_activation_checkpointing_changes_nothing(reentrant: bool, when: str) -> None:
    class Checkpointed(Encoder):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embedding(tokens).requires_grad_()
            return self.head(checkpoint(self.layer, x, use_reentrant=reentrant).mean(1))

    results = []
    for kind in (Encoder, Checkpointed):
        torch.manual_seed(0)
        model = kind().double()
        handle = isaac.attach(model, damping=0.1, when=when)
        for part in tokens(6).split(3):
            model(part).square().sum().backward()
        if when == "step":
            handle.step()
        results.append(gradients(model))
    for name, gradient in results[0].items():
        assert_close(results[1][name], gradient, 1e-12)


@row(TRAINING, "Activation checkpointing with ζ (non-reentrant)", "Reentrant: ḡ is lost with the segment it was in, an error.")
def test_zeta_works_with_activation_checkpointing() -> None:
    x, y = batch(dtype=torch.float64)
    results = []
    for checkpointed in (False, True):
        model, _, handle = attached(dtype=torch.float64, output_damping=0.2, output_curvature="exact")
        output = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
        handle.backward(F.cross_entropy(output, y), output, F.cross_entropy)
        results.append(gradients(model))
    for name, gradient in results[0].items():
        assert_close(results[1][name], gradient, 1e-12)


@row(TRAINING, 'Clipping: with when="backward" of the conditioned gradient; with "step" before (plain) or after (conditioned)')
def test_clipping_sees_the_gradient_it_is_meant_to_see() -> None:
    x, y = batch()
    plain = mlp()
    F.cross_entropy(plain(x), y).backward()
    plain_norm = nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    model, _, _ = attached()
    F.cross_entropy(model(x), y).backward()
    conditioned = gradients(model)
    conditioned_norm = nn.utils.get_total_norm(conditioned.values())
    assert_close(nn.utils.clip_grad_norm_(model.parameters(), 0.01), conditioned_norm, 1e-6)
    before, optimizer, _ = attached("step")
    F.cross_entropy(before(x), y).backward()
    assert_close(nn.utils.clip_grad_norm_(before.parameters(), 0.01), plain_norm, 1e-6)
    optimizer.step()
    after = mlp()
    handle = isaac.attach(after, damping=0.1, when="step")
    F.cross_entropy(after(x), y).backward()
    handle.step()
    assert_close(nn.utils.clip_grad_norm_(after.parameters(), 0.01), conditioned_norm, 1e-5)
    for name, gradient in gradients(before).items():
        # Conditioning is linear, so clipping before it scales the result.
        assert_close(gradient, conditioned[name] * 0.01 / plain_norm, 1e-4)
        assert_close(gradients(after)[name], gradients(model)[name], 1e-4)


@pytest.mark.parametrize("when", ["backward", "step"])
@row(TRAINING, "zero_grad with set_to_none True and False: the same training")
def test_zeroing_and_forgetting_gradients_are_the_same(when: str) -> None:
    results = []
    for set_to_none in (True, False):
        model, optimizer, _ = attached(when)
        for step in range(6):
            optimizer.zero_grad(set_to_none=set_to_none)
            for x, y in zip(*(part.chunk(2) for part in batch(step)), strict=True):
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
        results.append(flat(model))
    assert torch.equal(*results)


@pytest.mark.parametrize("when", ["backward", "step"])
@row(TRAINING, "Parameter groups: each has its own learning rate and decay, the gradients are the same")
def test_parameter_groups_follow(when: str) -> None:
    model = mlp(torch.float64)
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "lr": 0.01, "weight_decay": 0.1}]
    optimizer = torch.optim.SGD(groups)
    handle = isaac.attach(model, damping=0.1, when=when)
    if when == "step":
        handle.bind(optimizer)
    expected = mlp(torch.float64)
    isaac.attach(expected, damping=0.1)
    x, y = batch(dtype=torch.float64)
    for network in (model, expected):
        F.cross_entropy(network(x), y).backward()
    optimizer.step()
    for layer, lr, decay in ((0, 0.1, 0.0), (2, 0.01, 0.1)):
        for name in ("weight", "bias"):
            old = getattr(expected[layer], name)
            assert_close(getattr(model[layer], name), (old - lr * (old.grad + decay * old)).detach(), 1e-9)


@pytest.mark.parametrize("when", ["backward", "step"])
@pytest.mark.parametrize("bias", ["plain", "joint"])
@pytest.mark.parametrize("frozen", ["0.weight", "0.bias", "2.weight", "2.bias", "0", "2"])
@row(TRAINING, "Frozen parts: a weight under a live bias, a bias under a live weight, whole layers; the rest is unchanged")
def test_frozen_parts_leave_the_others_alone(frozen: str, bias: str, when: str) -> None:
    x, y = batch(dtype=torch.float64)
    results = []
    for freeze in (False, True):
        model = mlp(torch.float64)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not (freeze and name.startswith(frozen)))
        handle = isaac.attach(model, damping=0.1, bias=bias, when=when)
        F.cross_entropy(model(x), y).backward()
        if when == "step":
            handle.step()
        results.append(gradients(model))
    whole, part = results
    assert part.keys() == {name for name in whole if not name.startswith(frozen)}
    for name, gradient in part.items():
        if bias == "joint" and name.split(".")[0] == frozen.split(".")[0]:
            continue  # what is conditioned jointly with a frozen parameter is now conditioned alone
        assert_close(gradient, whole[name], 1e-12)


@pytest.mark.parametrize("when", ["backward", "step"])
@row(TRAINING, "Freezing and thawing in the middle of training")
def test_freezing_in_the_middle_of_training(when: str) -> None:
    model, optimizer, _ = attached(when)
    for step in range(9):
        for parameter in model[0].parameters():
            parameter.requires_grad_(step // 3 != 1)
        before = flat(model[0]), flat(model[2])
        optimizer.zero_grad()
        x, y = batch(step)
        F.cross_entropy(model(x), y).backward()
        fresh = mlp()
        fresh.load_state_dict(model.state_dict())
        isaac.attach(fresh, damping=0.1)
        F.cross_entropy(fresh(x), y).backward()
        optimizer.step()
        for name, gradient in gradients(model).items():
            assert_close(gradient, gradients(fresh)[name], 1e-4)
        assert torch.equal(before[0], flat(model[0])) == (step // 3 == 1)
        assert not torch.equal(before[1], flat(model[2]))


@pytest.mark.parametrize("when", ["backward", "step"])
@row(TRAINING, "EMA and SWA copies (torch.optim.swa_utils) follow the weights and leave training alone")
def test_averaged_models_follow_the_weights(when: str) -> None:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    results = []
    for averaging in (False, True):
        model, optimizer, _ = attached(when)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)) if averaging else None
        expected = flat(model)
        for step in range(4):
            optimizer.zero_grad()
            x, y = batch(step)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if average is not None:
                average.update_parameters(model)
                expected = flat(model) if step == 0 else 0.5 * expected + 0.5 * flat(model)
                average.eval()
                assert average(x).shape == (12, 3)
        if average is not None:
            assert_close(flat(average), expected, 1e-6)
        results.append(flat(model))
    assert torch.equal(*results)


@row(TRAINING, "Stray forward passes, in training mode and without a backward pass, change nothing and count for nothing")
def test_stray_forward_passes_change_nothing() -> None:
    results = []
    for stray in (False, True):
        model, optimizer, handle = attached(damping=lambda passes: 0.5**passes, max_rows=5)
        for step in range(4):
            x, y = batch(step)
            if stray:
                model(3 * x)
                with torch.no_grad():
                    model(x)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        results.append(flat(model))
        assert handle.backward_passes == 4
    assert torch.equal(*results)


@row(TRAINING, "Double backward: a gradient penalty differentiates the exact input gradient")
def test_a_gradient_penalty_differentiates_the_exact_input_gradient() -> None:
    results = []
    for damping in (None, math.inf, 0.1):
        model = nn.Sequential(nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 1)).double()
        model.load_state_dict({name: torch.linspace(-1, 1, p.numel()).view_as(p) for name, p in model.state_dict().items()})
        if damping is not None:
            isaac.attach(model, damping=damping)
        x = batch(dtype=torch.float64)[0].requires_grad_()
        (input_gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        input_gradient.square().sum().backward()
        results.append((input_gradient.detach(), gradients(model)))
    for input_gradient, parameters in results[1:]:
        assert_close(input_gradient, results[0][0], 1e-12)
        assert parameters.keys() == results[0][1].keys()
    for name, gradient in results[0][1].items():
        assert_close(results[1][1][name], gradient, 1e-12)
        assert results[2][1][name].isfinite().all()


@row(TRAINING, "Backward passes in several threads, of one model or of several")
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("shared", [True, False])
def test_threads_do_not_disturb_each_other(shared: bool, sharing: str, request: pytest.FixtureRequest) -> None:
    # Threads that take turns more often show sooner where one must not be interrupted.
    request.addfinalizer(functools.partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(5e-5)

    def work(model: nn.Module, step: int) -> None:
        x, y = batch(step, dtype=torch.float64)
        for _ in range(5):
            F.cross_entropy(model(x), y).backward()

    for _ in range(10):
        results = []
        for parallel in (True, False):
            models = [attached(dtype=torch.float64, sharing=sharing)[0] for _ in range(1 if shared else 4)]
            threads = [threading.Thread(target=work, args=(models[step % len(models)], step)) for step in range(4)]
            for thread in threads:
                thread.start()
                if not parallel:
                    thread.join()
            for thread in threads:
                thread.join()
            results.append([gradients(model) for model in models])
        for ours, theirs in zip(*results, strict=True):
            for name in ours:
                assert_close(ours[name], theirs[name], 1e-9)


# torch.func

FUNCTIONAL = "torch.func"
KINDS = {
    "linear": (lambda: mlp(torch.float64), lambda: batch(dtype=torch.float64)[0][:4]),
    "convolutions": (lambda: Convolutions().double(), lambda: images(4)),
    "encoder": (lambda: Encoder().double(), lambda: tokens(4)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"bias": "joint"}, {"sharing": "reduce"}], ids=["expand", "joint", "reduce"])
@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented the batching rule")
@row(FUNCTIONAL, "functional_call, grad and vmap: per-sample gradients, each conditioned by its own sample")
def test_gradients_by_torch_func_are_those_of_backward(kind: str, options: dict[str, Any]) -> None:
    make, data = KINDS[kind]
    model, x = make(), data()
    isaac.attach(model, damping=0.1, **options)
    expected = []
    for part in (x, *x.split(1)):
        model.zero_grad()
        model(part).square().mean().backward()
        expected.append(gradients(model))
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, weights, (x,)).square().mean()

    whole = grad(loss)(weights, x)
    each = vmap(grad(loss), (None, 0))(weights, x.unsqueeze(1))
    for name in weights:
        assert_close(whole[name], expected[0][name], 1e-9)
        assert_close(each[name], torch.stack([sample[name] for sample in expected[1:]]), 1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented the batching rule")
@row(FUNCTIONAL, "vmap over stacked models (stack_module_state): each model has its own conditioner")
def test_stacked_models_are_conditioned_each_for_itself(kind: str) -> None:
    make, data = KINDS[kind]
    models, x = [make() for _ in range(3)], data()
    for seed, model in enumerate(models):
        torch.manual_seed(seed)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.5)
        isaac.attach(model, damping=0.1)
        model(x).square().mean().backward()
    parameters, buffers = stack_module_state(models)

    def loss(weights: dict[str, Tensor], buffers: dict[str, Tensor]) -> Tensor:
        return functional_call(models[0], (weights, buffers), (x,)).square().mean()

    found = vmap(grad(loss))({name: p.detach() for name, p in parameters.items()}, buffers)
    for name, gradient in found.items():
        assert_close(gradient, torch.stack([model.get_parameter(name).grad for model in models]), 1e-9)


@row(FUNCTIONAL, 'when="step" has no `.grad` to condition there, and says so')
def test_torch_func_and_step_do_not_go_together() -> None:
    for model, x in ((mlp(torch.float64), batch(dtype=torch.float64)[0]), (Encoder().double(), tokens(3))):
        isaac.attach(model, damping=0.1, when="step")
        weights = {name: p.detach() for name, p in model.named_parameters()}
        with pytest.raises(RuntimeError, match=r"torch\.func has none: use when='backward'"):
            grad(lambda weights, x, model=model: functional_call(model, weights, (x,)).sum())(weights, x)


# Export, copies, checkpoints

EXPORT = "Export"


@pytest.mark.parametrize("kind", KINDS)
@row(EXPORT, "torch.export and torch.jit.trace of an attached model in eval: the plain model comes out")
def test_an_attached_model_exports_as_the_plain_one(kind: str) -> None:
    make, data = KINDS[kind]
    model, x = make().eval(), data()
    expected = model(x)
    plain = torch.export.export(copy.deepcopy(model), (x,))
    isaac.attach(model, damping=0.1)
    exported = torch.export.export(model, (x,))
    assert torch.equal(exported.module()(x), expected)
    assert [str(node.target) for node in exported.graph.nodes] == [str(node.target) for node in plain.graph.nodes]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        assert_close(torch.jit.trace(model, (x,))(x), expected.detach(), 1e-12)


@pytest.mark.skipif(importlib.util.find_spec("onnxscript") is None, reason="onnxscript is not installed")
@pytest.mark.skipif(importlib.util.find_spec("onnxruntime") is None, reason="onnxruntime is not installed")
@pytest.mark.parametrize("kind", KINDS)
@row(EXPORT, "ONNX export of an attached model in eval: ONNX Runtime computes what torch computes")
def test_an_attached_model_exports_to_onnx(kind: str, tmp_path: Path) -> None:
    import onnxruntime

    make, data = KINDS[kind]
    model, x = make().float().eval(), data()
    x = x.float() if x.is_floating_point() else x
    isaac.attach(model, damping=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter uses what torch deprecates
        torch.onnx.export(model, (x,), tmp_path / "model.onnx", dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (output,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert_close(torch.from_numpy(output), model(x).detach(), 1e-5)


SAVING = "Copies and checkpoints"


def saved_and_loaded(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded: nn.Module = torch.load(buffer, weights_only=False)
    return loaded


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), saved_and_loaded])
@row(SAVING, "deepcopy, pickle, torch.save of the whole model: a copy is attached too, and independent")
def test_copies_are_attached_and_independent(kind: str, way: Callable[[nn.Module], nn.Module]) -> None:
    make, data = KINDS[kind]
    model, x = make(), data()
    keys = list(model.state_dict())
    handle = isaac.attach(model, damping=0.1)
    twin = way(model)
    assert list(twin.state_dict()) == keys == list(model.state_dict())
    handle.damping = 100.0
    model(x).square().mean().backward()
    expected = copy.deepcopy(twin)
    isaac.detach(expected)
    isaac.attach(expected, damping=0.1)
    for network in (twin, expected):
        network(x).square().mean().backward()
    for name, gradient in gradients(expected).items():
        assert torch.equal(gradients(twin)[name], gradient)
    names = [name for name in gradients(model) if name.endswith("weight") and "norm" not in name]
    assert not any(torch.equal(gradients(twin)[name], gradients(model)[name]) for name in names)


@row(SAVING, 'A copy of a model attached with when="step" has no handle, and says so', "Detach it and attach it again.")
def test_a_copy_that_nobody_steps_is_noticed() -> None:
    model, optimizer, _ = attached("step")
    x, y = batch()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    twin = copy.deepcopy(model)
    twin.zero_grad()
    F.cross_entropy(twin(x), y).backward()
    twin.zero_grad()
    with pytest.warns(RuntimeWarning, match="attach it again"):
        F.cross_entropy(twin(x), y).backward()


@pytest.mark.parametrize(
    "options",
    [
        {"damping": lambda passes: 10.0 ** (-passes / 10)},
        {"damping": 0.1, "max_rows": 5},
        {"damping": isaac.Relative(0.3), "output_damping": 0.5},
    ],
    ids=["schedule", "max_rows", "ζ"],
)
@row(SAVING, 'The 20 steps after a resume are bit-identical, with when="backward": schedules, drawn rows, sampled labels')
def test_the_steps_after_a_resume_are_bit_identical(tmp_path: Path, options: dict[str, Any]) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer, isaac.Handle]:
        model = mlp()
        return model, torch.optim.AdamW(model.parameters(), 0.01), isaac.attach(model, **options)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, handle: isaac.Handle, steps: range) -> None:
        for step in steps:
            x, y = batch(step)
            optimizer.zero_grad()
            output = model(x)
            loss = F.cross_entropy(output, y)
            if "output_damping" in options:
                handle.backward(loss, output, F.cross_entropy)
            else:
                loss.backward()
            optimizer.step()

    torch.manual_seed(5)
    model, optimizer, handle = make()
    torch.manual_seed(5)
    train(model, optimizer, handle, range(15))
    state = {name: part.state_dict() for name, part in (("model", model), ("optimizer", optimizer), ("handle", handle))}
    torch.save({**state, "random": torch.get_rng_state()}, tmp_path / "15.pt")
    train(model, optimizer, handle, range(15, 35))
    resumed, other, new = make()
    torch.manual_seed(5)
    saved = torch.load(tmp_path / "15.pt")
    resumed.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    new.load_state_dict(saved["handle"])
    torch.set_rng_state(saved["random"])
    train(resumed, other, new, range(15, 35))
    assert torch.equal(flat(model), flat(resumed))
    assert new.backward_passes == handle.backward_passes


@row(SAVING, "state_dict has the keys it had, and moves between attached and plain models")
def test_state_dicts_move_between_attached_and_plain_models() -> None:
    for make, _ in KINDS.values():
        plain, model = make(), make()
        isaac.attach(model, damping=0.1)
        assert list(plain.state_dict()) == list(model.state_dict())
        model.load_state_dict(plain.state_dict())
        plain.load_state_dict(model.state_dict())


@row("The formula", "ζ* is gᵀ (I + a aᵀ/(bλ))⁻¹ a, here as everywhere in these tests")
def test_the_gradient_is_the_formula() -> None:
    layer = nn.Linear(9, 3, bias=False).double()
    isaac.attach(layer, damping=0.1)
    x, g = batch(dtype=torch.float64)[0], torch.randn(12, 3, dtype=torch.float64)
    layer(x).backward(g)
    assert_close(layer.weight.grad, zeta_star(g, x, 0.1))
