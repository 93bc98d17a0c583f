"""Torch's own code over a copy of its global names, some of which are ours: every form and corner case stays torch's."""

import types
from collections.abc import Callable
from typing import Any

__all__ = ["names_of", "over"]


def names_of(module: Any, **ours: Any) -> dict[str, Any]:
    """The global names of a module, with some replaced."""
    # Without a name of its own the compiler would look names up, and guard them, in the module that bears it.
    return {name: value for name, value in vars(module).items() if name != "__name__"} | ours


def over(function: Callable[..., Any], names: dict[str, Any]) -> Callable[..., Any]:
    """The same code, looking its global names up in `names`."""
    plain = function if isinstance(function, types.FunctionType) else function.__wrapped__  # type: ignore[attr-defined]
    copy = types.FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)
    copy.__kwdefaults__ = plain.__kwdefaults__
    return copy
