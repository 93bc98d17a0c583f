"""Run races: see who can start, tune everyone, run the tuned ones with several seeds, time their steps, write it down."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from isaac_lab import method, methods, times
from isaac_lab.data.files import DataError
from isaac_lab.executors import Call
from isaac_lab.record import Store
from isaac_lab.studies.calls import Means, calling, trainer
from isaac_lab.studies.race import standings
from isaac_lab.studies.race.race import REFERENCE, SCALES, Course, Entrant, Scale, arm, entrants
from isaac_lab.study import Arm, outstanding, resolve, settle
from isaac_lab.trial import Trial
from isaac_lab.workload import Workload, load

__all__ = ["RaceError", "Request", "UnknownMethodError", "check_methods", "folder_of", "run"]

MODES = ("eager", "captured")


class RaceError(Exception):
    """A race that cannot be run or drawn; the message says why and what to do."""


class UnknownMethodError(Exception):
    """A method that no workload has."""


@dataclass(frozen=True)
class Request:
    """What was asked for.

    Args:
        out: A folder for each workload goes here.
        scale: How much to run.
        methods: Names of entrants; all unless given. The reference always takes part.
        resume: Whether records may be there already.
        timed: Whether steps are timed when all have trained.
        means: How to train; "WORKLOAD" in its command stands for the workload.
    """

    out: Path
    scale: Scale = field(default_factory=lambda: SCALES["smoke"])
    methods: tuple[str, ...] = ()
    resume: bool = True
    timed: bool = True
    means: Means = field(default_factory=Means)


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
    folders = []
    for course in chosen:
        try:
            with times.threads(int(request.scale.small)):
                folders.append(_Race(course, request).run())
        except DataError as error:
            if len(chosen) == 1:
                raise
            request.means.say(f"{course.workload} is left out: {error}")
    if not folders:
        raise RaceError("none of the workloads could be loaded; name a folder with their data")
    return folders


def folder_of(course: Course, request: Request) -> Path:
    """Where a race that has been run is."""
    folder = request.out / course.workload / request.scale.name
    if not (folder / "about.json").is_file():
        raise RaceError(f"there is no race in {folder}: it has no about.json; leave out --draw-only to run it")
    return folder


class _Race:
    """One workload."""

    def __init__(self, course: Course, request: Request) -> None:
        self.course, self.request, self.scale, self.means = course, request, request.scale, request.means
        self.call = request.means.call
        self.store = Store(request.out / course.workload / self.scale.name)
        self.command = self.call.command.replace("WORKLOAD", course.workload)
        if not request.resume and self.store.records():
            raise RaceError(f"{self.store.folder} has records already; --resume goes on with them, or name another directory")
        before = self.store.about
        if before.get("device", self.call.device) != self.call.device and self.store.records():
            here = f"{self.store.folder} has a race on {before['device']}"
            raise RaceError(f"{here}; name another directory for one on {self.call.device}")
        # Who fine-tunes an encoder learns its name from the environment: the workload says what it is.
        self.workload: Workload = load(_blank(course, self.scale), device=self.call.device, folder=self.call.folder)
        self.steps = course.length(self.scale, self.workload.steps)

    def run(self) -> Path:
        """See who can start, tune everyone, run the tuned ones with several seeds, time their steps."""
        with self.store.writing(self.command) as mended:
            for said in mended:
                self.means.say(said)
            racing, reasons = self._enter()
            about = self._about(reasons)
            means = Means(_named(self.call, self.command), display=self.means.display)
            with calling(self.store, means, about) as trained:
                self._plan(racing)
                settle(racing, self.store, trainer(self.store, means, trained, f"{self.course.workload}, {self.scale.name}"))
            if self.request.timed:
                self._time(about)
        return self.store.folder

    def _arm(self, entrant: Entrant) -> Arm:
        options: dict[str, Any] = {"steps": self.steps, "quantity": self.workload.quantity, "network": self.workload.network}
        return arm(entrant, self.course, self.scale, **options)

    def _enter(self) -> tuple[list[Arm], dict[str, str]]:
        """Let every method take a few steps: who can race, and why the others cannot."""
        wanted = {*self.request.methods, REFERENCE} if self.request.methods else None
        before = self.store.about.get("reasons", {})
        racing, reasons = [], {}
        for entrant in entrants(self.course):
            own = self._arm(entrant)
            found, reason = resolve(own, self.store), ""
            if wanted is not None and entrant.name not in wanted:
                # What an earlier call has done stays.
                reason = "" if found.tried[0] else before.get(entrant.name) or "left out by --methods"
            elif not (found.whole and found.runs):
                each, reason = times.start(own.search[0].candidates(None)[0], self.workload, self.call.device)
                if each * self.steps > self.scale.longest and entrant.name != REFERENCE:
                    reason = _too_long(each, self.steps, self.scale.longest)
                if not reason:
                    racing.append(own)
            if reason:
                reasons[entrant.name] = reason
                self.means.say(f"{self.course.workload} {entrant.label} does not race: {reason}")
        return racing, reasons

    def _about(self, reasons: dict[str, str]) -> dict[str, Any]:
        workload = self.workload
        return {
            "id": f"race/{self.course.workload}",
            "workload": self.course.workload,
            "title": workload.title,
            "scale": self.scale.name,
            "device": self.call.device,
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
            "conditioning": self.course.sharing,
            "schedule": self.course.schedule,
            "decay": {"added": self.course.decay, "decoupled": self.course.decoupled},
            "relative": self.course.relative,
            "network": workload.network,
            "command": self.command,
            "reasons": reasons,
        }

    def _plan(self, racing: Sequence[Arm]) -> None:
        """Say what will be run before it is."""
        due = len(outstanding(racing, self.store))
        self.means.say(
            f"{self.course.workload}: {len(racing)} methods × ({self.scale.trials} tuning trials + {self.scale.seeds} seeds) "
            f"of {self.steps:,} steps; {due} runs are due now"
        )

    def _time(self, about: dict[str, Any]) -> None:
        """Time the steps of all that have been tuned, where that has not been done for just these."""
        found = {name: result.best for name, (_, result) in standings.results(about, self.store).items()}
        chosen = {
            name: trial for name, trial in found.items() if trial is not None and not methods.unable(trial, self.workload)
        }
        if not chosen:
            return
        for mode in MODES if self.call.device == "cuda" else MODES[:1]:
            able = {n: t for n, t in chosen.items() if mode == "eager" or method.capturable(t)}
            known = {m["name"]: m.get("trial") for m in self.store.times().get(mode, {"methods": []})["methods"]}
            if all(name in known and _settings(known[name]) == _settings(t.as_json()) for name, t in able.items()):
                continue
            self.means.say(f"{self.course.workload}: the time of a step, {mode}")
            options: dict[str, Any] = {"device": self.call.device, "folder": self.call.folder, "rounds": self.scale.rounds}
            with times.threads(1) if self.call.device == "cpu" else contextlib.nullcontext():
                record = times.measure(chosen, captured=mode == "captured", **options)
            self.store.add_times(mode, record)


def _settings(trial: Any) -> Any:
    """What the time of a step depends on; the seed is not among it."""
    return {name: value for name, value in dict(trial or {}).items() if name != "seed"}


def _named(call: Call, command: str) -> Call:
    return replace(call, command=command, executor="processes" if call.workers > 1 else "local")


def _blank(course: Course, scale: Scale) -> Trial:
    """Any run of the workload."""
    return Trial(course.workload, REFERENCE, small=scale.small)


def _too_long(each: float, steps: int, longest: float) -> str:
    whole = f"a step takes {each:.2g} s, a run of {steps:,} steps {each * steps / 60:.3g} minutes"
    return f"{whole}, and at most {longest / 60:.3g} are given to one"
