"""The benchmarks: that they time what they say, compute what they say, and report what they measured."""

import copy
import importlib.metadata
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner, Result

import isaac_newton as isaac
from isaac_lab.bench import counting, memory, runs, steps, timing
from isaac_lab.bench.problems import BATCH, TABLE2, Problem, bert_shaped, chain
from isaac_lab.bench.published import PAPER, paper_ratio
from isaac_lab.bench.steps import MODEL_METHODS, zeta_star_as_printed
from isaac_lab.cli import app
from isaac_lab.products import threads
from isaac_lab.report import benchmarks
from isaac_lab.workloads.resnet import ResNet18


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments])


class Clock:
    """A clock that only the steps move."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def __call__(self) -> float:
        return self.now

    def step(self, name: str, *durations: float) -> Any:
        """A step that takes these durations in turn, the last one from then on."""
        remaining = list(durations)

        def run() -> None:
            self.log.append(name)
            self.now += remaining.pop(0) if len(remaining) > 1 else remaining[0]

        return run


def tiny(*, classes: bool = True) -> Problem:
    return chain((7, 9, 5, 4 if classes else 7), 6, name="tiny", title="tiny", classified=classes)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_methods_take_turns_and_each_round_starts_with_the_next() -> None:
    clock = Clock()
    names = ["a", "b", "c"]
    timing.measure({name: clock.step(name, 1.0) for name in names}, rounds=4, clock=clock)
    assert "".join(clock.log) == "aaa" + "bbb" + "ccc" + "abc" + "bca" + "cab" + "abc"


def test_a_turn_lasts_about_as_long_as_asked() -> None:
    clock = Clock()
    measured = timing.measure({"slow": clock.step("s", 1.0), "fast": clock.step("f", 0.1)}, rounds=1, turn=0.5, clock=clock)
    assert measured.steps_per_turn == {"slow": 1, "fast": 5}
    assert clock.log[6:] == ["s"] + ["f"] * 5


def test_medians_and_ratios_within_a_round_are_those_of_the_clock() -> None:
    clock = Clock()
    warm_up = [1.0] * timing.WARM_UP
    measured = timing.measure(
        {"gradient": clock.step("g", *warm_up, 1.0, 2.0, 4.0), "other": clock.step("o", *warm_up, 2.0, 2.0, 12.0)},
        rounds=3,
        clock=clock,
    )
    assert measured.seconds == {"gradient": [1.0, 2.0, 4.0], "other": [2.0, 2.0, 12.0]}
    assert timing.spread(measured.seconds["other"]).median == 2.0
    ratios = timing.ratios(measured.seconds, "gradient")
    assert ratios == {"gradient": [1.0, 1.0, 1.0], "other": [2.0, 1.0, 3.0]}
    assert timing.spread(ratios["other"]) == timing.Spread(2.0, 1.5, 2.5)
    assert timing.spread([3.0]) == timing.Spread(3.0, 3.0, 3.0)


def test_a_method_that_is_too_slow_is_left_out_after_one_step_but_never_the_first() -> None:
    clock = Clock()
    slow = {"gradient": clock.step("g", 9.0), "other": clock.step("o", 9.0)}
    measured = timing.measure(slow, rounds=2, limit=5.0, clock=clock)
    assert measured.too_slow == {"other": 9.0}
    assert clock.log.count("o") == 1
    assert list(measured.seconds) == ["gradient"]


def test_the_clock_is_read_when_the_device_is_done() -> None:
    clock = Clock()

    def wait() -> None:
        clock.log.append("wait")

    timing.measure({"a": clock.step("a", 1.0)}, rounds=1, clock=clock, wait=wait)
    assert clock.log == ["wait", "a", "wait"] * (timing.WARM_UP + 1)


@pytest.mark.parametrize("rows", [4, 30])
def test_the_printed_formula_is_zeta_star(rows: int) -> None:
    g, a = torch.randn(rows, 5, dtype=torch.float64), torch.randn(rows, 8, dtype=torch.float64)
    torch.testing.assert_close(zeta_star_as_printed(g, a, 0.3), isaac.equations.zeta_star(g, a, 0.3))


def test_the_printed_formula_trains_as_the_library_does() -> None:
    problem = tiny(classes=True)
    losses = []
    for name in ("paper", "zeta_star"):
        model, x, y = problem.make("cpu")
        step = steps.METHODS[name](model, problem.loss_fn, 0.1)
        losses.append([step(x, y).item() for _ in range(20)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("method", ["paper", "zeta_star"])
@pytest.mark.parametrize("classes", [True, False])
def test_a_step_leaves_the_conditioned_gradient(method: str, classes: bool) -> None:
    problem = tiny(classes=classes)
    model, x, y = problem.make("cpu")
    layer = model.get_submodule("fc1")
    assert isinstance(layer, nn.Linear)
    seen: list[Tensor] = []
    reference = copy.deepcopy(model)

    def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        output.register_hook(seen.append)

    reference.get_submodule("fc1").register_forward_hook(hook)
    problem.loss_fn(reference(x), y).backward()
    steps.METHODS[method](model, problem.loss_fn, 0.2)(x, y)
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad, isaac.equations.zeta_star(seen[0], x, 0.2), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", steps.METHODS)
def test_every_step_trains(method: str) -> None:
    model, x, y = tiny().make("cpu")
    before = [p.detach().clone() for p in model.parameters()]
    loss = steps.METHODS[method](model, tiny().loss_fn, 1.0)(x, y)
    assert loss.isfinite()
    assert all(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_a_large_damping_turns_the_kfac_step_into_the_gradient_and_a_small_one_does_not() -> None:
    problem = tiny()
    model, x, y = problem.make("cpu")
    plain = copy.deepcopy(model)
    problem.loss_fn(plain(x), y).backward()
    steps.METHODS["kfac"](model, problem.loss_fn, 1e6)(x, y)
    torch.testing.assert_close(gradients(model)[0], gradients(plain)[0], rtol=1e-4, atol=1e-6)
    steps.METHODS["kfac"](model, problem.loss_fn, 0.01)(x, y)
    assert not torch.allclose(gradients(model)[0], gradients(plain)[0], rtol=1e-2)


def test_the_multiply_adds_of_table_2_are_the_published_ones() -> None:
    ratios = [counting.ratio(problem.sizes, BATCH) for problem in TABLE2.values()]
    assert ratios == pytest.approx([1.42, 1.12, 1.03, 1.007, 1.06], abs=0.005)
    assert ratios[3] == pytest.approx(1.007, abs=0.0005)


def test_peak_memory_is_that_of_the_marked_step() -> None:
    def event(ts: float, size: int) -> dict[str, Any]:
        return {"name": "[memory]", "ts": ts, "args": {"Bytes": size}}

    mark = {"name": memory.MARK, "ph": "X", "ts": 10.0, "dur": 10.0}
    before, inside, after = (
        [event(1, 100), event(2, 500), event(3, -500)],
        [event(12, 30), event(11, 7), event(13, -30)],
        event(21, 999),
    )
    assert memory.peak_of_trace([mark, after, *before, *inside]) == 137


def test_a_pass_in_which_the_library_takes_its_time_needs_no_more_memory() -> None:
    """The fourth pass is one: its plain product was formed beside the conditioned one, and is estimated now."""
    plain, ours = (
        memory.profiled_peak(TABLE2["400"], steps.METHODS[name], damping=1.0)["peak_bytes"]
        for name in ("gradient", "zeta_star")
    )
    assert ours <= 1.025 * plain


def test_peak_memory_covers_parameters_gradients_and_batch() -> None:
    problem = chain((512, 512), 4, name="one layer", title="one layer", classified=False)
    peak = memory.profiled_peak(problem, steps.METHODS["gradient"], damping=1.0)["peak_bytes"]
    least = 4 * (2 * (512 * 512 + 512) + 2 * 4 * 512)
    assert least <= peak <= 1.05 * least


def test_the_other_shapes_train_and_condition_what_they_say() -> None:
    encoder = bert_shaped(layers=1, width=8, heads=2, vocabulary=11)
    tokens, labels = torch.randint(11, (3, 5)), torch.randint(2, (3,))
    for method in steps.SHAPE_METHODS["encoder"].values():
        assert method(copy.deepcopy(encoder), nn.CrossEntropyLoss(), 1.0)(tokens, labels).isfinite()
    network = ResNet18(width=4)
    images, labels = torch.rand(2, 3, 32, 32), torch.randint(10, (2,))
    for method in steps.SHAPE_METHODS["resnet18"].values():
        assert method(copy.deepcopy(network), nn.CrossEntropyLoss(), 1.0)(images, labels).isfinite()
    assert sum(p.numel() for p in ResNet18().parameters()) == 11_173_962


def test_the_papers_ratios_are_those_of_its_table() -> None:
    assert [round(paper_ratio(model, "zeta_star", "cpu") or 0, 2) for model in TABLE2] == [1.63, 0.57, 1.55, 1.0, 1.11]
    assert [round(paper_ratio(model, "zeta_star", "cuda") or 0, 2) for model in TABLE2] == [2.27, 2.28, 2.33, 1.25, 2.24]
    assert paper_ratio("6400", "kfac", "cpu") is None
    assert set(PAPER["kfac"]) == set(TABLE2)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a short run of Table 2 left its files."""
    directory = tmp_path_factory.mktemp("bench")
    result = invoke("table2", "--models", "100", "--rounds", "2", "--methods", "gradient,zeta_star", "--out", str(directory))
    assert result.exit_code == 0, result.output
    (directory / "printed.txt").write_text(result.output, encoding="utf-8")
    return directory


def test_table2_prints_a_table_and_writes_a_record(out: Path) -> None:
    printed = (out / "printed.txt").read_text(encoding="utf-8")
    assert "5 layers × 100" in printed
    assert re.search(r"ζ\* +[\d.]+ +[\d.]+ \([\d.–]+\) +1.63 +[\d.]+ +[+-][\d.]+ %", printed)
    (path,) = out.glob("*.json")
    assert path.name == "table2-cpu-1thread-100-gradient-zeta_star.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["command"].startswith(
        "isaac-newton bench table2 --device cpu --threads 1 --rounds 2 --damping 1 --models 100"
    )
    assert record["versions"]["torch"] == importlib.metadata.version("torch")
    assert record["machine"]["cores"] >= 1
    plain, ours = record["cases"][0]["methods"]
    assert (plain["name"], ours["name"]) == ("gradient", "zeta_star")
    assert len(ours["seconds"]) == 2
    assert ours["ratio"] == vars(timing.spread([a / b for a, b in zip(ours["seconds"], plain["seconds"], strict=True)]))
    assert ours["peak_bytes"] > 4 * 2 * sum(p.numel() for p in TABLE2["100"].build().parameters())


def test_threads_are_as_before_afterwards(out: Path) -> None:
    assert torch.get_num_threads() == 1
    with threads(2):
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "100,7"], r"unknown model '7'; known: 100, 400, 1600, 6400, autoencoder"),
        (["--methods", "sgd"], r"unknown method 'sgd'; known: gradient, paper, zeta_star, zeta, kfac"),
        (["--damping", "0"], r"'--damping': must be > 0 and finite, got 0.0"),
        (["--rounds", "0"], r"'--rounds': must be at least 1, got 0"),
        (["--threads", "-1"], r"'--threads': must be at least 1, got -1"),
        (["--device", "tpu"], r"'tpu' is not one of"),
    ],
)
def test_bad_options_are_refused_by_name_and_value(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = invoke("table2", *arguments, "--out", str(tmp_path))
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_missing_gpu_is_named() -> None:
    result = invoke("table2", "--device", "cuda")
    assert result.exit_code == 2
    assert "no CUDA device" in result.output


def test_scaling_leaves_out_what_its_budget_does_not_allow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "BATCHES", (1, 2, 4096))
    monkeypatch.setattr(runs, "WIDTHS", (16, 8192))
    result = invoke("scaling", "--rounds", "2", "--budget", "1", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "scaling-cpu-1thread.json").read_text(encoding="utf-8"))
    assert [case["title"] for case in record["cases"]] == ["batch 1, width 512", "batch 2, width 512", "batch 60, width 16"]
    assert record["left_out"] == ["batch 4096, width 512", "batch 60, width 8192"]
    assert "batch 60, width 8192" in result.output
    assert (tmp_path / "scaling-cpu-1thread.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "scaling-cpu-1thread.svg").read_text(encoding="utf-8")


def fake_record(time: str, *, ratio: float, peak: int, mode: str = "cpu-1thread", gpu: str = "") -> dict[str, Any]:
    spread = {"median": ratio, "low": ratio, "high": ratio}
    plain = {"name": "gradient", "seconds_per_step": spread, "ratio": spread, "peak_bytes": 1_000_000}
    return {
        "kind": "table2",
        "mode": mode,
        "time": time,
        "commit": None,
        "command": f"isaac-newton bench table2 --of {time}",
        "settings": {"damping": 1.0, "rounds": 2},
        "versions": {"torch": "9.9", "backpack-for-pytorch": None},
        "machine": {"cpu": "Abacus", "architecture": "x", "cores": 2, "threads": 1} | ({"gpu": gpu} if gpu else {}),
        "cases": [
            {
                "name": "100",
                "title": "5 layers × 100",
                "batch": 60,
                "methods": [
                    plain,
                    plain | {"name": "zeta_star", "peak_bytes": peak},
                    {"name": "kfac", "skipped": "left out"},
                ],
            }
        ],
    }


def write_page(directory: Path, records: dict[str, dict[str, Any]]) -> list[str]:
    for name, record in records.items():
        (directory / f"{name}.json").write_text(json.dumps(record), encoding="utf-8")
    result = invoke("page", "--records", str(directory), "--out", str(directory / "docs" / "page.md"))
    assert result.exit_code == 0, result.output
    return (directory / "docs" / "page.md").read_text(encoding="utf-8").splitlines()


def test_the_page_takes_the_newest_record_and_says_which_bars_it_misses(tmp_path: Path) -> None:
    records = {
        "a-new": fake_record("2026-02-01", ratio=1.5, peak=1_010_000),
        "z-old": fake_record("2026-01-01", ratio=1.2, peak=1_090_000),
        "newest": fake_record("2026-03-01", ratio=1.1, peak=1_000_000) | {"settings": {"damping": 0.1, "rounds": 2}},
        "other-gpu": fake_record("2026-02-01", ratio=1.0, peak=1_000_000, mode="cuda-captured", gpu="A6000"),
    }
    lines = write_page(tmp_path, records)
    assert "| ζ*, CPU, 1 thread | 100 | ≤ 1.45 | 1.500 | **missed by 0.050** | `a-new.json` |" in lines
    assert "| Peak memory of ζ*, CPU | 100 | ≤ 2 % | 1.000 % | reached | `a-new.json` |" in lines
    assert "| ζ* in one CUDA graph, H200 | 100 | ≤ 1 | – | not measured |  |" in lines
    assert any("K-FAC, BackPACK" in line and "left out" in line for line in lines)
    for name, record in records.items():
        assert any(f"`{name}.json`" in line and record["command"] in line for line in lines)


def test_the_page_draws_the_scaling_curves_the_same_every_time(tmp_path: Path) -> None:
    record = fake_record("2026-01-01", ratio=1.5, peak=1) | {"kind": "scaling", "left_out": ["batch 9, width 9"]}
    record["cases"][0] |= {"curve": "batch", "width": 512, "theory": 1.25}
    lines = write_page(tmp_path, {"scaling": record})
    picture = tmp_path / "docs" / "figures" / "bench-scaling.svg"
    first = picture.read_bytes()
    assert any("(figures/bench-scaling.svg)" in line for line in lines)
    assert any("batch 9, width 9" in line for line in lines)
    write_page(tmp_path, {})
    assert picture.read_bytes() == first


def test_a_directory_without_records_is_refused(tmp_path: Path) -> None:
    result = invoke("page", "--records", str(tmp_path), "--out", str(tmp_path / "page.md"))
    assert result.exit_code == 2
    assert "no records" in result.output


def test_every_method_has_a_name_for_people() -> None:
    names = [*steps.METHODS, *(name for methods in steps.SHAPE_METHODS.values() for name in methods)]
    assert set(names) == set(benchmarks.NAMES)


def test_models_as_people_train_them_have_stand_ins_on_a_cpu() -> None:
    """Every model, every option; records and tables as for the other benchmarks."""
    plan = runs.Plan(rounds=1)
    (record,) = runs.measure("models", plan)
    assert runs.file_stem(record) == "models-cpu-1thread"
    assert [case["name"] for case in record["cases"]] == ["bert", "gpt2", "vit", "resnet50", "mlp-32", "field"]
    for case in record["cases"]:
        assert [method["name"] for method in case["methods"]] == list(MODEL_METHODS)
        assert all(method["ratio"]["median"] > 0 for method in case["methods"]), case
    assert "small GPT-2" in benchmarks.markdown("models.json", record)


def test_some_of_the_models_with_some_of_their_options_have_a_record_of_their_own() -> None:
    (record,) = runs.measure("models", runs.Plan(rounds=1, models=("mlp-32",), methods=("auto",)))
    assert runs.file_stem(record) == "models-cpu-1thread-mlp-32-gradient-auto"
    assert record["command"].endswith(" --models mlp-32 --methods gradient,auto")
    assert [[method["name"] for method in case["methods"]] for case in record["cases"]] == [["gradient", "auto"]]
