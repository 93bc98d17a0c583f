"""Who races: the optimizers that people pick, those that are closest to ISAAC, and ISAAC on top of the former."""

from dataclasses import dataclass
from typing import Any

from isaac_lab.race.course import SINGD_DAMPINGS, Course, Range, Scale
from isaac_lab.trials import methods
from isaac_lab.trials.trial import Trial

__all__ = ["REFERENCE", "Entrant", "entrants", "length"]

#: Whose loss at the end of the budget is the target of all.
REFERENCE = "adamw"
#: These decay the weights themselves, others add the decay to the gradient.
DECOUPLED = ("adamw", "muon", "soap")


@dataclass(frozen=True)
class Entrant:
    """A method in a race.

    Args:
        name: On the command line and in records.
        label: In tables and pictures.
        optimizer: Key of `methods.OPTIMIZERS`.
        conditioning: Key of `methods.CONDITIONINGS`.
    """

    name: str
    label: str
    optimizer: str
    conditioning: str = "none"

    @property
    def ours(self) -> bool:
        """Whether this library conditions its gradient."""
        return self.conditioning not in ("none", "formula")

    def space(self, course: Course) -> dict[str, Range]:
        """What is tuned, with its range: the learning rate, and one number more where the method has one.

        Where ISAAC's damping is the second number of Muon, the learning rate of AdamW beside it moves with Muon's.
        """
        key = self.optimizer if self.conditioning == "none" else f"isaac-{self.optimizer}"
        found = {"learning_rate": course.rates.get(key) or course.rates[self.optimizer]}
        if self.conditioning != "none":
            found["damping"] = course.dampings
        elif self.optimizer == "muon":
            found["second_rate"] = course.second_rates
        elif methods.OPTIMIZERS[self.optimizer].damped:
            found["damping"] = SINGD_DAMPINGS if self.optimizer == "singd" else course.dampings
        return found

    def trial(self, course: Course, scale: Scale, places: tuple[float, ...], *, steps: int, seed: int) -> Trial:
        """A run with the settings at these places of the ranges, in the order of `space`."""
        settings: dict[str, Any] = {
            name: found.at(place) for (name, found), place in zip(self.space(course).items(), places, strict=True)
        }
        if self.optimizer == "muon" and "second_rate" not in settings:
            settings["second_rate"] = course.second_rates.at(places[0])
        return Trial(
            course.workload,
            self.optimizer,
            self.conditioning,
            **settings,
            relative=course.relative and self.ours,
            weight_decay=course.decoupled if self.optimizer in DECOUPLED else course.decay,
            schedule=course.schedule,
            steps=steps,
            points=min(scale.points, course.most_points),
            seed=seed,
            small=scale.small,
        )


def entrants(course: Course) -> tuple[Entrant, ...]:
    """All of a workload, also those that cannot run there."""
    titles = {name: optimizer.title for name, optimizer in methods.OPTIMIZERS.items() if name != "adam"}
    rivals = [Entrant(name, title, name) for name, title in titles.items()]
    formula = Entrant("formula", "Authors' formula", "sgd", "formula")
    bases = {"sgd": "SGD", "momentum": "SGD + momentum", "adamw": "AdamW", "muon": "Muon"}
    ours = [Entrant(f"isaac-{base}", f"{title} + ISAAC", base, course.conditioning) for base, title in bases.items()]
    if course.running:
        # A language model's conditioner of one batch is noisy; those of these two optimizers are what is used there.
        ours += [
            Entrant(f"isaac-{base}-running", f"{bases[base]} + ISAAC, running", base, "running") for base in ("adamw", "muon")
        ]
    return (*rivals, formula, *ours)


def length(course: Course, scale: Scale, epoch: int) -> int:
    """Steps of a run, where an epoch has so many."""
    return course.lengths[scale.name] * (epoch if course.unit == "epochs" else 1)
