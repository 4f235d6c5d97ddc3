"""How figures and names become text, in tables, facts and sentences alike; named by what they are of."""

from __future__ import annotations

import math
import shlex
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

NOT_MEASURED = "not measured"
WITHIN_NOISE = "within noise"
NO_VALUE = "–"
_MEBIBYTE, _GIBIBYTE = 2**20, 2**30
_HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def clean(text: object) -> str:
    """Text in which control characters and bidirectional marks are visible escapes; a line break is a space.

    Names come from users and checkpoints; what a terminal or a page would obey must not reach it.
    """
    return "".join(
        " "
        if character in "\n\t"
        else character
        if unicodedata.category(character) not in _HIDDEN_CATEGORIES
        else character.encode("unicode_escape", "backslashreplace").decode("ascii")
        for character in str(text)
    )


def is_number(value: Any) -> bool:
    """True for what was measured, also where it is not finite; False for None and anything else."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def number(value: Any, decimals: int) -> str:
    """A number with fixed decimals, `nan` and `inf` by name, a dash for no number."""
    if not is_number(value):
        return NO_VALUE
    # The zero turns a negative zero, as -0.04 rounds to, into a plain one.
    return f"{round(value, decimals) + 0.0:.{decimals}f}" if math.isfinite(value) else str(value)


def ms(value: Any) -> str:
    """Milliseconds without their unit: two decimals, three below one."""
    return number(value, 3 if is_number(value) and abs(value) < 0.995 else 2)


def short(value: float) -> str:
    """A figure for a label: two decimals, one from a hundred on, none from a thousand."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def pct(value: Any) -> str:
    """Percent with its sign and one decimal."""
    if not is_number(value) or not math.isfinite(value):
        return NO_VALUE
    return f"{round(value, 1) + 0.0:+.1f}%"


def share(value: Any) -> str:
    """A share between 0 and 1 in percent with one decimal."""
    return f"{number(100 * value, 1)}%" if is_number(value) else NO_VALUE


def ratio(value: Any) -> str:
    """A factor with two decimals and its sign."""
    return f"{number(value, 2)}×" if is_number(value) else NO_VALUE


def gap(value: Any) -> str:
    """A launch gap; wall time cannot be below the GPU-busy time in it, so what is below 1 was not told from noise."""
    return WITHIN_NOISE if is_number(value) and value < 1.0 else ratio(value)


def size(value: Any) -> str:
    """Bytes in the binary unit that suits them."""
    if not is_number(value):
        return NO_VALUE
    if value < _MEBIBYTE:
        return f"{value / 2**10:.1f} KiB"
    return f"{value / _MEBIBYTE:.1f} MiB" if value < _GIBIBYTE else f"{value / _GIBIBYTE:.2f} GiB"


def error(value: Any) -> str:
    """A relative distance, in scientific notation; one that is not finite by name."""
    return f"{value:.1e}" if is_number(value) else NO_VALUE if value is None else str(value)


def count(number: int, noun: str, plural: str = "") -> str:
    """A number and its noun, in the plural but for one."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def words(name: object) -> str:
    """A name of a record, as `too_many_tokens`, in words."""
    return str(name).replace("_", " ")


def joined(*parts: object, by: str = ", ") -> str:
    """Those of the parts that say something."""
    return by.join(str(part) for part in parts if part and part != NO_VALUE)


def change(*values: Any, text: Callable[[Any], str] = ms) -> str:
    """Values of one thing one after the other: `5.13→4.52`."""
    return "→".join(map(text, values))


def path(name: str) -> str:
    """The path of an encoder before what is of it; empty for the only one of most encoders."""
    return "" if name == "default" else f"{name} "


def sentence(text: str) -> str:
    """Text that ends with a full stop and starts with a capital, but for a name with capitals of its own, as vLLM."""
    start = text[:1].upper() if text.partition(" ")[0].islower() else text[:1]
    return f"{start}{text[1:]}{'' if text.endswith(('.', '!', '?')) else '.'}" if text else ""


def command(command: Sequence[str]) -> str:
    """A command as a shell takes it, one option a line."""
    before = {True: " \\\n  ", False: " "}
    return "".join(before[word.startswith("--")] + shlex.quote(word) for word in command).removeprefix(" ")


def interval(ci95: Sequence[float] | None) -> str:
    """The ends of a 95 % interval of an improvement: `+1.8 … +2.4%`; empty where there is none."""
    if ci95 is None:
        return ""
    low, high = (pct(end) for end in ci95)
    return f"{low.removesuffix('%')} … {high}"


def ci95(found: Sequence[float] | None, before: str = "") -> str:
    """The interval with its name, behind what goes before it: `95% CI +1.8 … +2.4%`; empty where there is none."""
    return f"{before}95% CI {interval(found)}" if found else ""


def budgets(budgets: Mapping[str, Sequence[int]] | Sequence[int]) -> str:
    """Token budgets of the paths on one line; a single path goes without its name."""
    by_path = budgets if isinstance(budgets, Mapping) else {"default": budgets}
    is_named = list(by_path) != ["default"]
    return "; ".join(f"{f'{path}: ' if is_named else ''}{' '.join(map(str, of))}" for path, of in by_path.items())
