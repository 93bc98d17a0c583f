"""How something is trained: the methods there are, what each takes, and what it is called; without torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from isaac_lab.records import installed
from isaac_lab.trial import Trial, TrialError


class UnableError(TrialError):
    """A method that cannot train this network; the message says why."""


@dataclass(frozen=True)
class Method:
    """An optimizer as the laboratory uses it."""

    title: str  # for tables and pictures
    takes: tuple[str, ...] = ()  # settings besides the learning rate
    package: str = "torch"  # the distribution that it comes from, and the module is called the same
    captured: bool = True  # whether a CUDA graph can hold its step
    stacks: bool = False  # whether an ensemble can train with it


METHODS: Mapping[str, Method] = {
    "sgd": Method("SGD", ("weight_decay",), stacks=True),
    "momentum": Method("SGD + momentum", ("decays", "momentum", "weight_decay"), stacks=True),
    "nesterov": Method("SGD + Nesterov", ("decays", "momentum", "weight_decay")),
    "adadelta": Method("Adadelta"),
    "adam": Method("Adam", ("weight_decay",), stacks=True),
    "adamw": Method("AdamW", ("beta2", "decays", "weight_decay")),
    "nadamw": Method("NadamW", ("beta2", "decays", "weight_decay")),
    "schedule-free": Method("Schedule-Free", ("beta2", "decays", "weight_decay")),
    "muon": Method("Muon + AdamW", ("decays", "second_rate", "weight_decay")),
    "soap": Method("SOAP", ("beta2", "decays", "weight_decay")),
    # It draws on the host when to renew its factors.
    "kron": Method("Kron-PSGD", ("decays", "momentum", "weight_decay"), "pytorch_optimizer", captured=False),
    # Its inverses read an error flag back from the device, which a CUDA graph cannot.
    "kfac": Method("K-FAC", ("curvature", "damping", "every", "layers", "momentum", "natural", "weight_decay"), captured=False),
}
#: Settings of the loop, which every method takes: the largest norm of the gradient, what a schedule needs, and after which of
#: the measured steps a picture of the network is kept.
SHARED = ("learning_rate", "clip", "drop", "drops", "floor", "frames", "warm_up")
#: Settings that are words, and which.
WORDS = {"curvature": ("sampled", "empirical"), "decays": ("all", "matrices")}
#: What may stand after a "+", and what it takes: ζ*, or ζ where there is an output damping; the line `isaac.attach(model)` with
#: nothing else; and FOOF.
CONDITIONINGS: Mapping[str, tuple[str, ...]] = {
    "isaac": ("curvature", "damping", "layers", "max_rows", "output_damping", "relative", "running", "sharing"),
    "line": (),
    "foof": ("damping", "sharing"),
}


def find(name: str) -> tuple[Method, str]:
    """The method, and how its gradient is conditioned: a key of `CONDITIONINGS` or ""."""
    base, plus, how = name.partition("+")
    if base not in METHODS or (plus and how not in CONDITIONINGS):
        words = " or ".join(f"+{known}" for known in CONDITIONINGS)
        raise TrialError(f"there is no method {name!r}; there are {', '.join(METHODS)}, alone or with {words}")
    return METHODS[base], how


def check(trial: Trial) -> None:
    """Refuse a setting that the method does not take."""
    method, how = find(trial.method)
    allowed = {*SHARED, *method.takes, *CONDITIONINGS.get(how, ())}
    for name, value in trial.settings:
        if name not in allowed:
            raise TrialError(f"{trial.method} takes no {name}; it takes {', '.join(sorted(allowed))}")
        if name in WORDS and value not in WORDS[name]:
            raise TrialError(f"{name} must be {' or '.join(WORDS[name])}, got {value!r}")


def capturable(trial: Trial) -> bool:
    """Whether the step can be a CUDA graph."""
    method, how = find(trial.method)
    # Rows are drawn on the host: a graph would keep the first draw, and cannot copy it to the device.
    # Who adds the line to a script has an eager step. What a running average does now and then, a graph would never do.
    return method.captured and how not in ("line", "foof") and not trial.get("running") and trial.get("max_rows") is None


def missing(trial: Trial) -> str:
    """What has to be installed for a run, or ""."""
    method, _ = find(trial.method)
    return "" if method.package == "torch" or installed(method.package) else f"{method.package} is not installed"
