"""The checker behind the shape annotations: beartype on shapes alone. For the rest the library has errors of its own."""

import functools
from collections.abc import Callable
from typing import Any, get_args

import torch
from beartype import BeartypeConf, beartype
from jaxtyping import AbstractArray, config

_beartype = beartype(conf=BeartypeConf(is_pep484_tower=True))


def checker(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check the arguments and results whose annotation has a shape in it."""
    hints = getattr(function, "__annotations__", {})
    function.__annotations__ = {name: hint for name, hint in hints.items() if _has_shape(hint)}
    checked = _beartype(function)

    @functools.wraps(function)
    def outside_of_the_compiler(*args: Any, **kwargs: Any) -> Any:
        # It reads the code of the checks too, and gets the shapes wrong.
        return (function if torch.compiler.is_compiling() else checked)(*args, **kwargs)

    return outside_of_the_compiler


class _Config(type(config)):  # type: ignore[misc]
    """That of jaxtyping: it notes shapes in lists of its own, which the compiler may not change."""

    jaxtyping_disable = property(lambda self: torch.compiler.is_compiling())


vars(config).pop("jaxtyping_disable")
config.__class__ = _Config


def _has_shape(hint: object) -> bool:
    return (isinstance(hint, type) and issubclass(hint, AbstractArray)) or any(map(_has_shape, get_args(hint)))
