"""The cost model of `isaac_lab.scaling` held against counts and measurements on GPTs that fit here.

`python tests/scaling/scaling_checks.py` writes results/scaling/checks.json. What cannot be counted on a CPU, the speed of a
GPU, is compared with records of `isaac-newton bench`.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from small_gpt import Trainer
from tallies import (
    collectives,
    counted_flops,
    counted_traffic,
    peak_of_layer,
    peak_of_step,
    saved_bytes,
    sent,
    state_bytes,
)

from isaac_lab.bench import timing
from isaac_lab.records import origin, write
from isaac_lab.scaling.compute import operations, plain_flops
from isaac_lab.scaling.overhead import AUTOMATIC, overhead
from isaac_lab.scaling.sizes import H100, Layer, Machine, Setting, Shape, Workload
from isaac_lab.scaling.storage import (
    gathered_bytes,
    lasting_bytes,
    plain_bytes_moved,
    summed_bytes,
    temporary_at_step,
    temporary_in_backward,
)

__all__ = ["CPU", "check_models", "checks", "communication_cases", "predicted_flops", "record"]

Check = dict[str, Any]

#: Rates do not matter where operations and bytes are counted. LAPACK forms inverses, covariances are summed in float64.
CPU = Machine(
    "CPU",
    memory=1e12,
    half=1e10,
    single=1e10,
    tensor_single=1e10,
    double=1e10,
    bandwidth=1e10,
    nvlink=1e10,
    network=1e10,
    activation=4,
    covariance=8,
    inverse=2 / 3,
    exact_inverses=False,
    column=0.0,
    swept=0,
)
RANKS = (2, 4)
#: What records of `isaac-newton bench` were measured on: an H100 with more and faster memory.
H200 = replace(H100, name="H200 SXM, 141 GB", memory=141e9, bandwidth=4.8e12)


def predicted_flops(shape: Shape, work: Workload, setting: Setting, machine: Machine = CPU) -> float:
    """What the model says that ζ* adds."""
    return sum(op.flops for op in operations(shape, work, setting, machine) if not op.replaces)


NARROW = Shape("2 × 64", 2, 64, 256, 96)
MIDDLE = Shape("3 × 128, gated", 3, 128, 320, 160, gated=True, narrow=32)
WIDE = Shape("2 × 192", 2, 192, 768, 256)
STEP = Setting(when="step", refresh=3, max_rows=50)
AVERAGED = Setting(when="step", decay=0.9, refresh=2)
HALF = Setting(when="step", decay=0.9, refresh=2, power=0.5)
SETTINGS = {
    "every row": Setting(),
    "reduce": Setting(sharing="reduce"),
    "max_rows": Setting(max_rows=24),
    "step": STEP,
    "step, average": AVERAGED,
    "step, power ½": HALF,
}


def checks(tick: Callable[[str], object] = lambda what: None, *, rounds: int = 15) -> Iterator[Check]:
    """Everything that is predicted, beside what was counted or measured."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for kind in (_check_flops, _check_traffic, _check_memory, _check_layer, _check_communication):
            tick(kind.__name__.removeprefix("_check_"))
            yield from kind()
        tick("time")
        yield from _check_time(rounds)
    finally:
        torch.set_num_threads(threads)


def _check(kind: str, what: str, how: str, predicted: float, measured: float, unit: str) -> Check:
    return {"kind": kind, "what": what, "how": how, "predicted": predicted, "measured": measured, "unit": unit}


def _work(shape: Shape, samples: int = 4, length: int = 32) -> Workload:
    return Workload(gpus=1, tokens=samples * length, length=length, causal=False)


def _check_flops() -> Iterator[Check]:
    how = "torch's counter, one process"
    for shape in (NARROW, MIDDLE, WIDE):
        work = _work(shape)
        plain = counted_flops(shape, work, None)
        yield _check("flops", f"{shape.name}: plain step", how, plain_flops(shape, work), plain, "FLOP")
        for name, setting in SETTINGS.items():
            counted = counted_flops(shape, work, setting) - plain
            yield _check("flops", f"{shape.name}: {name}", how, predicted_flops(shape, work, setting), counted, "FLOP")


def _check_traffic() -> Iterator[Check]:
    # FSDP2 keeps its shards of the gradients in float32, so what happens at the step is counted in a float32 model.
    precisions = {"reduce": torch.bfloat16, "max_rows": torch.bfloat16, "step": torch.float32, "step, average": torch.float32}
    for shape in (MIDDLE, WIDE):
        work = _work(shape, samples=8, length=64)
        for name, dtype in precisions.items():
            counted = counted_traffic(shape, work, SETTINGS[name], dtype) - counted_traffic(shape, work, None, dtype)
            machine = replace(CPU, activation=dtype.itemsize)
            predicted = sum(op.traffic for op in operations(shape, work, SETTINGS[name], machine))
            how = f"bytes of every operator, {str(dtype).removeprefix('torch.')} model, one process"
            yield _check("traffic", f"{shape.name}: {name}", how, predicted, counted, "B")


def _check_memory() -> Iterator[Check]:
    for shape in (MIDDLE, WIDE):
        work = _work(shape)
        for name in ("step", "step, average"):
            setting = SETTINGS[name]
            measured = state_bytes(shape, work, setting)
            what = f"{shape.name}: {name}, kept from step to step"
            yield _check("memory", what, "handle.state_dict()", lasting_bytes(shape, setting, CPU), measured, "B")
        setting = SETTINGS["step"]
        gathered = peak_of_step(shape, work, setting, "between") - peak_of_step(shape, work, None, "between")
        predicted = gathered_bytes(shape, setting, CPU) + lasting_bytes(shape, setting, CPU)
        what = f"{shape.name}: step, between the backward pass and the step"
        yield _check("memory", what, "profiler", predicted, gathered, "B")
        peak = peak_of_step(shape, work, setting, "step") - peak_of_step(shape, work, setting, "between")
        what = f"{shape.name}: step, temporary at the step"
        yield _check("memory", what, "profiler", temporary_at_step(shape, setting, CPU), peak, "B")
        for name in ("every row", "max_rows", "step"):
            saved = saved_bytes(shape, work, SETTINGS[name]) - saved_bytes(shape, work, None)
            yield _check("memory", f"{shape.name}: {name}, activations kept", "saved tensors", 0, saved, "B")


def _check_layer() -> Iterator[Check]:
    """What one layer in bf16 needs for a moment."""
    machine = replace(CPU, activation=2)
    for rows, inputs, outputs in ((512, 192, 320), (512, 320, 192), (128, 512, 256)):
        layer, work = Layer("layer", inputs, outputs, ""), Workload(gpus=1, tokens=rows, length=rows // 8)
        for name in ("every row", "max_rows", "step"):
            setting = SETTINGS[name]
            peak = peak_of_layer(layer, work, setting) - peak_of_layer(layer, work, None)
            predicted = temporary_in_backward(layer, work, setting, machine)
            if setting.when == "step":
                # Either the rows in float32 or, when these are gone, what is made of those that were drawn.
                assert setting.max_rows is not None
                predicted = max(predicted, 8 * inputs**2 + 12 * setting.max_rows * inputs)
            what = f"Linear({inputs}, {outputs}) in bf16, {rows} rows: {name}, temporary in the backward pass"
            yield _check("memory", what, "profiler", predicted, peak, "B")


def communication_cases(ranks: int, shape: Shape = MIDDLE) -> dict[str, tuple[Shape, Workload, Setting | None]]:
    """What is counted in processes."""
    work = replace(_work(shape), gpus=ranks)
    everyone = Setting(max_rows=24, all_ranks=True)
    chosen = {"plain": None, "max_rows": SETTINGS["max_rows"], "max_rows, process_group": everyone}
    chosen |= {"step": STEP, "step, average": AVERAGED}
    return {name: (shape, work, setting) for name, setting in chosen.items()}


def _check_communication() -> Iterator[Check]:
    for ranks in RANKS:
        cases = communication_cases(ranks)
        found = collectives(ranks, cases)
        how = f"collectives of FSDP2 over gloo, {ranks} processes"
        shape, work, _ = cases["plain"]
        plain = sent(found["plain"], ranks)
        yield _check("communication", f"{shape.name}: plain step", how, plain_bytes_moved(shape, work, CPU), plain, "B")
        for name, (_, _, setting) in cases.items():
            if setting is None:
                continue
            reduced, gathered, calls = summed_bytes(shape, work, setting, CPU)
            predicted = (2 * reduced + gathered) * (ranks - 1) / ranks
            extra = sent(found[name], ranks) - plain
            yield _check("communication", f"{shape.name}: {name}", how, predicted, extra, "B")
            counted = sum(value for key, value in found[name].items() if key.endswith("calls"))
            counted -= sum(value for key, value in found["plain"].items() if key.endswith("calls"))
            yield _check("communication", f"{shape.name}: {name}, collectives", how, calls, counted, "calls")


TIMED = Shape("3 × 256", 3, 256, 1024, 512)
TIMED_SETTINGS = {
    "every row": Setting(),
    "reduce": Setting(sharing="reduce"),
    "max_rows": Setting(max_rows=64),
    "step": Setting(when="step", refresh=4, max_rows=256),
    "step, average": Setting(when="step", decay=0.9, refresh=4),
}


def _check_time(rounds: int) -> Iterator[Check]:
    """Ratios of times on this CPU, against those that the model predicts from a few speeds of it."""
    work = _work(TIMED, samples=4, length=128)
    trainers = {"plain": Trainer(TIMED, work, None)}
    trainers |= {name: Trainer(TIMED, work, setting) for name, setting in TIMED_SETTINGS.items()}

    def run(trainer: Trainer) -> Callable[[], None]:
        def cycle() -> None:
            for _ in range(4):
                trainer.step()

        return cycle

    steps = {name: run(trainer) for name, trainer in trainers.items()}
    # What else runs on this machine slows all of them, so the speeds are measured in the same rounds.
    timings = timing.measure({**steps, **_kernels()}, rounds=rounds)
    ratios = timing.ratios({name: timings.seconds[name] for name in steps}, "plain")
    seconds = {name: timing.spread(values).median for name, values in timings.seconds.items()}
    machine = _speeds(seconds)
    plain = seconds["plain"] / 4
    machine = replace(machine, step=min(1.0, plain_flops(TIMED, work) / plain / machine.half))
    how = f"CPU, one thread, medians of {rounds} rounds"
    for name, setting in TIMED_SETTINGS.items():
        cost = overhead(TIMED, work, setting, machine)
        measured = timing.spread(ratios[name])
        check = _check("time", f"{TIMED.name}: {name}", how, 1 + cost.compute, measured.median, "× plain")
        yield check | {"low": measured.low, "high": measured.high}


SIDE = 512


def _kernels() -> dict[str, Callable[[], object]]:
    """What the model's rates are the speeds of."""
    x, y = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE, dtype=torch.float64)
    matrix = y @ y.mT / SIDE + torch.eye(SIDE, dtype=torch.float64)
    return {
        "single product": lambda: x @ x,
        "double product": lambda: y @ y,
        "factorization": lambda: torch.cholesky_inverse(torch.linalg.cholesky_ex(matrix)[0]),
        "eigensolver": lambda: torch.linalg.eigh(matrix),
        # Into new memory, as for most operators.
        "copy": lambda: y / 2,
    }


def _speeds(seconds: Mapping[str, float]) -> Machine:
    """This CPU, one thread, from the seconds of its kernels."""
    single, double = (2 * SIDE**3 / seconds[f"{name} product"] for name in ("single", "double"))
    factor, eigen = SIDE**3 / seconds["factorization"], 9 * SIDE**3 / seconds["eigensolver"]
    return replace(
        CPU,
        half=single,
        single=single,
        tensor_single=single,
        double=double,
        bandwidth=16 * SIDE**2 / seconds["copy"],
        product=1.0,
        factor=min(1.0, factor / double),
        eigen=min(1.0, eigen / double),
        copy=1.0,
    )


def _check_device(bench: Path) -> Iterator[Check]:
    """What records of an H200 say of the rates that the model assumes."""
    for mode in ("eager", "captured"):
        shapes, scaling = (_read(bench / f"{kind}-cuda-{mode}.json") for kind in ("shapes", "scaling"))
        if shapes is not None:
            yield from _check_encoder(shapes, mode)
        if scaling is not None:
            yield from _check_chain(scaling, mode)
    models = _read(bench / "before" / "models-cuda-eager-4193629.json")
    if models is not None:
        yield from check_models(models)


#: Of `isaac-newton bench models`: what each is here, tokens of a step, and tokens of a sequence.
MODELS = {
    "bert": (Shape("BERT-base", 12, 768, 3072, 2), 4096, 128),
    "bert-large": (Shape("BERT-large", 24, 1024, 4096, 2), 8192, 256),
    "gpt2": (Shape("GPT-2, 124M", 12, 768, 3072, 50257, tied=True), 8192, 1024),
}
#: Their options. A head that is tied, or of two classes, is not conditioned, or nothing beside the rest.
OPTIONS = {
    "auto": replace(AUTOMATIC, exclude=("head",)),
    "max_rows=64": Setting(max_rows=64, exclude=("head",)),
    "max_rows=256": Setting(max_rows=256, exclude=("head",)),
    "reduce": Setting(sharing="reduce", exclude=("head",)),
    "expand": Setting(exclude=("head",)),
}


def check_models(found: Mapping[str, Any]) -> Iterator[Check]:
    """For how much longer the GPU is busy; what the host takes is not in it."""
    how = f"H200, eager, `before/models-cuda-eager-4193629.json` of {found['time'][:10]}"
    for case in found["cases"]:
        if case["name"] not in MODELS:
            continue
        shape, tokens, length = MODELS[case["name"]]
        work = Workload(gpus=1, tokens=tokens, length=length, causal=False)
        busy = {method["name"]: method["device_seconds"] for method in case["methods"]}
        for name, setting in OPTIONS.items():
            seconds = sum(op.seconds(H200) for op in operations(shape, work, setting, H200))
            measured = busy[name] - busy["gradient"]
            yield _check(
                "device", f"{shape.name}: {name}, time the GPU is busy beyond plain", how, 1e3 * seconds, 1e3 * measured, "ms"
            )


def _read(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found if "H200" in found["machine"].get("gpu", "") else None


def _medians(found: Mapping[str, Any], case_name: str) -> dict[str, float]:
    return {
        method["name"]: method["seconds_per_step"]["median"]
        for case in found["cases"]
        if case["name"] == case_name
        for method in case["methods"]
        if "seconds_per_step" in method
    }


def _check_encoder(found: Mapping[str, Any], mode: str) -> Iterator[Check]:
    """The difference of two settings leaves out what the host takes for either."""
    bert = Shape("BERT-shaped", 2, 768, 3072, 2)
    work = Workload(gpus=1, tokens=1024, length=128, causal=False)
    machine, seconds = replace(H200, activation=4), _medians(found, "encoder")
    if {"zeta_star expand", "zeta_star reduce"} <= seconds.keys():
        every, reduced = (
            sum(op.seconds(machine) for op in operations(bert, work, setting, machine))
            for setting in (Setting(), Setting(sharing="reduce"))
        )
        measured = seconds["zeta_star expand"] - seconds["zeta_star reduce"]
        how = f"H200, {mode}, `shapes-cuda-{mode}.json` of {found['time'][:10]}"
        what = "BERT-shaped, 2 × 768, float32: every row, above reduce"
        yield _check("device", what, how, 1e3 * (every - reduced), 1e3 * measured, "ms")


def _check_chain(found: Mapping[str, Any], mode: str) -> Iterator[Check]:
    """Three layers of 512: their inverses at 1024 rows are cuSOLVER's, at 64 rows one small kernel's."""
    few, many, most = (_medians(found, f"batch{batch}-width512") for batch in (64, 1024, 4096))
    how = f"H200, {mode}, `scaling-cuda-{mode}.json` of {found['time'][:10]}"
    if all({"gradient", "zeta_star"} <= case.keys() for case in (few, many)):
        extra = (many["zeta_star"] - many["gradient"]) - (few["zeta_star"] - few["gradient"])
        yield _check("device", "an inverse of 512 columns, per column", how, 1e6 * H200.column, 1e6 * extra / 3 / 512, "µs")
    if "gradient" in most and mode == "captured":
        attained = 8 * 2 * 4096 * 512**2 / most["gradient"] / H200.single
        yield _check("device", "float32 products of 4096 × 512 × 512, share of the peak", how, H200.product, attained, "share")


def record(bench: Path, tick: Callable[[str], object] = lambda what: None, *, rounds: int = 15) -> dict[str, Any]:
    """All checks, and where they were made."""
    found = [*checks(tick, rounds=rounds), *_check_device(bench)]
    command = f"python tests/scaling/scaling_checks.py --rounds {rounds}"
    return {"kind": "scaling checks", "command": command, **origin(threads=1), "checks": found}


def main() -> None:
    """Make all checks and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="how often timed methods take turns")
    parser.add_argument("--bench", type=Path, default=Path("results/bench"), help="records of isaac-newton bench")
    parser.add_argument("--out", type=Path, default=Path("results/scaling/checks.json"))
    options = parser.parse_args()
    found = record(options.bench, lambda what: print(f"Checking {what} …"), rounds=options.rounds)
    write(options.out, found)
    print(f"Record: {options.out}, {len(found['checks'])} checks.")


if __name__ == "__main__":
    main()
