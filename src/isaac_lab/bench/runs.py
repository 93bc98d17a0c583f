"""The benchmarks: Table 2, scaling, shapes, models, the grid. Each makes one record for each way to execute a step."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import isaac_newton
from isaac_lab.bench import counting, memory, timing
from isaac_lab.bench.problems import BATCH, TABLE2, Problem, chain, models, panel, shapes
from isaac_lab.bench.steps import BASELINE, GRID_METHODS, LEARNING_RATE, METHODS, MODEL_METHODS, SHAPE_METHODS, Method
from isaac_lab.products import float32_products, threads
from isaac_lab.records import origin

Record = dict[str, Any]
Steps = dict[str, Callable[[], object]]

#: Seconds. A method that takes longer for one step is left out of a table; K-FAC on the largest model is the case.
SLOWEST_STEP = 20.0
BATCHES = (1, 4, 16, 64, 256, 1024, 4096)
WIDTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
WIDTH = 512
SCALING_METHODS = (BASELINE, "zeta_star")


#: Their inverses read an error flag back from the device, which a CUDA graph cannot.
NOT_CAPTURED = ("paper", "kfac")


@dataclass(frozen=True)
class Plan:
    """What the options of the command line say, by their names there; all models and methods if none is named.

    `say` is called with the name of what is being measured. A step that is `captured` is one CUDA graph, by
    `isaac_newton.capture`. Where it is `compiled`, the model has gone through `torch.compile`.
    """

    device: str = "cpu"
    models: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    threads: int = 1
    rounds: int = 20
    damping: float = 1.0
    memory: bool = True
    budget: float = 60.0
    say: Callable[[str], object] = lambda what: None
    compiled: bool = False
    captured: bool = False

    @property
    def mode(self) -> str:
        """How a step is executed, for file names and tables."""
        if self.device == "cpu":
            return f"cpu-{self.threads}thread{'' if self.threads == 1 else 's'}{'-compiled' if self.compiled else ''}"
        return f"{self.device}-{'captured' if self.captured else 'compiled' if self.compiled else 'eager'}"

    def wait(self) -> None:
        """Until the device has done what it was told to."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def prepare(self, problem: Problem, methods: Mapping[str, Method]) -> tuple[Steps, dict[str, str]]:
        """The step of each method, ready to be called, and why others have none."""
        steps: Steps = {}
        skipped: dict[str, str] = {}
        torch.compiler.reset()  # it gives up on code that it has compiled for many models
        for name, method in methods.items():
            if self.captured and name in NOT_CAPTURED:
                skipped[name] = "cannot be captured: its inverse reads an error flag back from the device"
                continue
            try:
                steps[name] = self._step(problem, method)
            except RuntimeError as error:
                # Out of memory, or an operation that cannot be captured: a result too, and no reason to lose the others.
                skipped[name] = f"failed: {str(error).splitlines()[0]}"
        return steps, skipped

    def _step(self, problem: Problem, method: Method) -> Callable[[], object]:
        # A function of its own, so that what did not fit leaves nothing behind.
        model, x, y = problem.make(self.device)
        step = method(model, problem.loss_fn, self.damping)
        if self.compiled:
            _compile(model)
        return partial(isaac_newton.capture(step, x, y) if self.captured else step, x, y)

    def chosen(self, known: Mapping[str, Method]) -> dict[str, Method]:
        """Of these methods those that are named, in their order, and the plain gradient."""
        return {name: known[name] for name in known if name in (BASELINE, *(self.methods or known))}


def _compile(model: nn.Module) -> None:
    """As a whole, also where it is a module of torch's own: of these `model.compile()` compiles nothing."""
    forward = model.forward

    def whole(x: Tensor) -> Any:
        return forward(x)

    model.forward = torch.compile(whole)


def named(kind: str, device: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The models and methods that options can name."""
    return (tuple(models(device)), tuple(MODEL_METHODS)) if kind == "models" else (tuple(TABLE2), tuple(METHODS))


def measure(kind: str, plan: Plan) -> Iterator[Record]:
    """A record for each mode of a device."""
    for captured in (False,) if plan.device == "cpu" or plan.compiled else (False, True):
        yield BENCHMARKS[kind](replace(plan, captured=captured))


def table2(plan: Plan) -> Record:
    """Time and peak memory of a step for the models and methods of the paper's Table 2."""
    names, methods = plan.models or tuple(TABLE2), plan.chosen(METHODS)
    cases = []
    for name in names:
        cases.append(_time(TABLE2[name], methods, plan, limit=SLOWEST_STEP))
        # A captured step lives in a memory pool of its own, whose peak the allocator does not tell.
        if plan.memory and not plan.captured:
            _add_memory(cases[-1], plan)
    return _record("table2", plan, cases, _options(names, methods) + ("" if plan.memory else " --no-memory"))


def scaling(plan: Plan) -> Record:
    """ζ* over the plain gradient by batch size and by width, beside the ratio of the multiply-adds."""
    methods = {name: METHODS[name] for name in SCALING_METHODS}
    cases: list[Record] = []
    left_out: list[str] = []
    for curve, points in {"batch": [(b, WIDTH) for b in BATCHES], "width": [(BATCH, width) for width in WIDTHS]}.items():
        done, step = math.inf, 0.0
        for batch, width in points:
            sizes, title = (width,) * 4, f"batch {batch}, width {width}"
            work = counting.gradient(sizes, batch) + counting.conditioner(sizes, batch)
            # What this point will take, from the one before it and the multiply-adds of both.
            likely = step * max(1.0, work / done)
            likely = timing.WARM_UP * likely + plan.rounds * max(likely, timing.TURN * len(methods))
            if step and likely > plan.budget:
                left_out.append(title)
                continue
            case = _time(chain(sizes, batch, name=f"batch{batch}-width{width}", title=title), methods, plan)
            cases.append(case | {"curve": curve, "width": width, "theory": counting.ratio(sizes, batch)})
            done = work
            step = sum(method["seconds_per_step"]["median"] for method in case["methods"] if "seconds" in method)
    return _record("scaling", plan, cases, f" --budget {plan.budget:g}") | {"left_out": left_out}


def other_shapes(plan: Plan) -> Record:
    """Networks with attention and convolutions."""
    return _record("shapes", plan, [_time(problem, SHAPE_METHODS[problem.name], plan) for problem in shapes(plan.device)])


def user_models(plan: Plan) -> Record:
    """Models as people train them, eager and captured, with fused AdamW."""
    known, methods = models(plan.device), plan.chosen(MODEL_METHODS)
    names = [name for name in known if name in (plan.models or known)]
    cases = [_time(known[name], methods, plan) for name in names]
    # All times first: once a profiler was there, launches take longer for the rest of the process.
    for case in [] if plan.compiled else cases:  # all would be compiled once more
        _add_work(known[case["name"]], case, plan)
    every = len(names) == len(known) and len(methods) == len(MODEL_METHODS)
    compiled = " --compiled" if plan.compiled else ""
    record = _record("models", plan, cases, compiled + ("" if every else _options(names, methods)))
    record["settings"] |= {"optimizer": "AdamW, fused on a GPU", "damping": 0.1, "relative": True}
    return record


def grid(plan: Plan) -> Record:
    """Many networks at once, as in the grids of the paper; on the CPU only a few of them."""
    problem = panel(copies=4) if plan.device == "cpu" else panel()
    cases = [_time(problem, GRID_METHODS, plan)]
    if plan.device == "cuda":
        with float32_products(tensor_cores=True):
            cases.append(_time(problem, GRID_METHODS, plan))
        cases[1] |= {"name": f"{problem.name}-tf32", "title": f"{problem.title}, products in TF32"}
    return _record("grid", plan, cases)


BENCHMARKS: Mapping[str, Callable[[Plan], Record]] = {
    "table2": table2,
    "scaling": scaling,
    "shapes": other_shapes,
    "models": user_models,
    "grid": grid,
}


def file_stem(record: Record) -> str:
    """The name of a record's file: what, how, and what it is restricted to."""
    parts = [record["kind"], record["mode"]]
    if record["kind"] != "models" and record["settings"]["damping"] != Plan.damping:
        parts.append(f"damping{record['settings']['damping']:g}")
    if record["kind"] in ("table2", "models"):
        names = [case["name"] for case in record["cases"]]
        methods = [method["name"] for method in record["cases"][0]["methods"]]
        if record["kind"] == "table2" or " --models " in record["command"]:
            parts += names if names != list(TABLE2) else []
            parts += methods if methods != list(METHODS) else []
    return "-".join(parts)


def _options(names: Sequence[str], methods: Mapping[str, Method]) -> str:
    return f" --models {','.join(names)} --methods {','.join(methods)}"


def _time(problem: Problem, methods: Mapping[str, Method], plan: Plan, limit: float = math.inf) -> Record:
    """Every method on one problem: raw times of each round, and their summary."""
    plan.say(problem.title)
    with threads(plan.threads):
        steps, skipped = plan.prepare(problem, methods)
        if BASELINE not in steps:
            raise RuntimeError(f"the plain step of {problem.title} {skipped[BASELINE]}")
        timings = timing.measure(steps, rounds=plan.rounds, limit=limit, wait=plan.wait)
    skipped |= {name: f"left out: one step takes {seconds:.0f} s" for name, seconds in timings.too_slow.items()}
    found = timing.entries(timings.seconds, timings.steps_per_turn)
    measured = {name: {**entry, "seconds": timings.seconds[name]} for name, entry in found.items()}
    results = [{"name": name, **({"skipped": skipped[name]} if name in skipped else measured[name])} for name in methods]
    return {"name": problem.name, "title": problem.title, "batch": problem.batch, "methods": results}


def _add_work(problem: Problem, case: Record, plan: Plan) -> None:
    """What one step of each method leaves to a GPU."""
    timed = {method["name"]: method for method in case["methods"] if "skipped" not in method}
    if plan.device != "cuda":
        return
    with threads(plan.threads):
        steps, _ = plan.prepare(problem, {name: MODEL_METHODS[name] for name in timed})
        for step in steps.values():
            for _ in range(timing.WARM_UP + 1):
                step()
        for name, step in steps.items():
            timed[name] |= memory.device_work(step, len(steps))


def _add_memory(case: Record, plan: Plan) -> None:
    for method in case["methods"]:
        if "skipped" in method:
            continue
        plan.say(f"{case['title']}: memory")
        if plan.device == "cuda":
            method |= memory.cuda_peak(TABLE2[case["name"]], METHODS[method["name"]], damping=plan.damping)
        else:
            method |= memory.cpu_peak(case["name"], method["name"], damping=plan.damping, threads=plan.threads)


def _record(kind: str, plan: Plan, cases: list[Record], options: str = "") -> Record:
    device = f" --device {plan.device} --threads {plan.threads}"
    return {
        "kind": kind,
        "mode": plan.mode,
        "command": f"isaac-newton bench {kind}{device} --rounds {plan.rounds} --damping {plan.damping:g}{options}",
        "settings": {
            "damping": plan.damping,
            "rounds": plan.rounds,
            "turn_seconds": timing.TURN,
            "optimizer": f"SGD, learning rate {LEARNING_RATE}",
        },
        **origin(threads=plan.threads, device=plan.device),
        "cases": cases,
    }
