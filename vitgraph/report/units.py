"""Turns figures into text: units, signs, and what stands for a figure that was not measured."""

from __future__ import annotations

import math
from typing import Any

NOT_MEASURED = "not measured"
NO_VALUE = "–"

_MEBIBYTE, _GIBIBYTE = 2**20, 2**30


def is_number(value: Any) -> bool:
    """True for what was measured, also where it is not finite; False for None and anything else."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def number_text(value: Any, decimals: int) -> str:
    """A number with fixed decimals, `nan` and `inf` by name, a dash for no number."""
    if not is_number(value):
        return NO_VALUE
    # The zero turns a negative zero, as -0.04 rounds to, into a plain one.
    return f"{round(value, decimals) + 0.0:.{decimals}f}" if math.isfinite(value) else str(value)


def ms_text(value: Any) -> str:
    """Milliseconds without their unit: two decimals, three below one."""
    return number_text(value, 3 if is_number(value) and abs(value) < 0.995 else 2)


def signed_pct_text(value: Any) -> str:
    """Percent with its sign and one decimal."""
    if not is_number(value) or not math.isfinite(value):
        return NO_VALUE
    return f"{round(value, 1) + 0.0:+.1f}%"


def share_text(value: Any) -> str:
    """A share between 0 and 1 in percent with one decimal."""
    return f"{number_text(100 * value, 1)}%" if is_number(value) else NO_VALUE


def ratio_text(value: Any) -> str:
    """A factor with two decimals and its sign."""
    return f"{number_text(value, 2)}×" if is_number(value) else NO_VALUE


def bytes_text(value: Any) -> str:
    """Bytes in the binary unit that suits them."""
    if not is_number(value):
        return NO_VALUE
    if value < _MEBIBYTE:
        return f"{value / 2**10:.1f} KiB"
    return f"{value / _MEBIBYTE:.1f} MiB" if value < _GIBIBYTE else f"{value / _GIBIBYTE:.2f} GiB"


def count_text(number: int, noun: str) -> str:
    """A number and its noun, in the plural but for one."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
