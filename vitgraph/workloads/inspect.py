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
class ModelTokens:
    """What one model makes of the items of a workload.

    Attributes:
        model: Preset, hub id or folder.
        row: Row of the model table.
        tokens_per_item: Output tokens of each item that the model takes, in order.
        tokens_per_request: Output tokens of each request that has such an item.
        segments_per_item: Attention segments of each item.
        refused: How many items the model's processor does not take, by its reason.
    """

    model: str
    row: str
    tokens_per_item: tuple[int, ...]
    tokens_per_request: tuple[int, ...]
    segments_per_item: tuple[int, ...]
    refused: Mapping[str, int]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, with percentiles in place of the items."""
        return {
            "model": self.model,
            "row": self.row,
            "tokens_per_item": describe_numbers(self.tokens_per_item),
            "tokens_per_request": describe_numbers(self.tokens_per_request),
            "segments_per_item": describe_numbers(self.segments_per_item),
            "distinct_tokens": len(set(self.tokens_per_item)),
            "common_tokens": common_values(self.tokens_per_item),
            "histogram": histogram(self.tokens_per_item),
            "refused": dict(self.refused),
        }


@dataclass(frozen=True, slots=True)
class WorkloadFacts:
    """What a workload is made of.

    Attributes:
        workload: The requests.
        sizes: How many items have each (width, height, frames).
        models: Tokens by model.
    """

    workload: Workload
    sizes: Mapping[tuple[int, int, int], int]
    models: tuple[ModelTokens, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for `--json` and for the table."""
        items = self.workload.num_items
        sizes = np.array([*self.sizes], dtype=np.int64).reshape(-1, 3)
        width, height, frames = np.repeat(sizes, np.fromiter(self.sizes.values(), int), axis=0).T
        images = int((frames == 1).sum())
        return {
            "name": self.workload.name,
            "fingerprint": self.workload.fingerprint(),
            "requests": len(self.workload.requests),
            "items": items,
            "images": images,
            "videos": items - images,
            "skipped": [{"source": item.source, "reason": item.reason} for item in self.workload.skipped],
            "provenance": dict(self.workload.provenance),
            "items_per_request": describe_numbers([len(request.items) for request in self.workload.requests]),
            "width": describe_numbers(width),
            "height": describe_numbers(height),
            "megapixels": describe_numbers(width * height / 1e6),
            "aspect_ratio": describe_numbers(width / height),
            "frames_per_video": describe_numbers(frames[frames > 1]),
            "distinct_sizes": len(self.sizes),
            "common_sizes": [
                {"width": width, "height": height, "frames": frames, "items": count, "share": count / items}
                for (width, height, frames), count in Counter(self.sizes).most_common(COMMON_SIZES)
            ],
            "models": [model.as_dict() for model in self.models],
        }


def inspect_workload(workload: Workload, rules: Mapping[str, tuple[str, GeometryRule]]) -> WorkloadFacts:
    """Counts the sizes of a workload, its warm-ups left out, and the tokens that models make of them.

    Args:
        workload: The requests.
        rules: For each model's name, its row and its size rule.
    """
    items = [item for request in workload.requests for item in request.items]
    sizes = Counter((item.width, item.height, item.frames) for item in items)
    return WorkloadFacts(workload, sizes, tuple(count_tokens(workload, *pair, name) for name, pair in rules.items()))


def count_tokens(workload: Workload, row: str, rule: GeometryRule, model: str) -> ModelTokens:
    """Tokens and segments of a workload's items under one model's size rule."""
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
    return ModelTokens(model, row, tuple(tokens), tuple(per_request), tuple(segments), dict(refused.most_common()))


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
