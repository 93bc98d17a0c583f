"""Records of races that are no longer in the tables, once: `python results/archive.py`. No number changes, and that is checked.

Who left: plain SGD and ISAAC on top of it, Shampoo, SINGD, ζ* by the printed formula, and the auto-encoder on Fashion-MNIST.
Their runs go to `archive/trials.jsonl`, the times and calls of the race that is gone beside them. The times of the other
races stay where they are: all methods of a race took turns in them.
"""

import shutil
from pathlib import Path

from isaac_lab.record import Store

LEFT = ("sgd", "sgd+isaac", "sgd+formula", "shampoo", "singd")
GONE = "fashion-autoencoder"
HERE = Path(__file__).parent


def main() -> None:
    """Move them."""
    archive = Store(HERE / "archive")
    for folder in sorted((HERE / "race").glob("*/*")):
        store = Store(folder)
        every = store.records()
        gone = folder.parent.name == GONE
        left = [record for record in every if gone or record.trial.method in LEFT]
        stay = [record for record in every if record not in left]
        if not left:
            continue
        with archive.writing():
            archive.add(*left)
            for mode, record in store.times().items() if gone else ():
                archive.add_times(f"{GONE} {folder.name} {mode}", record)
        store.path.unlink()
        if gone:
            (folder / "about.json").replace(archive.folder / "about.json")
            shutil.rmtree(folder.parent)
        else:
            with store.writing():
                store.add(*stay)
        kept = {**{r.trial: r for r in Store(folder).records()}, **{r.trial: r for r in archive.records() if r in left}}
        if kept != {record.trial: record for record in every}:
            raise SystemExit(f"{folder}: a record is not what it was; restore results/ from git")
        print(f"{folder.relative_to(HERE)}: {len(left)} of {len(every)} runs left")


if __name__ == "__main__":
    main()
