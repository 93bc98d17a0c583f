"""Run races: see who can start, tune everyone, run the tuned ones with several seeds, time their steps, write it down."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from isaac_lab.charts.draw import pictures
from isaac_lab.data.files import DataError
from isaac_lab.demo import one_thread
from isaac_lab.race import draw, files, standings, tables, tuning
from isaac_lab.race.course import COURSES, SCALES, Course, Scale
from isaac_lab.race.entrants import REFERENCE, Entrant, entrants, length
from isaac_lab.race.start import start
from isaac_lab.records import plain
from isaac_lab.trials import methods, pool, times, workloads  # noqa: F401  (fills the registry)
from isaac_lab.trials.store import Store
from isaac_lab.trials.trial import Trial
from isaac_lab.trials.workload import REGISTRY, make

__all__ = ["Line", "RaceError", "Request", "UnknownMethodError", "check_methods", "courses", "redraw", "run"]

MODES = ("eager", "captured")


class RaceError(Exception):
    """A race that cannot be run or drawn; the message says why and what to do."""


class UnknownMethodError(Exception):
    """A method that no workload has."""


@dataclass(frozen=True)
class Line:
    """What is told on the way.

    Args:
        stage: What is being done.
        text: What has just ended.
        done: How many of this stage.
        total: Of so many; 0 where nobody counts.
    """

    stage: str
    text: str
    done: int = 0
    total: int = 0


@dataclass(frozen=True)
class Request:
    """What was asked for.

    Args:
        out: A folder for each workload goes here.
        scale: How much to run.
        device: "cpu" or "cuda".
        data: Where data sets are looked for first.
        workers: Processes that train at once.
        methods: Names of entrants; all unless given. The reference always takes part.
        resume: Whether records may be there already.
        timed: Whether steps are timed when all have trained.
        command: How to run this again; "WORKLOAD" in it stands for the workload.
        say: Told of every step on the way.
    """

    out: Path
    scale: Scale = field(default_factory=lambda: SCALES["smoke"])
    device: str = "cpu"
    data: Path | None = None
    workers: int = 1
    methods: tuple[str, ...] = ()
    resume: bool = True
    timed: bool = True
    command: str = "isaac-newton race WORKLOAD"
    say: Callable[[Line], object] = lambda line: None


def courses() -> dict[str, Course]:
    """Those whose workload is registered."""
    return {name: course for name, course in COURSES.items() if name in REGISTRY}


def check_methods(names: Sequence[str], chosen: Sequence[Course]) -> None:
    """Refuse names that none of these races knows."""
    known = dict.fromkeys(entrant.name for course in chosen for entrant in entrants(course))
    for name in names:
        if name not in known:
            raise UnknownMethodError(f"there is no method {name!r}; there are {', '.join(known)}")


def run(chosen: Sequence[Course], request: Request) -> list[Path]:
    """Race on all of these workloads; returns the folders in which the results are.

    One workload's missing data ends the whole if it is the only one. Among several it is told, and the others race.
    """
    with one_thread() if request.scale.small else contextlib.nullcontext():
        return _run(chosen, request)


def _run(chosen: Sequence[Course], request: Request) -> list[Path]:
    races = []
    for course in chosen:
        try:
            races.append(_Race(course, request))
        except DataError as error:
            if len(chosen) == 1:
                raise
            request.say(Line("left out", f"{course.workload}: {error}"))
    if not races:
        raise RaceError("none of the workloads could be loaded; name a folder with their data")
    for race in races:
        race.enter()
    _plan(races, request)
    _train("tuning", [(trial, cost) for race in races for trial, cost in race.tuning()], races, request)
    _train("racing", [(trial, cost) for race in races for trial, cost in race.finals()], races, request)
    for race in races:
        if request.timed:
            race.time()
        _write(race.folder)
    return [race.folder for race in races]


def redraw(course: Course, request: Request) -> Path:
    """Write tables and pictures again from what is in the folder."""
    folder = request.out / course.workload / request.scale.name
    if not (folder / ABOUT).is_file():
        raise RaceError(f"there is no race in {folder}: it has no {ABOUT}; leave out --draw-only to run it")
    _write(folder)
    return folder


#: What the race in a folder is: the workload, and who tries what.
ABOUT = "race.json"


class _Race:
    """One workload."""

    def __init__(self, course: Course, request: Request) -> None:
        self.course, self.request, self.scale = course, request, request.scale
        self.folder = request.out / course.workload / self.scale.name
        self.store = Store(self.folder / "records")
        if not request.resume and any(self.store.folder.glob("*.json")):
            raise RaceError(f"{self.store.folder} has records already; --resume goes on with them, or name another directory")
        self.workload = make(course.workload, small=self.scale.small, device=request.device, folder=request.data)
        self.steps = length(course, self.scale, self.workload.steps)
        #: Of a run of each method that can start, measuring included.
        self.seconds: dict[str, float] = {}
        self.about: dict[str, Any] = {}

    def enter(self) -> None:
        """Let every method take a few steps, and write down who cannot and why, and what the others will try."""
        wanted = {*self.request.methods, REFERENCE} if self.request.methods else None
        before = _read(self.folder / ABOUT) if (self.folder / ABOUT).is_file() else {}
        kept = before.get("methods", {})
        here = self.request.device
        if before.get("device", here) != here and any(self.store.folder.glob("*.json")):
            raise RaceError(f"{self.folder} has a race on {before['device']}; name another directory for one on {here}")
        found: dict[str, dict[str, Any]] = {}
        all_entrants = entrants(self.course)
        for done, entrant in enumerate(all_entrants, 1):
            entry = self._entry(entrant)
            if wanted is not None and entrant.name not in wanted:
                # What an earlier call has done stays.
                same = kept.get(entrant.name, {}).get("tuning") == entry["tuning"]
                entry["reason"] = kept[entrant.name]["reason"] if same else "left out by --methods"
            elif self._is_done(entry):
                entry["reason"], self.seconds[entrant.name] = "", 0.0
            else:
                each, entry["reason"] = start(Trial.from_mapping(entry["tuning"][0]), self.workload, self.request.device)
                if each * self.steps > self.scale.longest and entrant.name != REFERENCE:
                    entry["reason"] = _too_long(each, self.steps, self.scale.longest)
                self.seconds |= {} if entry["reason"] else {entrant.name: each}
            text = f"{self.course.workload} {entrant.label}: {entry['reason'] or 'ready'}"
            self.request.say(Line("starting", text, done, len(all_entrants)))
            found[entrant.name] = entry
        workload, started = self.workload, time.perf_counter()
        workload.evaluate(workload.model(0))
        measuring = (time.perf_counter() - started) * min(self.scale.points, self.course.most_points)
        self.seconds = {name: each * self.steps + measuring for name, each in self.seconds.items()}
        self.about = {
            "workload": self.course.workload,
            "title": workload.title,
            "scale": self.scale.name,
            "device": self.request.device,
            "data": workload.data,
            "checksum": workload.checksum,
            "weights": workload.weights,
            "arithmetic": workload.arithmetic,
            "quantity": workload.quantity,
            "metrics": dict(workload.metrics),
            "steps": self.steps,
            "batch": workload.batch,
            "trials": self.scale.trials,
            "seeds": self.scale.seeds,
            "points": min(self.scale.points, self.course.most_points),
            "conditioning": self.course.conditioning,
            "schedule": self.course.schedule,
            "decay": {"added": self.course.decay, "decoupled": self.course.decoupled},
            "relative": self.course.relative,
            "command": self.request.command.replace("WORKLOAD", self.course.workload),
            "methods": found,
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        _replace(self.folder / ABOUT, json.dumps(plain(self.about), indent=1, ensure_ascii=False) + "\n")

    def _is_done(self, entry: Mapping[str, Any]) -> bool:
        """Whether the method has nothing left to run, so that nobody has to know what a step of it takes."""
        trials = [Trial.from_mapping(trial) for trial in entry["tuning"]]
        finals = (
            [] if self.store.missing(trials) else standings.finals(self.store, trials, self.workload.quantity, self.scale.seeds)
        )
        return bool(finals) and not self.store.missing(finals)

    def _entry(self, entrant: Entrant) -> dict[str, Any]:
        space = entrant.space(self.course)
        points = tuning.places(len(space), self.scale.trials)
        trials = [entrant.trial(self.course, self.scale, point, steps=self.steps, seed=0) for point in points]
        return {
            "label": entrant.label,
            "ours": entrant.ours,
            "ranges": {name: [found.low, found.high] for name, found in space.items()},
            "tuning": [{**asdict(trial), "model": self.workload.network} for trial in trials],
        }

    def racing(self) -> dict[str, list[Trial]]:
        """The tuning trials of those that this call is about."""
        return {name: [Trial.from_mapping(trial) for trial in self.about["methods"][name]["tuning"]] for name in self.seconds}

    def tuning(self) -> Iterator[tuple[Trial, float]]:
        """Trials, each with the seconds that it will take."""
        for name, trials in self.racing().items():
            yield from ((trial, self.seconds[name]) for trial in trials)

    def finals(self) -> Iterator[tuple[Trial, float]]:
        """The same for runs with the settings that tuning chose."""
        for name, trials in self.racing().items():
            for trial in standings.finals(self.store, trials, self.workload.quantity, self.scale.seeds):
                yield trial, self.seconds[name]

    def time(self) -> None:
        """Time the steps of all that have been tuned, where that has not been done for just these."""
        chosen: dict[str, Trial] = {}
        for name, entry in self.about["methods"].items():
            trials = [Trial.from_mapping(trial) for trial in entry["tuning"]]
            finals = standings.finals(self.store, trials, self.workload.quantity, 1)
            if finals and not methods.unable(finals[0], self.workload):
                chosen[name] = finals[0]
        device = self.request.device
        for mode in MODES if device == "cuda" else MODES[:1]:
            able = {n: t for n, t in chosen.items() if mode == "eager" or methods.capturable(t)}
            path = self.folder / f"times-{mode}.json"
            known = _timed(_read(path)) if path.is_file() else {}
            if all(known.get(name) == asdict(trial) for name, trial in able.items()):
                continue
            rounds = iter(range(1, self.scale.rounds + 1))

            def tick(mode: str = mode, rounds: Iterator[int] = rounds) -> None:
                text = f"{self.course.workload}, steps {mode}"
                self.request.say(Line("timing", text, next(rounds), self.scale.rounds))

            with one_thread() if device == "cpu" else contextlib.nullcontext():
                record = times.measure(
                    chosen, self.workload, device=device, captured=mode == "captured", rounds=self.scale.rounds, tick=tick
                )
            _replace(path, json.dumps(plain(record), indent=1, ensure_ascii=False) + "\n")


def _too_long(each: float, steps: int, longest: float) -> str:
    whole = f"a step takes {each:.2g} s, a run of {steps:,} steps {each * steps / 60:.3g} minutes"
    return f"{whole}, and at most {longest / 60:.3g} are given to one"


def _timed(record: Mapping[str, Any]) -> dict[str, Any]:
    return {method["name"]: method["trial"] for method in record["methods"]}


class _Shelves(Store):
    """The stores of several workloads as one, so that all trials can share the same processes."""

    def __init__(self, races: Sequence[_Race]) -> None:
        self._stores = {race.course.workload: race.store for race in races}

    def add(self, record: dict[str, Any]) -> None:
        """To that of its workload."""
        self._stores[record["trial"]["workload"]].add(record)

    def get(self, trial: Trial) -> dict[str, Any] | None:
        """From that of its workload."""
        return self._stores[trial.workload].get(trial)


def _plan(races: Sequence[_Race], request: Request) -> None:
    """Say what will be run before it is."""
    shelves = _Shelves(races)
    total = 0.0
    for race in races:
        missing = set(shelves.missing(trial for trial, _ in race.tuning()))
        seconds = sum(cost for trial, cost in race.tuning() if trial in missing)
        runs = len(missing)
        for name, trials in race.racing().items():
            finals = standings.finals(race.store, trials, race.workload.quantity, race.scale.seeds)
            open_runs = len(race.store.missing(finals)) if finals else race.scale.seeds * bool(missing & set(trials))
            seconds, runs = seconds + open_runs * race.seconds[name], runs + open_runs
        total += seconds
        request.say(
            Line(
                "plan",
                f"{race.course.workload}: {len(race.seconds)} methods × ({race.scale.trials} tuning trials + "
                f"{race.scale.seeds} seeds) of {race.steps:,} steps; {runs} runs to go, about {seconds:,.0f} s in one process",
            )
        )
    workers = f"{request.workers} process{'es' if request.workers > 1 else ''}"
    then = ", and then the times of steps" if request.timed else ""
    request.say(Line("plan", f"At least {total / request.workers:,.0f} s in {workers}{then}."))


def _train(stage: str, costs: Sequence[tuple[Trial, float]], races: Sequence[_Race], request: Request) -> None:
    quantities = {race.course.workload: race.workload.quantity for race in races}
    done = 0

    def tick(record: dict[str, Any], total: int) -> None:
        nonlocal done
        done += 1
        trial = Trial.from_mapping(record["trial"])
        ended = record["status"] == "finished"
        quantity = quantities[trial.workload]
        text = f"{quantity.replace('_', ' ')} {record['points'][-1][quantity]:.4g}" if ended else "diverged"
        request.say(Line(stage, f"{trial.title}: {text}", done, total))

    # The longest first, so that no process is left with one at the end.
    trials = [trial for trial, _ in sorted(costs, key=lambda item: -item[1])]
    pool.run(trials, _Shelves(races), device=request.device, folder=request.data, workers=request.workers, tick=tick)


def _write(folder: Path) -> None:
    about = _read(folder / ABOUT)
    timed = {mode: _read(path) for mode in MODES if (path := folder / f"times-{mode}.json").is_file()}
    store = Store(folder / "records")
    summary = standings.summarize(about, store, timed)
    _replace(folder / "summary.json", files.as_json(summary))
    _replace(folder / "table.md", tables.markdown(summary))
    _replace(folder / "numbers.csv", files.as_csv(about, store, summary))
    pictures(draw.figure(summary), folder / "figure")


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RaceError(f"{path} is damaged: {error}; remove it and run the race again, its records are kept") from None
    return found


def _replace(path: Path, text: str) -> None:
    """Write a file that is there as a whole or not at all."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
