"""Arguments that cannot be meant are refused, with what they are and what they may be."""

from typing import get_args

from torch import Tensor, nn

__all__ = ["check_choice", "check_count", "check_flag", "check_module", "check_share", "check_tensors"]


def check_choice(name: str, value: object, choices: object) -> None:
    """Refuse a value that is not one of a `Literal`'s."""
    allowed = get_args(choices)
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def check_flag(name: str, value: object) -> None:
    """Refuse what is neither True nor False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def check_count(name: str, value: object, least: int = 1) -> int:
    """Refuse what is not a whole number of at least so much."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number >= {least}, got {value!r}")
    return value


def check_share(name: str, value: object, *, below_one: bool = False) -> None:
    """Refuse what is no number between 0 and 1."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not (0 <= value < 1 if below_one else 0 <= value <= 1):
        raise ValueError(f"{name} must be at least 0 and {'below' if below_one else 'at most'} 1, got {value}")


def check_module(model: object) -> None:
    """Refuse what is no model."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")


def check_tensors(weight: object, bias: object, input: object) -> None:
    """Refuse what is no weight, bias or input of a layer."""
    for name, value in (("weight", weight), ("bias", bias), ("input", input)):
        if not isinstance(value, Tensor) and not (name == "bias" and value is None):
            raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if isinstance(weight, Tensor) and weight.is_complex():
        raise TypeError(f"weight must be real, got {weight.dtype}: conditioners are made from real inputs")
