"""What a workload is made of: sizes, items a request, and the tokens that models make of them. Needs no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vitgraph.errors import InputError
from vitgraph.workloads.base import Workload

if TYPE_CHECKING:
    from vitgraph.models.geometry import GeometryRule

Numbers = Sequence[int] | Sequence[float] | npt.NDArray[Any]

PERCENTILES = (5, 25, 50, 75, 95, 99)
COMMON_SIZES = 10
HISTOGRAM_BINS = 16
_LOG_SPAN = 4.0


@dataclass(frozen=True, slots=True)
class WorkloadFacts:
    """What a workload is made of.

    Attributes:
        facts: Plain values, for `--json` and for the tables.
        sizes: How many items have each (width, height, frames).
        tokens: By model, output tokens of each item that it takes, in order.
    """

    facts: Mapping[str, Any]
    sizes: Mapping[tuple[int, int, int], int]
    tokens: Mapping[str, Sequence[int]]


def inspect_workload(workload: Workload, rules: Mapping[str, tuple[str, GeometryRule]]) -> WorkloadFacts:
    """Counts the sizes of a workload, its warm-ups left out, and the tokens that models make of them.

    Args:
        workload: The requests.
        rules: For each model's name, its row and its size rule.
    """
    items = [item for request in workload.requests for item in request.items]
    found = Counter((item.width, item.height, item.frames) for item in items)
    sizes = np.array([*found], dtype=np.int64).reshape(-1, 3)
    width, height, frames = np.repeat(sizes, np.fromiter(found.values(), int), axis=0).T
    images = int((frames == 1).sum())
    models = {name: _model_facts(workload, rule) for name, (_, rule) in rules.items()}
    facts = {
        "name": workload.name,
        "fingerprint": workload.fingerprint(),
        "requests": len(workload.requests),
        "items": len(items),
        "images": images,
        "videos": len(items) - images,
        "skipped": [{"source": item.source, "reason": item.reason} for item in workload.skipped],
        "provenance": dict(workload.provenance),
        "items_per_request": describe_numbers([len(request.items) for request in workload.requests]),
        "width": describe_numbers(width),
        "height": describe_numbers(height),
        "megapixels": describe_numbers(width * height / 1e6),
        "aspect_ratio": describe_numbers(width / height),
        "frames_per_video": describe_numbers(frames[frames > 1]),
        "distinct_sizes": len(found),
        "common_sizes": [
            {"width": width, "height": height, "frames": frames, "items": count, "share": count / len(items)}
            for (width, height, frames), count in found.most_common(COMMON_SIZES)
        ],
        "models": [{"model": name, "row": rules[name][0], **own} for name, (own, _) in models.items()],
    }
    return WorkloadFacts(facts, found, {name: tokens for name, (_, tokens) in models.items()})


def _model_facts(workload: Workload, rule: GeometryRule) -> tuple[dict[str, Any], list[int]]:
    """What one model's size rule makes of a workload's items, those that its processor refuses by the reason, and the
    tokens of each."""
    tokens: list[int] = []
    segments: list[int] = []
    per_request: list[int] = []
    refused: Counter[str] = Counter()

    @cache
    def measure(width: int, height: int, frames: int, fps: float | None) -> tuple[int, int] | str:
        try:
            spec = rule.item_spec(rule.geometry(width, height, frames, fps))
        except InputError as error:
            return str(error)
        return spec.output_tokens, spec.segments

    for request in workload.requests:
        found = [measure(item.width, item.height, item.frames, item.fps) for item in request.items]
        taken = [each for each in found if not isinstance(each, str)]
        refused.update(each for each in found if isinstance(each, str))
        tokens += [count for count, _ in taken]
        segments += [count for _, count in taken]
        if any(count for count, _ in taken):
            per_request.append(sum(count for count, _ in taken))
    facts = {
        "tokens_per_item": describe_numbers(tokens),
        "tokens_per_request": describe_numbers(per_request),
        "segments_per_item": describe_numbers(segments),
        "distinct_tokens": len(set(tokens)),
        "common_tokens": common_values(tokens),
        "histogram": histogram(tokens),
        "refused": dict(refused.most_common()),
    }
    return facts, tokens


def describe_numbers(values: Numbers) -> dict[str, float | int | None]:
    """Count, least, mean, percentiles (linear between neighbours) and most of a series; None without values."""
    array = np.asarray(values, dtype=np.float64)
    names = ("min", "mean", *(f"p{q}" for q in PERCENTILES), "max")
    if not array.size:
        return {"n": 0, **dict.fromkeys(names)}
    figures = (array.min(), array.mean(), *np.percentile(array, PERCENTILES), array.max())
    return {"n": int(array.size), **{name: float(figure) for name, figure in zip(names, figures, strict=True)}}


def common_values(values: Iterable[int]) -> list[dict[str, float | int]]:
    """The values that occur most, each with its count and its share."""
    counts = Counter(values)
    total = counts.total()
    ordered = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[:COMMON_SIZES]
    return [{"tokens": value, "items": count, "share": count / total} for value, count in ordered]


def histogram(values: Sequence[int], bins: int = HISTOGRAM_BINS) -> list[dict[str, int]]:
    """Counts of whole numbers between rounded bounds.

    Few distinct values have a bin each. Else bounds grow by a constant factor where the values span a factor of four
    or more, and by a constant step where they do not; bins without values are kept.

    Returns:
        One entry a bin, `low` and `high` both included.
    """
    distinct = sorted(set(values))
    if len(distinct) <= bins:
        found = Counter(values)
        return [{"low": value, "high": value, "items": found[value]} for value in distinct]
    low, high = min(values), max(values)
    if low > 0 and high >= _LOG_SPAN * low:
        bounds = [low * (high / low) ** (step / bins) for step in range(1, bins)]
    else:
        bounds = [low + (high + 1 - low) * step / bins for step in range(1, bins)]
    edges = sorted({low, *(math.ceil(bound) for bound in bounds), high + 1})
    counts, _ = np.histogram(values, bins=edges)
    return [
        {"low": first, "high": following - 1, "items": int(count)}
        for first, following, count in zip(edges[:-1], edges[1:], counts, strict=True)
    ]
