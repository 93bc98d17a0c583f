"""`suggest_damping` proposes a λ from one batch, explains it, and leaves the model as it was."""

import copy
import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import isaac_newton as isaac
from isaac_lab import executors
from isaac_lab.data.sets import load
from isaac_lab.record import Store
from isaac_lab.studies import dampings
from isaac_lab.studies.dampings import table
from isaac_lab.workload import seeded
from isaac_lab.workloads.mlp import relu_layers
from test_step import Mixed

ROOT = Path(__file__).parent.parent


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, 3))


def test_the_damping_takes_away_four_fifths_of_the_curvature() -> None:
    model, x = mlp(), torch.randn(20, 9)
    suggestion = isaac.suggest_damping(model, x)
    taken, taken_relative, curvature = 0.0, 0.0, 0.0
    for name, a in (("0", x), ("2", model[:2](x).detach())):
        values = torch.linalg.eigvalsh(a.double().T @ a.double() / 20).clamp_min(0)
        seen = suggestion.layers[name]
        assert (seen.rows, seen.features) == tuple(a.shape)
        assert seen.mean == pytest.approx(values.mean().item())
        assert seen.largest == pytest.approx(values.max().item())
        assert seen.effective_rank(0.3) == pytest.approx((values / (values + 0.3)).sum().item())
        curvature += values.sum().item()
        taken += (values**2 / (values + suggestion.damping)).sum().item()
        taken_relative += (values**2 / (values + suggestion.relative * values.mean())).sum().item()
    assert taken == pytest.approx(0.8 * curvature, rel=1e-4)
    assert taken_relative == pytest.approx(0.8 * curvature, rel=1e-4)


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_the_damping_follows_the_scale_of_the_inputs_and_the_ratio_does_not(scale: float) -> None:
    layer, x = nn.Linear(9, 4).double(), torch.randn(20, 9).double()
    plain, scaled = isaac.suggest_damping(layer, x), isaac.suggest_damping(layer, scale * x)
    assert scaled.damping == pytest.approx(scale**2 * plain.damping, rel=1e-4)
    assert scaled.relative == pytest.approx(plain.relative, rel=1e-4)


def test_on_the_digits_it_falls_where_training_is_best() -> None:
    """The best dampings of the grid in docs/damping.md are 0.1 to 0.3 for this network, 1 is worse but little."""
    assert (
        0.1
        < isaac.suggest_damping(
            seeded(lambda: relu_layers([64, 400, 400, 400, 400, 10]), 0), load("digits").train_images[:60]
        ).damping
        < 1
    )


class Stateful(nn.Module):
    """Batch norm, dropout, a buffer that is written to and one that is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(9, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.last = nn.Linear(8, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("seen", None)
        self.calls: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen = x.mean()
        output: Tensor = self.last(self.frozen(self.drop(self.norm(self.first(x)))))
        return output


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_the_model_is_what_it_was(training: bool, attached: bool) -> None:
    model = Stateful().train(training)
    model.norm.eval()
    if attached:
        handle = isaac.attach(model, 0.7)
    x = torch.randn(20, 9)
    modes = [module.training for module in model.modules()]
    state, variables = copy.deepcopy(model.state_dict()), [sorted(vars(module)) for module in model.modules()]
    random = torch.get_rng_state()
    with torch.no_grad():
        isaac.suggest_damping(model, x)
    assert [module.training for module in model.modules()] == modes
    assert [sorted(vars(module)) for module in model.modules()] == variables
    assert torch.equal(torch.get_rng_state(), random)
    assert model.seen is None
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    assert all(parameter.grad is None for parameter in model.parameters())
    if attached:
        assert (handle.damping, handle.backward_passes) == (0.7, 0)
        assert handle.statistics["first"].rows == 0
        handle.detach()
    isaac.attach(model)


def test_a_forward_pass_that_raises_leaves_the_model_as_it_was_too() -> None:
    model = Stateful().eval()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        isaac.suggest_damping(model, torch.randn(4, 5))
    assert not model.training
    assert model.calls == 0
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize("when", ["backward", "step"])
@pytest.mark.parametrize("options", [{}, {"sharing": "reduce"}, {"max_rows": 5}, {"bias": "joint"}], ids=str)
def test_every_layer_type_is_seen_as_it_is_attached(options: dict[str, object], when: str) -> None:
    model, tokens = Mixed(), torch.randint(11, (8, 6))
    handle = isaac.attach(model, 0.3, when=when, **options)  # type: ignore[arg-type]
    suggestion = isaac.suggest_damping(model, tokens)
    with handle.inspecting():
        model(tokens).sum().backward()
        if when == "step":
            handle.step()
    assert list(suggestion.layers) == list(handle.statistics)
    for name, seen in suggestion.layers.items():
        if "max_rows" in options or (name, when) == ("twice", "step"):
            continue  # rows are drawn anew in each backward pass; those of both uses count together at the step
        assert handle.statistics[name].effective_rank == pytest.approx(seen.effective_rank(0.3), rel=1e-4), name
        assert handle.statistics[name].largest_curvature == pytest.approx(seen.largest, rel=1e-4), name


def test_only_the_attached_layers_are_looked_at_and_drop_ins_too() -> None:
    model = mlp()
    isaac.attach(model, layers="2")
    assert list(isaac.suggest_damping(model, torch.randn(5, 9)).layers) == ["2"]
    drop_in = nn.Sequential(isaac.Linear(9, 7), nn.LayerNorm(7))
    assert list(isaac.suggest_damping(drop_in, torch.randn(5, 9)).layers) == ["0"]


def test_a_mapping_is_passed_by_name() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, *, a: Tensor, b: Tensor) -> dict[str, Tensor]:
            return {"out": self.layer(a) + self.layer(b)}

    batch = {"a": torch.randn(3, 4), "b": torch.randn(5, 4).mean(0, keepdim=True)}
    assert isaac.suggest_damping(Named(), batch).layers["layer"].matrices == 2


def test_the_table_explains_the_number() -> None:
    suggestion = isaac.suggest_damping(mlp(), torch.randn(20, 9))
    text = str(suggestion)
    for words in ("effective rank", "damped", "80%", "isaac.Relative(", "learning rate", f"{suggestion.damping:.2g}"):
        assert words in text
    assert "Suggestion(damping=" in repr(suggestion)
    assert all(len(line) <= 120 for line in text.splitlines())


def test_what_it_says_can_be_used() -> None:
    model, x = mlp(), torch.randn(20, 9)
    suggestion = isaac.suggest_damping(model, x)
    handle = isaac.attach(model, suggestion.damping)
    for damping in (suggestion.damping, isaac.Relative(suggestion.relative)):
        handle.damping = damping
        model.zero_grad()
        model(x).sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("model", "batch", "error", "words"),
    [
        ("net", (torch.ones(2, 3),), TypeError, "model must be an nn.Module, got str"),
        (mlp(), (), ValueError, "needs a batch"),
        (mlp(), (torch.full((4, 9), math.nan),), ValueError, "layer '0' are not finite"),
        (mlp(), (torch.ones(0, 9),), ValueError, "saw no rows"),
        (nn.Linear(3, 2, bias=False), (torch.zeros(4, 3),), ValueError, "'' are all zero"),
        (nn.Sequential(nn.LazyLinear(3)), (torch.ones(4, 3),), ValueError, "'0.weight' has no size yet"),
        (mlp().requires_grad_(False), (torch.ones(4, 9),), ValueError, "went past every layer"),
        (nn.LayerNorm(3), (torch.ones(4, 3),), ValueError, "no layer can be conditioned"),
    ],
)
def test_misuse_says_what_would_be_right(
    model: nn.Module, batch: tuple[Tensor, ...], error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as raised:
        isaac.suggest_damping(model, *batch)
    assert words in str(raised.value)


def test_a_compiled_model_can_be_asked() -> None:
    model = mlp()
    isaac.attach(model, 0.5)
    compiled = torch.compile(model, backend="eager")
    assert len(isaac.suggest_damping(compiled, torch.randn(5, 9)).layers) == 2


@pytest.mark.parametrize("name", dampings.PROBLEMS)
def test_the_page_shows_the_records(name: str) -> None:
    record = json.loads((ROOT / "results" / "damping" / f"{name}.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "damping.md").read_text(encoding="utf-8")
    for line in table(record):
        assert line in page
    assert record["command"].startswith("python -m isaac_lab.bench.dampings")
    for result in record["results"]:
        best = {key: min(loss for loss in rates.values() if loss is not None) for key, rates in result["losses"].items()}
        assert best["suggested λ"] < best["inf"]
        assert best["suggested ρ"] < best["inf"]


def test_the_grid_is_trained_once_and_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dampings, "DAMPINGS", (0.1,))
    monkeypatch.setattr(dampings, "RATES", {"SGD": (0.1,), "Adam": (0.001,)})
    dampings.main(seeds=1, epochs=1, out=tmp_path)
    records = Store(tmp_path / "digits").records()
    assert len(records) == 3 * 2 * (len(dampings.DAMPINGS) + 3)
    assert all(record.finished for record in records)
    said = capsys.readouterr().out
    monkeypatch.setattr(executors, "train", lambda *given, **options: pytest.fail("it is trained already"))
    dampings.main(seeds=1, epochs=1, out=tmp_path)
    assert capsys.readouterr().out.splitlines()[-7:] == said.splitlines()[-7:]
    assert "| 0.1 |" in said


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_its_random_numbers_go_on_as_if_nothing_had_happened() -> None:
    model, x = Stateful().cuda(), torch.randn(20, 9).cuda()
    state = torch.cuda.get_rng_state()
    suggestion = isaac.suggest_damping(model, x)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert 0 < suggestion.damping < math.inf
