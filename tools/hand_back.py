"""Does it help to take the line out again? The deep auto-encoder of the recipes, on a CPU, for 3,600 steps.

`python tools/hand_back.py` trains what results/integrity/handback.jsonl lacks and prints the table of docs/when-not.md. Rules,
fixed before the first run: Adam at the recipe's own 0.001, constant, L2 1e-5; plain, with `isaac.attach(model)`, and with that
until step 1,200, where `handle.detach()` ends it. At step 1,200 the recipe's runs on a GPU were last seen ahead. Seeds 201 to
205 are in no other record. What counts is the test error at the end; p is Welch's, two-sided, Holm over the two comparisons.
"""

import argparse
import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from statistics import fmean, stdev

import torch
from torch import Tensor

import isaac_newton as isaac
from isaac_lab.records import origin
from isaac_lab.stats import contrast, holm
from isaac_lab.trial import Trial
from isaac_lab.workload import Workload, load

RECORD = Path(__file__).parent.parent / "results" / "integrity" / "handback.jsonl"
STEPS, BACK, EVERY, RATE, DECAY = 3600, 1200, 400, 0.001, 1e-5
ARMS, SEEDS = ("plain", "line", "line, then plain"), range(201, 206)


def steps(workload: Workload, seed: int) -> Iterator[tuple[Tensor, ...]]:
    """A batch for each step."""
    done = 0
    for epoch in range(1, STEPS + 1):
        for batch in workload.batches(seed, epoch):
            if done == STEPS:
                return
            yield batch
            done += 1


def train(arm: str, seed: int, folder: Path | None) -> dict:
    """One run, measured now and then."""
    torch.set_num_threads(1)
    workload = load(Trial("deep-autoencoder", "adam", seed=seed), device="cpu", folder=folder)
    model = workload.model(seed)
    handle = None if arm == "plain" else isaac.attach(model)
    optimizer = torch.optim.Adam(model.parameters(), RATE, weight_decay=DECAY)
    curve = []
    for step, batch in enumerate(steps(workload, seed), 1):
        optimizer.zero_grad()
        workload.loss(model, *batch).backward()
        optimizer.step()
        if step == BACK and handle is not None and arm != "line":
            handle.detach()
        if step % EVERY == 0:
            found = workload.evaluate(model)
            curve.append([step, *(float(f"{found[name]:.6g}") for name in ("train_loss", "test_error"))])
    return {"arm": arm, "seed": seed, "curve": curve}


def report(runs: list[dict]) -> None:
    """The table of docs/when-not.md."""
    ends = {arm: [run["curve"][-1][2] for run in runs if run["arm"] == arm] for arm in ARMS}
    p = holm({arm: contrast(ends["plain"], ends[arm]).p for arm in ARMS[1:]})
    print(f"| | Test error at step {BACK:,} | at step {STEPS:,} | p, against plain |")
    print("|---|--:|--:|--:|")
    for arm, found in ends.items():
        early = fmean(next(error for step, _, error in run["curve"] if step == BACK) for run in runs if run["arm"] == arm)
        print(f"| {arm} | {early:.2f} | {fmean(found):.2f} ± {stdev(found):.2f} | {f'{p[arm]:.2g}' if arm in p else ''} |")


def main() -> None:
    """Train what is due, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="Folder with the data sets.")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    runs = [json.loads(line) for line in RECORD.read_text(encoding="utf-8").splitlines()] if RECORD.exists() else []
    known = {(run["arm"], run["seed"]) for run in runs}
    due = [own for own in product(ARMS, SEEDS) if own not in known]
    about = origin(threads=1, packages=("torch", "numpy"), device="cpu")
    with ProcessPoolExecutor(options.workers) as pool, RECORD.open("a", encoding="utf-8") as file:
        for number, future in enumerate([pool.submit(train, *own, options.data) for own in due], 1):
            run = {**future.result(), "command": "python tools/hand_back.py", **about}
            file.write(json.dumps(run) + "\n")
            file.flush()
            runs.append(run)
            print(f"{number} of {len(due)}: {run['arm']}, seed {run['seed']}: test error {run['curve'][-1][2]:.3f}", flush=True)
    report(runs)


if __name__ == "__main__":
    main()
