"""Random requests drawn from size buckets, with the options and the meaning of vLLM's `random-mm` data set."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitgraph.errors import InputError, UsageError
from vitgraph.specs import WorkloadSpec
from vitgraph.workloads.base import IMAGE, VIDEO, BucketConfig, MediaItem, Workload, is_int, number_requests

# vLLM writes its random videos as files of this rate, so a loader that samples by time keeps few of their frames.
VIDEO_FILE_FPS = 30.0

_BUCKET_OPTION = "--random-mm-bucket-config"
_BUCKET_EXAMPLE = "'{(336, 336, 1): 1.0}' or '{\"336x336x1\": 1.0}' (height, width, frames: probability)"
_LIMIT_OPTION = "--random-mm-limit-mm-per-prompt"
_LIMIT_EXAMPLE = '\'{"image": 3, "video": 0}\''
# vLLM takes audio limits too; they concern no item here, and a pasted limit must not fail for them.
_KNOWN_MODALITIES = (IMAGE, VIDEO, "audio")
_SIZE_TEXT = re.compile(r"\(?\s*(-?\d{1,9})\s*[x×,]\s*(-?\d{1,9})\s*[x×,]\s*(-?\d{1,9})\s*\)?")


@dataclass(frozen=True)
class DrawRule:
    """What a request is drawn from, after all checks.

    Attributes:
        min_items: Fewest items of a request.
        max_items: Most items of a request, cut at the summed limits.
        sizes: (height, width, frames) of the buckets that can be drawn.
        probabilities: Their probabilities, summing to 1.
        limits: Most items of a request by modality.
    """

    min_items: int
    max_items: int
    sizes: tuple[tuple[int, int, int], ...]
    probabilities: tuple[float, ...]
    limits: dict[str, int]


def parse_bucket_config(value: str | Mapping[Any, Any]) -> BucketConfig:
    """Reads size buckets from the spelling of a Python tuple literal or from JSON.

    Args:
        value: `{(336, 336, 1): 1.0}`, `{"(336, 336, 1)": 1.0}`, `{"336x336x1": 1.0}`, or such a mapping. The order is
            height, width, frames.

    Returns:
        Probability by (height, width, frames), as given: not scaled, zeros kept.

    Raises:
        UsageError: If the text is not such a mapping, a size is not three positive integers or occurs twice, or a
            probability is negative, not finite, or all are zero.
    """
    buckets: BucketConfig = {}
    for key, probability in _mapping_pairs(value, _BUCKET_OPTION, _BUCKET_EXAMPLE):
        size = _parse_size(key)
        if size in buckets:
            raise UsageError(f"{_BUCKET_OPTION}: size {size} is given twice; name each (height, width, frames) once")
        buckets[size] = probability
    _check_buckets(buckets)
    return {size: float(probability) for size, probability in buckets.items()}


def parse_limit_mm_per_prompt(value: str | Mapping[Any, Any]) -> dict[str, int]:
    """Reads the most items of each modality in a request.

    Args:
        value: `{"image": 3, "video": 0}` as text or as a mapping.

    Returns:
        Limit by modality.

    Raises:
        UsageError: If the text is no such mapping, a modality is unknown or named twice, or a limit is not an integer
            of at least 0.
    """
    limits: dict[str, int] = {}
    for key, limit in _mapping_pairs(value, _LIMIT_OPTION, _LIMIT_EXAMPLE):
        if key not in _KNOWN_MODALITIES:
            raise UsageError(
                f"{_LIMIT_OPTION}: unknown modality {key!r}; known are {', '.join(_KNOWN_MODALITIES)}, "
                f"for example {_LIMIT_EXAMPLE}"
            )
        if key in limits:
            raise UsageError(f"{_LIMIT_OPTION}: {key!r} is given twice; name each modality once")
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 0:
            raise UsageError(
                f"{_LIMIT_OPTION}: limit of {key!r} is {limit!r}; it must be an integer of at least 0, "
                f"for example {_LIMIT_EXAMPLE}"
            )
        limits[str(key)] = limit
    return limits


def resolve_draw_rule(spec: WorkloadSpec) -> DrawRule:
    """Turns the random-mm options into what requests are drawn from, as vLLM does.

    The count of items is uniform in [floor(n * (1 - r)), ceil(n * (1 + r))] for n base items and range ratio r; its
    upper bound is cut to the sum of the limits of the modalities whose buckets have positive probability. Every
    bucket, also one of probability 0, needs a limit for its modality.

    Args:
        spec: The options.

    Returns:
        The rule.

    Raises:
        UsageError: If an option is out of range, a modality has no limit, or the limits are below the lower bound.
    """
    base, ratio = spec.random_mm_base_items_per_request, spec.random_mm_num_mm_items_range_ratio
    if not is_int(base) or base < 1:
        raise UsageError(
            f"--random-mm-base-items-per-request is {base!r}; it must be a positive integer, for example 1"
        )
    if not isinstance(ratio, int | float) or isinstance(ratio, bool) or not 0 <= ratio <= 1:
        raise UsageError(
            f"--random-mm-num-mm-items-range-ratio is {ratio!r}; it must be a number from 0 to 1, for example 0.5"
        )
    buckets = parse_bucket_config(spec.random_mm_bucket_config)
    limits = parse_limit_mm_per_prompt(spec.random_mm_limit_mm_per_prompt)
    for size in buckets:
        if _modality(size) not in limits:
            raise UsageError(
                f"{_LIMIT_OPTION} names {sorted(limits)}, but bucket {size} is of modality {_modality(size)!r}; every "
                f"bucket needs a limit, also one of probability 0, for example {_LIMIT_EXAMPLE}"
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
            f"limits {used_limits} allow {max_items}; raise {_LIMIT_OPTION} or lower "
            "--random-mm-base-items-per-request"
        )
    return DrawRule(min_items, max_items, tuple(drawable), tuple(drawable.values()), used_limits)


def build_random_mm(spec: WorkloadSpec) -> Workload:
    """Draws a workload of random sizes.

    Item counts and sizes follow the same distributions as vLLM's, **not** the same draws: vLLM takes text lengths and
    pixels from the generator that also takes the sizes, so the same seed gives other requests there. Here sizes alone
    consume the generator, so a changed bucket size leaves every other draw as it was. Videos are files of 30 frames a
    second, as upstream, and a model's loader still samples them. Warm-ups are drawn with the next seed.

    Args:
        spec: The options.

    Returns:
        The workload; a range ratio of 1 can give requests without items.

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
                    width=width,
                    height=height,
                    frames=frames,
                    fps=VIDEO_FILE_FPS if frames > 1 else None,
                    source=f"{source}:{index}.{position}",
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


def _mapping_pairs(value: object, option: str, example: str) -> list[tuple[Any, Any]]:
    """Keys and values of a mapping or of its text, in order and with repeats, so that repeats can be refused."""
    problem = UsageError(f"{option} is {value!r}; it must be a non-empty mapping, for example {example}")
    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif isinstance(value, str):
        try:
            tree = ast.parse(value.strip(), mode="eval").body
            if not isinstance(tree, ast.Dict):
                raise problem
            pairs = [
                (ast.literal_eval(key) if key is not None else None, ast.literal_eval(item))
                for key, item in zip(tree.keys, tree.values, strict=True)
            ]
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
            raise problem from error
    else:
        raise problem
    if not pairs:
        raise problem
    return pairs


def _parse_size(key: object) -> tuple[int, int, int]:
    problem = UsageError(
        f"{_BUCKET_OPTION}: size {key!r} must be three positive integers, height, width and frames (1 frame is an "
        f"image, more are a video), for example {_BUCKET_EXAMPLE}"
    )
    parts: tuple[Any, ...]
    if isinstance(key, str):
        match = _SIZE_TEXT.fullmatch(key.strip())
        if match is None:
            raise problem
        parts = tuple(int(part) for part in match.groups())
    elif isinstance(key, tuple):
        parts = key
    else:
        raise problem
    if len(parts) != 3:
        raise problem
    for part in parts:
        if not isinstance(part, int) or isinstance(part, bool) or part < 1:
            raise problem
    height, width, frames = parts
    return height, width, frames


def _check_buckets(buckets: Mapping[tuple[int, int, int], Any]) -> None:
    for size, probability in buckets.items():
        is_number = isinstance(probability, int | float) and not isinstance(probability, bool)
        if not is_number or not math.isfinite(probability) or probability < 0:
            raise UsageError(
                f"{_BUCKET_OPTION}: probability of {size} is {probability!r}; it must be a finite number of at least "
                f"0, for example {_BUCKET_EXAMPLE}"
            )
    if all(probability == 0 for probability in buckets.values()):
        raise UsageError(
            f"{_BUCKET_OPTION}: all probabilities of {sorted(buckets)} are 0; at least one must be above 0, "
            f"for example {_BUCKET_EXAMPLE}"
        )
