"""What `auto` took for attention, and what the same calls would have cost with one backend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from vitgraph.records.sections import AttentionChoice

AUTO = "auto"


def costs_ms(choices: Iterable[AttentionChoice], is_graph: bool) -> dict[str, float]:
    """Attention time of a layer over the calls that were expected, in ms, the least first.

    Args:
        is_graph: Of the graphs' replays; else of calls run eagerly.

    Returns:
        By backend where it alone ran them all, and `auto` for the choices; empty where no calls were known.
    """
    timed = [one for one in choices if one.is_graph == is_graph and one.calls and one.milliseconds]
    if not timed:
        return {}
    able = set.intersection(*(set(one.milliseconds) for one in timed))
    totals = {name: sum(one.milliseconds[name] * one.calls for one in timed) for name in able}
    totals[AUTO] = sum(one.milliseconds[one.backend] * one.calls for one in timed)
    return dict(sorted(totals.items(), key=lambda pair: pair[1]))


def for_calls(choices: Iterable[AttentionChoice], rows: Mapping[int, int]) -> tuple[AttentionChoice, ...]:
    """The choices of graphs with the calls that each would have: a call goes to the smallest graph that holds it.

    Args:
        rows: How many calls there are, by their packed rows; those above the largest graph count as its own.
    """
    graphs = sorted((one for one in choices if one.is_graph and one.milliseconds), key=lambda one: one.rows)
    calls: Counter[int] = Counter()
    for height, count in rows.items():
        calls[next((place for place, one in enumerate(graphs) if one.rows >= height), len(graphs) - 1)] += count
    return tuple(one.model_copy(update={"calls": calls[place]}) for place, one in enumerate(graphs))


def best_alone(choices: Sequence[AttentionChoice]) -> str | None:
    """The backend that is fastest where an engine has one for all: over the graphs' replays, else over eager calls.

    Variants (`FLASH_ATTN:2`) are left out, as an engine's setting names none. None where nothing was timed.
    """
    costs = costs_ms(choices, is_graph=True) or costs_ms(choices, is_graph=False)
    return next((name for name in costs if name != AUTO and ":" not in name), None)


def choices_text(choices: Sequence[AttentionChoice]) -> str:
    """In a line: who takes which calls, and what each backend alone would have cost; empty without choices."""
    return "; ".join(filter(None, (_mode_text(choices, is_graph) for is_graph in (True, False))))


def _mode_text(choices: Sequence[AttentionChoice], is_graph: bool) -> str:
    rows: dict[str, list[int]] = {}
    for one in choices:
        if one.is_graph == is_graph:
            rows.setdefault(one.backend, []).append(one.rows)
    if not rows:
        return ""
    taken = ", ".join(f"{name} at {_span(of)} rows" for name, of in rows.items())
    costs = costs_ms(choices, is_graph)
    own = costs.pop(AUTO, 0.0)
    alone = ", ".join(f"{name} {cost / own:.2f}x" for name, cost in costs.items() if own)
    return f"{'graphs' if is_graph else 'eager calls'}: {taken}" + (f" (one backend alone: {alone})" if alone else "")


def _span(rows: Sequence[int]) -> str:
    low, high = min(rows), max(rows)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
