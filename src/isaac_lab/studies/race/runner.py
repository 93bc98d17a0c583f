"""Run races: see who can start, tune everyone, run the tuned ones with fresh seeds, time their steps, write it down."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from isaac_lab import method, methods, times
from isaac_lab.data.files import DataError
from isaac_lab.record import Store
from isaac_lab.studies.calls import Means, modes, train
from isaac_lab.studies.race import standings
from isaac_lab.studies.race.race import ENTRANTS, RULES, SCALES, Course, Scale, arms, due, entrants
from isaac_lab.study import Arm
from isaac_lab.trial import Trial
from isaac_lab.workload import Workload, load


class RaceError(Exception):
    """A race that cannot be run or drawn; the message says why and what to do."""


@dataclass(frozen=True)
class Request:
    """What was asked for."""

    out: Path  # a folder for each workload goes here
    scale: Scale = field(default_factory=lambda: SCALES["smoke"])  # how much to run
    methods: tuple[str, ...] = ()  # names of entrants; all unless given. Who sets the target always takes part
    timed: bool = True  # whether steps are timed when all have trained
    means: Means = field(default_factory=Means)  # how to train; "WORKLOAD" in its command stands for the workload


def check_methods(names: Sequence[str]) -> None:
    """Refuse names that no race knows."""
    for name in names:
        if name not in ENTRANTS:
            raise RaceError(f"there is no method {name!r}; there are {', '.join(ENTRANTS)}")


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
            request.means.say(f"{course.name} is left out: {error}")
    if not folders:
        raise RaceError("none of the workloads could be loaded; name a folder with their data")
    return folders


def folders(chosen: Sequence[Course], request: Request, *, needed: bool) -> list[Path]:
    """Where races that have been run are; an error where there are none and one is needed."""
    found = [request.out / course.name / request.scale.name for course in chosen]
    there = [folder for folder in found if (folder / "about.json").is_file()]
    if needed and not there:
        where = f"{found[0]}: it has no about.json" if len(found) == 1 else f"{request.out}, of scale {request.scale.name}"
        raise RaceError(f"there is no race in {where}; leave out --draw-only to run it")
    return there


class _Race:
    """One workload."""

    def __init__(self, course: Course, request: Request) -> None:
        self.course, self.request, self.scale = course, request, request.scale
        call = request.means.call
        own = replace(call, command=call.command.replace("WORKLOAD", course.name))
        self.means = replace(request.means, call=replace(own, executor="processes" if call.workers > 1 else "local"))
        self.device, self.store = call.device, Store(request.out / course.name / self.scale.name)
        if self.store.records():
            standings.check(self.store)
            if (before := self.store.about["device"]) != self.device:
                here = f"{self.store.folder} has a race on {before}"
                raise RaceError(f"{here}; name another directory for one on {self.device}")
        # Who fine-tunes an encoder learns its name from the environment: the workload says what it is.
        self.workload: Workload = load(course.blank(self.scale), device=self.device, folder=call.folder)

    def run(self) -> Path:
        """See who can start, tune everyone, run the tuned ones with fresh seeds, time their steps."""
        course, scale, store, means = self.course, self.scale, self.store, self.means
        with means.writing(store):
            racing, reasons = self._enter()
            about = self._about(reasons)
            means.say(f"{course.name}: {len(racing)} methods, {about['steps']:,} steps a run, rules {about['rules']}")

            def waiting() -> list[Trial]:
                return due([own for name, own in self._arms().items() if name in racing], store)

            train([(f"{course.name}, {scale.name}", waiting)], store, means, about)
            if self.request.timed:
                self._time(about)
        return store.folder

    def _arms(self) -> dict[str, Arm]:
        return arms(self.course, self.scale, self.store, self.workload.network)

    def _enter(self) -> tuple[list[str], dict[str, str]]:
        """Let every method take a few steps: who can race, and why the others cannot."""
        setter = [self.course.target] if isinstance(self.course.target, str) else []
        wanted = {*self.request.methods, *setter} if self.request.methods else set(ENTRANTS)
        before, own = self.store.about.get("reasons", {}), self._arms()
        racing, reasons = [], {}
        for entrant in entrants(self.course):
            begin = own[entrant.name].search[0].candidates(None)
            # What an earlier call has done stays.
            if any(self.store.get(trial) is not None for trial in begin):
                reason = ""
            elif entrant.name not in wanted:
                reason = before.get(entrant.name) or "left out by --methods"
            else:
                reason = times.start(begin[0], self.workload, self.device)
            if reason:
                reasons[entrant.name] = reason
            if entrant.name in wanted:
                racing += [] if reason else [entrant.name]
                if reason:
                    self.means.say(f"{self.course.name}: {entrant.label} does not race: {reason}")
        return racing, reasons

    def _about(self, reasons: dict[str, str]) -> dict[str, Any]:
        workload, course, blank = self.workload, self.course, self.course.blank(self.scale)
        return {
            "id": f"race/{course.name}",
            "workload": course.name,
            "scale": self.scale.name,
            "rules": blank.rules,
            "device": self.device,
            **{name: getattr(workload, name) for name in ("title", "data", "checksum", "weights", "arithmetic")},
            "quantity": course.metric,
            "higher": course.higher,
            "metrics": dict(workload.metrics),
            "steps": blank.steps,
            "batch": workload.batch,
            "seeds": self.scale.seeds,
            "points": blank.points,
            "network": workload.network,
            "command": self.means.call.command,
            "reasons": reasons,
        }

    def _time(self, about: dict[str, Any]) -> None:
        """Time the steps of all that have been tuned, alone on the device, where that has not been done for just these."""
        chosen = {}
        for name, (entrant, result) in standings.results(about, self.store).items():
            if result.best is not None and not methods.unable(result.best, self.workload):
                trial = replace(result.best, split="test", seed=RULES["first_seed"])
                chosen[name] = trial
                if entrant.ours:
                    chosen[name + standings.CONTROL] = trial.having(damping=math.inf, relative=None)
        for mode in modes(self.device):
            able = {n: t for n, t in chosen.items() if mode == "eager" or method.capturable(t)}
            known = {m["name"]: m.get("trial") for m in self.store.times().get(mode, {"methods": []})["methods"]}
            if any(known.get(name) != trial.as_json() for name, trial in able.items()):
                self.means.say(f"{self.course.name}: the time of a step, {mode}")
                how = {"device": self.device, "captured": mode == "captured", "rounds": self.scale.turns}
                with times.threads(self.means.threads):
                    self.store.add_times(mode, times.measure(able, folder=self.means.call.folder, **how))
