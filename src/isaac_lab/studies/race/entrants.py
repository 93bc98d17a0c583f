"""Who races: the optimizers that people pick, those that are closest to ISAAC, and ISAAC on top of the former."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from isaac_lab.method import METHODS
from isaac_lab.studies.race.course import SINGD_DAMPINGS, Course, Range, Scale
from isaac_lab.studies.race.tuning import ending, places
from isaac_lab.study import Arm, Search
from isaac_lab.trial import Trial, Value

__all__ = ["REFERENCE", "Entrant", "arm", "entrants", "length"]

#: Whose loss at the end of the budget is the target of all.
REFERENCE = "adamw"
#: These decay the weights themselves, others add the decay to the gradient.
DECOUPLED = ("adamw", "muon", "soap")
#: Steps between two renewals of K-FAC's factors: what makes it affordable.
EVERY = 10
#: How ISAAC conditions with one batch, as settings.
CONDITIONINGS: Mapping[str, Mapping[str, Value]] = {"zeta_star": {}, "reduce": {"sharing": "reduce"}}


@dataclass(frozen=True)
class Entrant:
    """A method in a race.

    Args:
        name: On the command line and in records.
        label: In tables and pictures.
        method: A name that `method.find` knows.
        settings: Those that are not tuned.
    """

    name: str
    label: str
    method: str
    settings: tuple[tuple[str, Value], ...] = ()

    @property
    def ours(self) -> bool:
        """Whether this library conditions its gradient."""
        return self.method.endswith("+isaac")

    @property
    def optimizer(self) -> str:
        """Without what conditions it."""
        return self.method.partition("+")[0]

    def space(self, course: Course) -> dict[str, Range]:
        """What is tuned, with its range: the learning rate, and one number more where the method has one.

        Where ISAAC's damping is the second number of Muon, the learning rate of AdamW beside it moves with Muon's.
        """
        alone = "+" not in self.method
        key = self.optimizer if alone else f"isaac-{self.optimizer}"
        found = {"learning_rate": course.rates.get(key) or course.rates[self.optimizer]}
        if not alone:
            found["damping"] = course.dampings
        elif self.optimizer == "muon":
            found["second_rate"] = course.second_rates
        elif "damping" in METHODS[self.optimizer].takes:
            found["damping"] = SINGD_DAMPINGS if self.optimizer == "singd" else course.dampings
        return found

    def trial(self, course: Course, scale: Scale, places: tuple[float, ...], *, steps: int, network: str = "") -> Trial:
        """A run at seed 0 with the settings at these places of the ranges, in the order of `space`."""
        settings: dict[str, Value] = dict(self.settings)
        settings |= {name: found.at(place) for (name, found), place in zip(self.space(course).items(), places, strict=True)}
        if self.optimizer == "muon" and "second_rate" not in settings:
            settings["second_rate"] = course.second_rates.at(places[0])
        if course.relative and self.ours:
            settings["relative"] = True
        decay = course.decoupled if self.optimizer in DECOUPLED else course.decay
        settings |= {"weight_decay": decay} if decay else {}
        return Trial(
            course.workload,
            self.method,
            tuple(settings.items()),
            (("model", network),) if network else (),
            course.schedule,
            steps,
            min(scale.points, course.most_points),
            small=scale.small,
        )


def arm(entrant: Entrant, course: Course, scale: Scale, *, steps: int, quantity: str, network: str = "") -> Arm:
    """Tuning at seed 0 over the whole budget, then the best settings with other seeds."""
    points = places(len(entrant.space(course)), scale.trials)
    tuning = [entrant.trial(course, scale, point, steps=steps, network=network) for point in points]

    def finals(best: Trial | None) -> list[Trial]:
        return [] if best is None else [replace(best, seed=seed) for seed in range(1, scale.seeds + 1)]

    return Arm(entrant.name, finals, (Search(lambda _: tuning, lambda record: ending(record, quantity)),))


def entrants(course: Course) -> tuple[Entrant, ...]:
    """All of a workload, also those that cannot run there."""
    titles = {name: method.title for name, method in METHODS.items() if name != "adam"}
    rivals = [Entrant(name, title, name, (("every", EVERY),) if name == "kfac" else ()) for name, title in titles.items()]
    formula = Entrant("formula", "Authors' formula", "sgd+formula")
    bases = {"sgd": "SGD", "momentum": "SGD + momentum", "adamw": "AdamW", "muon": "Muon"}
    how = tuple(CONDITIONINGS[course.conditioning].items())
    ours = [Entrant(f"isaac-{base}", f"{title} + ISAAC", f"{base}+isaac", how) for base, title in bases.items()]
    if course.running:
        # A language model's conditioner of one batch is noisy; those of these two optimizers are what is used there.
        ours += [
            Entrant(f"isaac-{base}-running", f"{bases[base]} + ISAAC, running", f"{base}+isaac", (("running", True),))
            for base in ("adamw", "muon")
        ]
    return (*rivals, formula, *ours)


def length(course: Course, scale: Scale, epoch: int) -> int:
    """Steps of a run, where an epoch has so many."""
    return course.lengths[scale.name] * (epoch if course.unit == "epochs" else 1)
