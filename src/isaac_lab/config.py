"""What one training run is: every choice that its numbers depend on, in one frozen object that is also a TOML file."""

import functools
import hashlib
import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

__all__ = ["Config", "ConfigError"]

_CHOICES = {
    "task": ("classification", "autoencoder"),
    "optimizer": ("sgd", "momentum", "adam"),
    "curvature": ("sampled", "empirical"),
}
_LOWEST = {"batch": 1, "epochs": 1, "seed": 0, "examples": 0}
_WORDS = {"true": True, "false": False}


class ConfigError(ValueError):
    """A configuration that does not fit; the message names the field and what would be right."""


@dataclass(frozen=True)
class Config:
    """One training run.

    Args:
        data: Name of the data set: "mnist", "fashion-mnist" or "digits".
        task: "classification", or "autoencoder": mean squared error to the input, and no accuracy.
        hidden: Sizes of the layers between input and output.
        batch: Examples of a step. An incomplete last batch is dropped.
        epochs: Passes over the training examples.
        optimizer: "sgd", "momentum" (SGD with 0.9) or "adam".
        learning_rate: Of the optimizer.
        damping: λ_a; `inf` for no conditioning by inputs.
        output_damping: λ_g; `inf` for ζ*.
        curvature: Where ḡ comes from: labels "sampled" from the model, or the "empirical" Fisher (Remark 4). Without a finite
            `output_damping` there is no ḡ.
        kfac: Form both Kronecker factors and solve with them, as K-FAC is done elsewhere. Equal to ζ with both dampings alike,
            and scaled like it, so that learning rates compare.
        layers: Numbers (from 1) of the linear layers that are conditioned; none for all.
        seed: Of the weights, the order of the data, and the labels drawn.
        examples: So many training examples, the same for every seed; 0 for all.
    """

    data: str = "mnist"
    task: str = "classification"
    hidden: tuple[int, ...] = (400, 400, 400, 400)
    batch: int = 60
    epochs: int = 40
    optimizer: str = "sgd"
    learning_rate: float = 0.1
    damping: float = math.inf
    output_damping: float = math.inf
    curvature: str = "sampled"
    kfac: bool = False
    layers: tuple[int, ...] = ()
    seed: int = 0
    examples: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = _of_type(field.name, _type(field.name), getattr(self, field.name))
            object.__setattr__(self, field.name, value)
        if not re.fullmatch(r"[A-Za-z0-9_-]+", self.data):
            raise ConfigError(f"data must be the name of a data set, such as mnist or digits, got {self.data!r}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        for name, lowest in _LOWEST.items():
            if getattr(self, name) < lowest:
                raise ConfigError(f"{name} must be >= {lowest}, got {getattr(self, name)}")
        if not 0 < self.learning_rate < math.inf:
            raise ConfigError(f"learning_rate must be > 0 and finite, got {self.learning_rate}")
        for name in ("damping", "output_damping"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be > 0, got {getattr(self, name)}; inf conditions nothing")
        if not self.hidden or min(self.hidden) < 1:
            raise ConfigError(f"hidden must be sizes >= 1 of at least one layer, such as 400,400, got {self.hidden}")
        count = len(self.hidden) + 1
        if len(set(self.layers)) != len(self.layers) or not set(self.layers) <= set(range(1, count + 1)):
            raise ConfigError(f"layers must be different numbers from 1 to {count}, got {self.layers}")
        object.__setattr__(self, "layers", tuple(sorted(self.layers)))
        if self.kfac and (self.damping != self.output_damping or self.damping == math.inf):
            raise ConfigError(
                "kfac needs damping and output_damping to be one finite number, "
                f"got damping={self.damping} and output_damping={self.output_damping}"
            )

    @property
    def sector(self) -> str:
        """Which of the paper's three methods: "gradient", "zeta_star" or "zeta"; each sector has its own learning rate."""
        if self.output_damping != math.inf:
            return "zeta"
        return "gradient" if self.damping == math.inf else "zeta_star"

    @property
    def draws(self) -> bool:
        """Whether a step needs labels drawn from the model."""
        return self.sector == "zeta" and self.curvature == "sampled"

    @property
    def key(self) -> str:
        """The name of the run: a hash of all that makes a difference."""
        known = asdict(self if self.sector == "zeta" else replace(self, curvature="sampled"))
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:12]

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "Config":
        """From fields by name; those that are not there keep their defaults."""
        known: dict[str, Any] = {}
        for name, value in values.items():
            _type(name)
            known[name] = tuple(value) if isinstance(value, list) else value
        return cls(**known)

    @classmethod
    def from_toml(cls, text: str) -> "Config":
        """What `to_toml` wrote, or a part of it."""
        try:
            values = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"not a TOML file: {error}") from None
        return cls.from_mapping(values)

    def to_toml(self) -> str:
        """One line for each field."""
        return "".join(f"{name} = {_toml(value)}\n" for name, value in asdict(self).items())

    def with_settings(self, settings: Iterable[str]) -> "Config":
        """Changed by "field=value" as they come from a command line: `damping=inf`, `hidden=100,100`, `kfac=true`."""
        values: dict[str, Any] = {}
        for setting in settings:
            name, equals, text = (part.strip() for part in setting.partition("="))
            if not equals:
                raise ConfigError(f"a setting is field=value, such as damping=0.1, got {setting!r}")
            values[name] = _parse(name, _type(name), text)
        return replace(self, **values)


def _type(name: str) -> type:
    """The type of a field, told by its default."""
    known = _types()
    if name not in known:
        raise ConfigError(f"there is no field {name!r}; there are {', '.join(known)}")
    return known[name]


@functools.cache
def _types() -> Mapping[str, type]:
    return {field.name: type(field.default) for field in fields(Config)}


def _of_type(name: str, kind: type, value: Any) -> Any:
    """`value`, where it is one of the field's; whole numbers are numbers, but truth values are not."""
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    if kind is tuple and fits:
        fits = all(isinstance(item, int) and not isinstance(item, bool) for item in value)
    if not fits:
        words = {str: "a word", int: "a whole number", float: "a number", bool: "true or false", tuple: "whole numbers"}
        raise ConfigError(f"{name} must be {words[kind]}, got {value!r}")
    return value


def _parse(name: str, kind: type, text: str) -> Any:
    try:
        if kind is bool:
            return _WORDS[text.lower()]
        if kind is tuple:
            return tuple(int(item) for item in text.strip("()[]").split(",") if item.strip())
        return kind(text)
    except (KeyError, ValueError):
        return _of_type(name, kind, text)


def _toml(value: str | float | tuple[int, ...]) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    # `repr` of a float is its shortest form that reads back the same; infinity is `inf` in TOML too.
    return f'"{value}"' if isinstance(value, str) else repr(value)
