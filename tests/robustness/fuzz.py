"""Random arguments, sensible and not, for every public function: each call gives a right answer or a clear error.

`python tests/robustness/fuzz.py --cases 100000` runs so many and writes results/robustness/fuzz.json. A right answer agrees
with `dense`; a clear error is a TypeError, ValueError or RuntimeError whose message names the argument.
"""

import argparse
import random
import time
import warnings
from collections import Counter
from pathlib import Path

import torch
from drawn import Random, Refused
from rich.console import Console
from rich.progress import Progress
from targets import TARGETS, WEIGHTS

from isaac_lab.records import origin, write

__all__ = ["case", "main"]


def case(name: str, draw: Random) -> str:
    """Run one case of a target: "answered" or "refused"; anything else raises."""
    torch.manual_seed(draw.getrandbits(31))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            TARGETS[name](draw)
    except Refused:
        return "refused"
    return "answered"


def main(arguments: list[str] | None = None) -> None:
    """Run, write the record, print a summary; stops at the first case that is neither answered nor refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/robustness/fuzz.json"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    console, outcomes, started = Console(), Counter[str](), time.perf_counter()
    choose = random.Random(options.seed)
    names = list(TARGETS)
    with Progress(console=console) as progress:
        task = progress.add_task("fuzz", total=options.cases)
        for number in range(options.cases):
            name = choose.choices(names, [WEIGHTS.get(name, 1) for name in names])[0]
            try:
                outcomes[f"{name}, {case(name, random.Random(f'{options.seed}/{number}'))}"] += 1
            except BaseException as error:
                raise RuntimeError(
                    f"case {number} of seed {options.seed}: case({name!r}, Random('{options.seed}/{number}'))"
                ) from error
            progress.update(task, advance=1)
    record = origin(threads=1, packages=("torch", "numpy")) | {
        "kind": "fuzz",
        "command": f"python tests/robustness/fuzz.py --cases {options.cases} --seed {options.seed}",
        "seed": options.seed,
        "cases": options.cases,
        "seconds": time.perf_counter() - started,
        "outcomes": dict(sorted(outcomes.items())),
        "crashes": 0,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write(options.out, record)
    console.print(f"{options.cases:,} cases, each answered or refused. Record: {options.out}")


if __name__ == "__main__":
    main()
