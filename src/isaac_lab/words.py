"""Numbers as charts, tables and pages write them."""

import math
from collections.abc import Mapping
from typing import Any

#: What rounding leaves of equal numbers.
NOTHING = 1e-12


def number(value: float | None, digits: int = 3) -> str:
    """So many significant digits; thousands are grouped, and only what is very small has an exponent."""
    if value is None or not math.isfinite(value):
        return "–"
    if abs(value) < NOTHING:
        return "0"
    if abs(value) < 1e-4:
        return f"{value:.{digits}g}"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    text = f"{value:#.{digits}g}"
    return text.rstrip(".")


def damping(value: float) -> str:
    """λ, of which infinity is the plain gradient."""
    return "∞" if value == math.inf else f"{value:g}"


def versions_of(record: Mapping[str, Any]) -> str:
    """Of the packages that were installed where a record was made."""
    return ", ".join(f"{name} {version}" for name, version in (record.get("versions") or {}).items() if version)
