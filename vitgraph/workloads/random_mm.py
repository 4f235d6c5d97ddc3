"""Random requests drawn from size buckets, with the options and the meaning of vLLM's `random-mm` data set."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from vitgraph.errors import InputError, UsageError
from vitgraph.specs.parts import WorkloadSpec
from vitgraph.specs.values import LIMIT_EXAMPLE, LIMIT_OPTION, parse_buckets, parse_limits
from vitgraph.workloads.base import IMAGE, VIDEO, MediaItem, Workload, number_requests

# vLLM writes its random videos as files of this rate, so a loader that samples by time keeps few of their frames.
VIDEO_FILE_FPS = 30.0

MOST_DRAWN = 10**7
"""Items of a whole workload; each is an object of its own in memory."""


@dataclass(frozen=True)
class DrawRule:
    """What a request is drawn from, after all checks.

    Attributes:
        max_items: Most items of a request, cut at the summed limits.
        sizes: (height, width, frames) of the buckets that can be drawn; their probabilities sum to 1.
        limits: Most items of a request by modality.
    """

    min_items: int
    max_items: int
    sizes: tuple[tuple[int, int, int], ...]
    probabilities: tuple[float, ...]
    limits: dict[str, int]


def resolve_draw_rule(spec: WorkloadSpec) -> DrawRule:
    """Turns the random-mm options into what requests are drawn from, as vLLM does.

    The count of items is uniform in [floor(n * (1 - r)), ceil(n * (1 + r))] for n base items and range ratio r; its
    upper bound is cut to the sum of the limits of the modalities whose buckets have positive probability. Every bucket,
    also one of probability 0, needs a limit for its modality.

    Raises:
        UsageError: If an option is out of range, a modality has no limit, or the limits are below the lower bound.
    """
    base, ratio = spec.random_mm_base_items_per_request, spec.random_mm_num_mm_items_range_ratio
    if not isinstance(ratio, int | float) or isinstance(ratio, bool) or not 0 <= ratio <= 1:
        raise UsageError(
            f"--random-mm-num-mm-items-range-ratio is {ratio!r}; it must be a number from 0 to 1, for example 0.5"
        )
    buckets = parse_buckets(spec.random_mm_bucket_config)
    limits = parse_limits(spec.random_mm_limit_mm_per_prompt)
    for size in buckets:
        if _modality(size) not in limits:
            raise UsageError(
                f"{LIMIT_OPTION} names {sorted(limits)}, but bucket {size} is of modality {_modality(size)!r}; every "
                f"bucket needs a limit, also one of probability 0, for example {LIMIT_EXAMPLE}"
            )
    largest = max(buckets.values())  # divided by first, so that no sum of finite probabilities overflows
    total = math.fsum(probability / largest for probability in buckets.values())
    drawable = {size: probability / largest / total for size, probability in buckets.items() if probability > 0}
    used_limits = {modality: limits[modality] for modality in sorted({_modality(size) for size in drawable})}
    # The same floating-point expressions as upstream: 100 items with ratio 0.1 give up to 111, as 100 * 1.1 > 110.
    min_items = max(0, math.floor(base * (1 - ratio)))
    max_items = min(sum(used_limits.values()), math.ceil(base * (1 + ratio)))
    if min_items > max_items:
        raise UsageError(
            f"at least {min_items} items a request are asked for ({base} base items, range ratio {ratio}), but the "
            f"limits {used_limits} allow {max_items}; raise {LIMIT_OPTION} or lower "
            "--random-mm-base-items-per-request"
        )
    if spec.num_prompts * max_items > MOST_DRAWN:
        raise UsageError(
            f"--num-prompts is {spec.num_prompts} with up to {max_items} items a request; at most {MOST_DRAWN:,} items "
            "are drawn. Lower --num-prompts or --random-mm-base-items-per-request"
        )
    return DrawRule(min_items, max_items, tuple(drawable), tuple(drawable.values()), used_limits)


def build_random_mm(spec: WorkloadSpec) -> Workload:
    """Draws a workload of random sizes; a range ratio of 1 can give requests without items.

    Item counts and sizes follow the same distributions as vLLM's, **not** the same draws: vLLM takes text lengths and
    pixels from the generator that also takes the sizes, so the same seed gives other requests there. Here sizes alone
    consume the generator, so a changed bucket size leaves every other draw as it was. Videos are files of 30 frames a
    second, as upstream, and a model's loader still samples them. Warm-ups are drawn with the next seed.

    Raises:
        UsageError: If an option cannot be used, see `resolve_draw_rule`.
        InputError: If no measured request has an item.
    """
    rule = resolve_draw_rule(spec)
    workload = Workload(
        name="random-mm",
        requests=number_requests(_draw_groups(rule, spec.num_prompts, spec.seed, "random-mm")),
        warmups=number_requests(_draw_groups(rule, spec.num_warmups, spec.seed + 1, "random-mm-warmup")),
        provenance={
            "dataset": "random-mm",
            "seed": spec.seed,
            "warmups": f"drawn with seed {spec.seed + 1}",
            "min_items_per_request": rule.min_items,
            "max_items_per_request": rule.max_items,
            "limit_mm_per_prompt": json.dumps(rule.limits),
            "bucket_config": json.dumps(
                {
                    "x".join(map(str, size)): probability
                    for size, probability in zip(rule.sizes, rule.probabilities, strict=True)
                }
            ),
            "bucket_key_order": "height x width x frames",
            "video_fps": VIDEO_FILE_FPS if VIDEO in rule.limits else None,
        },
    )
    if workload.num_items == 0:
        raise InputError(
            f"none of the {spec.num_prompts} requests drew an item (0 to {rule.max_items} items a request); raise "
            "--num-prompts or lower --random-mm-num-mm-items-range-ratio below 1"
        )
    return workload


def _draw_groups(rule: DrawRule, num_requests: int, seed: int, source: str) -> list[tuple[MediaItem, ...]]:
    rng = np.random.default_rng(seed)
    groups = []
    for index in range(num_requests):
        count = int(rng.integers(rule.min_items, rule.max_items + 1))
        sizes = _draw_sizes(rule, count, rng)
        groups.append(
            tuple(
                MediaItem(
                    width=width, height=height, frames=frames, fps=VIDEO_FILE_FPS, source=f"{source}:{index}.{position}"
                )
                for position, (height, width, frames) in enumerate(sizes)
            )
        )
    return groups


def _draw_sizes(rule: DrawRule, count: int, rng: np.random.Generator) -> list[tuple[int, int, int]]:
    left = dict(rule.limits)
    cumulative = _cumulative(rule, left)
    sizes: list[tuple[int, int, int]] = []
    while len(sizes) < count:
        # A product that rounds up to the total would lie beyond the last bucket.
        point = min(rng.random() * cumulative[-1], np.nextafter(cumulative[-1], 0.0))
        size = rule.sizes[int(np.searchsorted(cumulative, point, side="right"))]
        sizes.append(size)
        left[_modality(size)] -= 1
        if left[_modality(size)] == 0 and len(sizes) < count:
            cumulative = _cumulative(rule, left)
    return sizes


def _cumulative(rule: DrawRule, left: Mapping[str, int]) -> np.ndarray:
    """Running sums of the probabilities, without those of modalities that are used up in this request."""
    weights = [
        probability if left[_modality(size)] > 0 else 0.0
        for size, probability in zip(rule.sizes, rule.probabilities, strict=True)
    ]
    return np.cumsum(weights)


def _modality(size: tuple[int, int, int]) -> str:
    return IMAGE if size[2] == 1 else VIDEO
