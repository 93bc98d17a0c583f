"""Run races: see who can start, tune everyone, run the tuned ones with fresh seeds, time their steps, write it down."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from isaac_lab import method, methods, times
from isaac_lab.products import threads
from isaac_lab.record import Store
from isaac_lab.studies import StudyError
from isaac_lab.studies.calls import Means, each_with_data, modes, train
from isaac_lab.studies.race import standings
from isaac_lab.studies.race.race import ENTRANTS, RULES, SCALES, Course, Scale, arms, due, entrants
from isaac_lab.trial import Trial
from isaac_lab.workload import Workload, load


@dataclass(frozen=True)
class Request:
    """What was asked for."""

    out: Path  # a folder for each workload goes here
    scale: Scale = field(default_factory=lambda: SCALES["smoke"])  # how much to run
    methods: tuple[str, ...] = ()  # names of entrants; all unless given. Who sets the target always takes part
    timed: bool = True  # whether steps are timed when all have trained
    means: Means = field(default_factory=Means)  # how to train; "WORKLOAD" in its command stands for the workload


def run(chosen: Sequence[Course], request: Request) -> list[Path]:
    """Race on all of these workloads; returns the folders in which the results are."""
    found = each_with_data({course.name: partial(_run, course, request) for course in chosen}, request.means)
    if not found:
        raise StudyError("none of the workloads could be loaded; name a folder with their data")
    return list(found.values())


def folders(chosen: Sequence[Course], request: Request, *, needed: bool) -> list[Path]:
    """Where races that have been run are; an error where there are none and one is needed."""
    found = [request.out / course.name / request.scale.name for course in chosen]
    there = [folder for folder in found if (folder / "about.json").is_file()]
    if needed and not there:
        where = f"{found[0]}: it has no about.json" if len(found) == 1 else f"{request.out}, of scale {request.scale.name}"
        raise StudyError(f"there is no race in {where}; leave out --draw-only to run it")
    return there


def _run(course: Course, request: Request) -> Path:
    scale, call = request.scale, request.means.call
    means = replace(request.means, call=replace(call, command=call.command.replace("WORKLOAD", course.name)))
    store = Store(request.out / course.name / scale.name)
    if store.records():
        standings.check(store)
        if (before := store.about["device"]) != call.device:
            here = f"{store.folder} has a race on {before}"
            raise StudyError(f"{here}; name another directory for one on {call.device}")
    # Who fine-tunes an encoder learns its name from the environment: the workload says what it is.
    workload: Workload = load(course.blank(scale), device=call.device, folder=call.folder)
    with threads(int(scale.small)), means.writing(store):
        racing, reasons = _enter(course, request, workload, store)
        about = _about(course, scale, workload) | {"command": means.call.command, "device": call.device, "reasons": reasons}
        means.say(f"{course.name}: {len(racing)} methods, {about['steps']:,} steps a run, rules {about['rules']}")

        def waiting() -> list[Trial]:
            own = arms(course, scale, store, workload.network)
            return due([own[name] for name in racing], store)

        train([(f"{course.name}, {scale.name}", waiting)], store, means, about)
        if request.timed:
            _time(course, scale, workload, store, means)
    return store.folder


def _enter(course: Course, request: Request, workload: Workload, store: Store) -> tuple[list[str], dict[str, str]]:
    """Let every method take a few steps: who can race, and why the others cannot."""
    setter = [course.target] if isinstance(course.target, str) else []
    wanted = {*request.methods, *setter} if request.methods else set(ENTRANTS)
    before, own = store.about.get("reasons", {}), arms(course, request.scale, store, workload.network)
    racing: list[str] = []
    reasons: dict[str, str] = {}
    for entrant in entrants(course):
        name, begin = entrant.name, own[entrant.name].search[0].candidates(None)
        # What an earlier call has done stays.
        begun = len(store.missing(begin)) < len(begin)
        if name not in wanted:
            reason = "" if begun else before.get(name) or "left out by --methods"
        elif reason := "" if begun else times.start(begin[0], workload, request.means.call.device):
            request.means.say(f"{course.name}: {entrant.label} does not race: {reason}")
        else:
            racing.append(name)
        reasons |= {name: reason} if reason else {}
    return racing, reasons


def _about(course: Course, scale: Scale, workload: Workload) -> dict[str, Any]:
    blank = course.blank(scale)
    return {
        "id": f"race/{course.name}",
        "workload": course.name,
        "scale": scale.name,
        "rules": blank.rules,
        **{
            name: getattr(workload, name) for name in ("title", "data", "checksum", "weights", "arithmetic", "batch", "network")
        },
        "quantity": course.metric,
        "higher": course.higher,
        "metrics": dict(workload.metrics),
        "steps": blank.steps,
        "seeds": scale.seeds,
        "points": blank.points,
    }


def _time(course: Course, scale: Scale, workload: Workload, store: Store, means: Means) -> None:
    """Time the steps of all that have been tuned, alone on the device, where that has not been done for just these."""
    chosen, call = {}, means.call
    for name, (entrant, result) in standings.results(store.about, store).items():
        if result.best is not None and not methods.unable(result.best, workload):
            chosen[name] = replace(result.best, split="test", seed=RULES["first_seed"])
            if entrant.ours:
                chosen[name + standings.CONTROL] = chosen[name].having(damping=math.inf, relative=None)
    for mode in modes(call.device):
        able = {n: t for n, t in chosen.items() if mode == "eager" or method.capturable(t)}
        known = {m["name"]: m.get("trial") for m in store.times().get(mode, {"methods": []})["methods"]}
        if any(known.get(name) != trial.as_json() for name, trial in able.items()):
            means.say(f"{course.name}: the time of a step, {mode}")
            how: dict[str, Any] = {"captured": mode == "captured", "rounds": scale.turns, "folder": call.folder}
            with threads(means.threads):
                store.add_times(mode, times.measure(able, device=call.device, **how))
