"""Reads the size buckets and the limits of the random-mm workload, in vLLM's spelling; UsageError for anything else."""

from __future__ import annotations

import ast
import contextlib
import math
import re
from collections.abc import Mapping
from typing import Any

from vitgraph.errors import UsageError
from vitgraph.planning.items import IMAGE, VIDEO

Buckets = dict[tuple[int, int, int], float]
"""Probability by (height, width, frames)."""

_BUCKET_OPTION = "--random-mm-bucket-config"
_BUCKET_EXAMPLE = "'{(336, 336, 1): 1.0}' or '{\"336x336x1\": 1.0}' (height, width, frames: probability)"
LIMIT_OPTION = "--random-mm-limit-mm-per-prompt"
LIMIT_EXAMPLE = '\'{"image": 3, "video": 0}\''
# vLLM takes audio limits too; they concern no item here, and a pasted limit must not fail for them.
_KNOWN_MODALITIES = (IMAGE, VIDEO, "audio")
_SIZE_TEXT = re.compile(r"\(?\s*(\d{1,9})\s*[x×,]\s*(\d{1,9})\s*[x×,]\s*(\d{1,9})\s*\)?")


def parse_buckets(value: str | Mapping[Any, Any]) -> Buckets:
    """Reads size buckets from the spelling of a Python tuple literal or from JSON.

    Args:
        value: `{(336, 336, 1): 1.0}`, `{"(336, 336, 1)": 1.0}`, `{"336x336x1": 1.0}`, or such a mapping. The order is
            height, width, frames.

    Returns:
        Probability by (height, width, frames), as given: not scaled, zeros kept.
    """
    buckets: Buckets = {}
    for key, probability in _mapping_pairs(value, _BUCKET_OPTION, _BUCKET_EXAMPLE):
        match = _SIZE_TEXT.fullmatch(str(key).strip()) if isinstance(key, str | tuple) else None
        height, width, frames = map(int, match.groups()) if match else (0, 0, 0)
        if min(height, width, frames) < 1:
            raise UsageError(
                f"{_BUCKET_OPTION}: size {key!r} must be three positive integers, height, width and frames (1 frame is "
                f"an image, more are a video), for example {_BUCKET_EXAMPLE}"
            )
        size = height, width, frames
        if size in buckets:
            raise UsageError(f"{_BUCKET_OPTION}: size {size} is given twice; name each (height, width, frames) once")
        is_number = isinstance(probability, int | float) and not isinstance(probability, bool)
        if not is_number or not math.isfinite(probability) or probability < 0:
            raise UsageError(
                f"{_BUCKET_OPTION}: probability of {size} is {probability!r}; it must be a finite number of at least "
                f"0, for example {_BUCKET_EXAMPLE}"
            )
        buckets[size] = float(probability)
    if not any(buckets.values()):
        raise UsageError(
            f"{_BUCKET_OPTION}: all probabilities of {sorted(buckets)} are 0; at least one must be above 0, "
            f"for example {_BUCKET_EXAMPLE}"
        )
    return buckets


def parse_limits(value: str | Mapping[Any, Any]) -> dict[str, int]:
    """Reads the most items of each modality in a request.

    Returns:
        Limit by modality.
    """
    limits: dict[str, int] = {}
    for key, limit in _mapping_pairs(value, LIMIT_OPTION, LIMIT_EXAMPLE):
        if key not in _KNOWN_MODALITIES:
            raise UsageError(
                f"{LIMIT_OPTION}: unknown modality {key!r}; known are {', '.join(_KNOWN_MODALITIES)}, "
                f"for example {LIMIT_EXAMPLE}"
            )
        if key in limits:
            raise UsageError(f"{LIMIT_OPTION}: {key!r} is given twice; name each modality once")
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 0:
            raise UsageError(
                f"{LIMIT_OPTION}: limit of {key!r} is {limit!r}; it must be an integer of at least 0, "
                f"for example {LIMIT_EXAMPLE}"
            )
        limits[str(key)] = limit
    return limits


def _mapping_pairs(value: object, option: str, example: str) -> list[tuple[Any, Any]]:
    """Keys and values of a mapping or of its text, in order and with repeats, so that repeats can be refused."""
    pairs: list[tuple[Any, Any]] = []
    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif isinstance(value, str):
        with contextlib.suppress(SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            tree = ast.parse(value.strip(), mode="eval").body
            if isinstance(tree, ast.Dict):
                keys = [None if key is None else ast.literal_eval(key) for key in tree.keys]
                pairs = list(zip(keys, map(ast.literal_eval, tree.values), strict=True))
    if not pairs:
        raise UsageError(f"{option} is {value!r}; it must be a non-empty mapping, for example {example}")
    return pairs
