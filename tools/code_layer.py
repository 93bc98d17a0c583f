"""How much of the auto-encoder's gain is a dead code layer? AdamW with and without ISAAC, two codes, two schedules.

`python tools/code_layer.py` trains what results/integrity/autoencoder.jsonl lacks and prints the table of docs/integrity.md.
The paper's auto-encoder, MNIST, batch 60, 2,000 steps, one CPU thread. Both methods try the same four learning rates at seed 0,
judged by the training loss at the end; the best is run again with seeds 1 to 3. λ is 0.1 throughout and is not tuned.
"""

import argparse
import json
import math
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean

import torch
from scipy import stats
from torch import nn

import isaac_newton as isaac
from isaac_lab.data import sets
from isaac_lab.records import origin

RECORD = Path(__file__).parent.parent / "results" / "integrity" / "autoencoder.jsonl"
SIZES = (784, 1000, 500, 30, 500, 1000, 784)
CODE = 2  # the layer whose 30 outputs are the code
STEPS, BATCH, EVERY, DAMPING, WARM_UP = 2000, 60, 50, 0.1, 0.05
RATES = (3e-4, 6e-4, 1.2e-3, 2.4e-3)
CASES = tuple(product(("relu", "linear"), ("constant", "cosine")))
METHODS = ("adamw", "adamw+isaac")
MEASURED = 2000


def share(schedule: str, step: int) -> float:
    """Of the largest learning rate: all of it, or up over the first 5 % and down half a cosine."""
    if schedule == "constant":
        return 1.0
    warm = WARM_UP * STEPS
    return (step + 1) / warm if step < warm else (1 + math.cos(math.pi * (step - warm) / (STEPS - warm))) / 2


def network(code: str) -> nn.Sequential:
    """Linear layers with ReLU between them; none after a linear code."""
    layers: list[nn.Module] = []
    for number, (fan_in, fan_out) in enumerate(pairwise(SIZES)):
        bare = number == len(SIZES) - 2 or (number == CODE and code == "linear")
        layers += [nn.Linear(fan_in, fan_out)] if bare else [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers)


def train(data: sets.Dataset, code: str, schedule: str, method: str, rate: float, seed: int) -> dict:
    """One run; `alive` counts units of the code that are above zero for one of the measured images at least."""
    torch.manual_seed(seed)
    model = network(code)
    if method == "adamw+isaac":
        isaac.attach(model, damping=DAMPING)
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.0)
    order = torch.Generator().manual_seed(1000 + seed)
    images, test = data.train_images, data.test_images[:MEASURED]
    # The code's own output: after its ReLU, where it has one.
    encoder = model[: 2 * CODE + (2 if code == "relu" else 1)]
    curve, alive = [], {}

    def measure(step: int) -> None:
        with torch.no_grad():
            losses = [nn.functional.mse_loss(model(part), part).item() for part in (images[:MEASURED], test)]
            curve.append([step, *(float(f"{loss:.6g}") for loss in losses)])
            if step in (400, STEPS):
                alive[step] = int((encoder(images[:MEASURED]) > 0).any(0).sum())

    for step in range(STEPS):
        if step % EVERY == 0:
            measure(step)
        for group in optimizer.param_groups:
            group["lr"] = rate * share(schedule, step)
        x = images[torch.randint(len(images), (BATCH,), generator=order)]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x).backward()
        optimizer.step()
    measure(STEPS)
    return {"code": code, "schedule": schedule, "method": method, "rate": rate, "seed": seed, "alive": alive, "curve": curve}


def key(run: dict) -> tuple:
    """What makes a run that run."""
    return tuple(run[name] for name in ("code", "schedule", "method", "rate", "seed"))


def final(run: dict) -> float:
    """Training loss at the end."""
    return run["curve"][-1][1]


def best(known: dict[tuple, dict], case: tuple[str, str], method: str) -> float:
    """The learning rate with the lowest training loss at seed 0."""
    return min(RATES, key=lambda rate: final(known[(*case, method, rate, 0)]))


def steps_to(run: dict, loss: float) -> float:
    """The first step with this training loss, on straight lines between measurements; infinite where there is none."""
    for (before, high, _), (after, low, _) in pairwise(run["curve"]):
        if low <= loss:
            return before + (after - before) * (high - loss) / (high - low)
    return math.inf


def report(known: dict[tuple, dict]) -> None:
    """The table of docs/integrity.md."""
    print("| Code | Schedule | AdamW, loss | + ISAAC, loss | p | Steps to AdamW's end | Live units at 400 | Rates |")
    print("|---|---|--:|--:|--:|--:|--:|---|")
    for case in CASES:
        rates = [best(known, case, method) for method in METHODS]
        plain, ours = (
            [known[(*case, method, rate, seed)] for seed in (1, 2, 3)] for method, rate in zip(METHODS, rates, strict=True)
        )
        losses = [[final(run) for run in runs] for runs in (plain, ours)]
        p = stats.ttest_ind(*losses, equal_var=False).pvalue
        ratios = [STEPS / steps_to(own, final(other)) for own, other in zip(ours, plain, strict=True)]
        alive = ["/".join(str(run["alive"]["400"]) for run in runs) for runs in (plain, ours)]
        edge = ["" if RATES[0] < rate < RATES[-1] else " (edge)" for rate in rates]
        print(
            f"| {case[0]} | {case[1]} | {fmean(map(final, plain)):.5f} | {fmean(map(final, ours)):.5f} | {p:.2g} "
            f"| {fmean(ratios):.1f} × fewer ({min(ratios):.1f} to {max(ratios):.1f}) | {alive[0]}, {alive[1]} "
            f"| {rates[0]:g}{edge[0]}, {rates[1]:g}{edge[1]} |"
        )


def main() -> None:
    """Train what is missing, then print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="Folder with mnist/, if not fetched by isaac-newton data.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [json.loads(line) for line in RECORD.read_text(encoding="utf-8").splitlines()] if RECORD.exists() else []
    known = {key(run): run for run in lines if "curve" in run}
    about = {"command": "python tools/code_layer.py", **origin(threads=1)}
    data = None

    def need(*wanted: tuple) -> None:
        nonlocal data, about
        for one in wanted:
            if one in known:
                continue
            data = data or sets.load("mnist", options.data)
            run = json.loads(json.dumps(train(data, *one)))
            with RECORD.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(line) + "\n" for line in (about, run) if line))
            about, known[one] = {}, run
            print(*one, f"loss {final(run):.5f}", flush=True)

    for case in CASES:
        need(*((*case, method, rate, 0) for rate in RATES for method in METHODS))
        need(*((*case, method, best(known, case, method), seed) for method in METHODS for seed in (1, 2, 3)))
    report(known)


if __name__ == "__main__":
    main()
