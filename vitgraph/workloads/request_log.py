"""Sizes out of request logs: JSON lines that name them, and text lines that a pattern finds them in."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vitgraph.errors import InputError, UsageError
from vitgraph.workloads.base import MediaItem, SkippedItem, Workload, is_int, is_positive_number, number_requests

LIST_KEYS = ("image_sizes", "images", "videos", "items")
"""Keys of a JSON line that hold several sizes: pairs, `WxH` texts, or objects with `width` and `height`."""

SIZE_PLACEHOLDERS = ("WxHxF", "WxH")
"""Stand for numbers in a pattern: width, height and, in the first, frames."""

_LARGEST = 10**9
_SIZE_TEXT = re.compile(r"(\d+)x(\d+)(?:x(\d+))?", re.ASCII)
_KEYS_RULE = (
    f"a line names its sizes as width and height (and frames, fps for a video), or as a list in {', '.join(LIST_KEYS)}"
)


def read_json_log(path: Path, *, height_first: bool = False) -> Workload:
    """Reads a log with one JSON object a line, each a request.

    A line without any size (a text-only request, another kind of entry) is left out and counted; an empty list stands
    for a request without items. Lines with an equal `request` value form one request.

    Args:
        path: The file; may be compressed with gzip.
        height_first: Pairs and texts are height before width.

    Raises:
        InputError: The file cannot be read, or no line has a usable size.
    """
    groups: dict[str, list[MediaItem]] = {}
    skipped: list[SkippedItem] = []
    lines = without = 0
    for number, line in _lines(path):
        lines += 1
        source = f"{path.name}:{number}"
        try:
            entry = json.loads(line)
        except ValueError as error:
            skipped.append(SkippedItem(source, f"not a JSON object ({error})"))
            continue
        sizes = _sizes_of(entry) if isinstance(entry, dict) else None
        if sizes is None:
            without += 1
            continue
        items = []
        for size in sizes:
            try:
                items.append(_item(size, source, height_first))
            except InputError as error:
                skipped.append(SkippedItem(source, str(error)))
        if items or not sizes:
            request = entry.get("request")
            groups.setdefault(f"request {request}" if isinstance(request, str | int) else source, []).extend(items)
    return _workload(path, groups, skipped, {"lines": lines, "lines_without_size": without}, _KEYS_RULE)


def read_text_log(path: Path, pattern: str) -> Workload:
    """Reads a log of text lines; every match in a line is an item of that line's request.

    Lines without a match are counted and left out. Lines with an equal `request` group form one request.

    Args:
        path: The file; may be compressed with gzip.
        pattern: A regular expression with the groups `width` and `height`, and where needed `frames` and `request`;
            or one in which `WxH` or `WxHxF` stands for the numbers.

    Raises:
        UsageError: The pattern is no regular expression or names no width and height.
        InputError: The file cannot be read, or no line has a usable size.
    """
    expression = compile_pattern(pattern)
    groups: dict[str, list[MediaItem]] = {}
    skipped: list[SkippedItem] = []
    lines = without = 0
    for number, line in _lines(path):
        lines += 1
        source = f"{path.name}:{number}"
        found = False
        for match in expression.finditer(line):
            found = True
            parts = match.groupdict()
            request = parts.get("request")
            try:
                item = _item({name: parts.get(name) for name in ("width", "height", "frames")}, source, False)
            except InputError as error:
                skipped.append(SkippedItem(source, str(error)))
                continue
            groups.setdefault(source if request is None else f"request {request}", []).append(item)
        without += not found
    rule = f"--pattern {pattern!r} must match where a line names a size"
    return _workload(path, groups, skipped, {"lines": lines, "lines_without_size": without}, rule)


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """The regular expression of a `--pattern`, its `WxH` replaced by groups.

    Raises:
        UsageError: See `read_text_log`.
    """
    text = pattern
    if "(?P<width>" not in text:
        groups = [rf"(?P<{name}>\d+)" for name in ("width", "height", "frames")]
        for placeholder in SIZE_PLACEHOLDERS:
            if placeholder in text:
                # A number of an item's size must be whole: 1640x480 is not 640x480.
                text = text.replace(placeholder, rf"(?<!\d){'x'.join(groups[: placeholder.count('x') + 1])}(?!\d)", 1)
                break
    try:
        expression = re.compile(text)
    except re.error as error:
        raise UsageError(f"--pattern {pattern!r} is not a regular expression: {error}") from error
    if not {"width", "height"} <= set(expression.groupindex):
        raise UsageError(
            f"--pattern {pattern!r} names no size; write WxH (or WxHxF, F the frames) where the numbers stand, for "
            r"example 'size=WxH', or the groups (?P<width>\d+) and (?P<height>\d+)"
        )
    return expression


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines that are not blank."""
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8", errors="replace")
            if path.suffix == ".gz"
            else path.open(encoding="utf-8", errors="replace") as file
        ):
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line.strip()
    except (OSError, EOFError) as error:
        raise InputError(f"cannot read the log {path}: {getattr(error, 'strerror', None) or error}") from error


def _sizes_of(entry: Mapping[str, Any]) -> list[Any] | None:
    """The sizes that a line names, as they stand there; None where it names none."""
    lists = [entry[key] for key in LIST_KEYS if isinstance(entry.get(key), list)]
    if lists:
        return [size for sizes in lists for size in sizes]
    return [entry] if "width" in entry or "height" in entry else None


def _item(size: Any, source: str, height_first: bool) -> MediaItem:
    fps = None
    if isinstance(size, Mapping):
        numbers = [size.get("width"), size.get("height"), size.get("frames")]
        fps = size.get("fps")
    else:
        match = _SIZE_TEXT.fullmatch(size) if isinstance(size, str) else None
        numbers = list(match.groups()) if match else list(size) if isinstance(size, list) else []
        if height_first:
            numbers[:2] = numbers[1::-1]
    if len(numbers) not in (2, 3):
        raise InputError(f"size {size!r} is no [width, height], WxH or object with width and height")
    width, height, frames = (_number(number) for number in [*numbers, None][:3])
    if frames in (None, 1):
        return MediaItem(_known(width, size), _known(height, size), source=source)
    if fps is not None and not is_positive_number(fps):
        raise InputError(f"fps of {size!r} must be a positive number")
    return MediaItem(_known(width, size), _known(height, size), _known(frames, size), fps=fps, source=source)


def _number(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value


def _known(value: Any, size: Any) -> int:
    if not is_int(value) or not 0 < value < _LARGEST:
        raise InputError(f"size {size!r} needs positive integers below {_LARGEST}")
    return int(value)


def _workload(
    path: Path, groups: Mapping[str, list[MediaItem]], skipped: list[SkippedItem], counts: Mapping[str, int], rule: str
) -> Workload:
    if not any(groups.values()):
        first = f"; first: {skipped[0].source}: {skipped[0].reason}" if skipped else ""
        raise InputError(f"{path} has no usable size in {counts['lines']} lines{first}; {rule}")
    provenance: dict[str, str | int | float | bool | None] = {"dataset": "request log", "path": str(path), **counts}
    name = path.name.split(".", 1)[0] or path.name
    return Workload(name, number_requests(map(tuple, groups.values())), skipped=tuple(skipped), provenance=provenance)
