"""Sizes out of request logs: JSON lines that name them, and text lines that a pattern finds them in."""

from __future__ import annotations

import base64
import codecs
import gzip
import io
import json
import logging
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

from vitgraph.errors import InputError, UsageError
from vitgraph.reading import parse_json
from vitgraph.workloads.base import RATE_RULE, MediaItem, SkippedItem, Workload, is_int, is_rate, number_requests
from vitgraph.workloads.encoded_image import read_upright_size

LIST_KEYS = ("image_sizes", "images", "videos", "items")
"""Keys of a JSON line that hold several sizes: pairs, `WxH` texts, or objects with `width` and `height`."""

VIDEO_LISTS = ("videos",)
SIZE_FIELDS: dict[str, tuple[str, ...]] = {
    "width": ("width",),
    "height": ("height",),
    "frames": ("frames", "num_frames", "n_frames", "frame_count"),
    "fps": ("fps", "frame_rate"),
    "duration": ("duration", "duration_s"),
}
"""What describes an item, and the names that logs have for it; `duration` is in seconds."""

LOG_FIELDS = (*SIZE_FIELDS, *LIST_KEYS, "request")
_OTHER_FIELDS = frozenset(
    [
        "bytes",
        "created",
        "detail",
        "filename",
        "format",
        "id",
        "index",
        "media_type",
        "messages",
        "mime_type",
        "modality",
        "model",
        "name",
        "path",
        "prompt",
        "request",
        "request_id",
        "size",
        "time",
        "timestamp",
        "tokens",
        "type",
        "url",
    ]
)
"""Fields that say nothing of sizes."""

_BODY_FIELDS = frozenset(["body", "input", "messages", "prompt"])

SIZE_PLACEHOLDERS = ("WxHxF", "WxH")
"""Stand for numbers in a pattern: width, height and, in the first, frames."""

_LARGEST = 10**9
_SIZE_TEXT = re.compile(r"(\d+)x(\d+)(?:x(\d+))?", re.ASCII)
_KEYS_RULE = (
    f"an entry names its sizes as width and height (and frames, fps for a video), as a list in {', '.join(LIST_KEYS)}, "
    "or as images in data URLs of a request's messages"
)


def read_json_log(path: Path, *, height_first: bool = False, fields: Mapping[str, str] | None = None) -> Workload:
    """Reads a log of JSON objects, each a request: one a line, or all in one array.

    A request names the sizes of its items, or is the body of an OpenAI request, whose images in data URLs are measured.
    One without any item (a text-only request, another kind of entry) is left out and counted; an empty list stands for
    a request without items. Entries with an equal `request` value form one request.

    Args:
        path: The file; may be compressed with gzip.
        height_first: Pairs and texts are height before width.
        fields: The log's own names for some of `LOG_FIELDS`.

    Raises:
        InputError: The file cannot be read, or no entry has a usable size.
        UsageError: A field that no log has.
    """
    for field, own in (fields or {}).items():
        if field not in LOG_FIELDS:
            raise UsageError(f"--fields has {field!r}: {own!r}; it maps {', '.join(LOG_FIELDS)} to own names")
    names = {field: (own,) for field, own in (fields or {}).items()}
    reader = _EntryReader(height_first, {**SIZE_FIELDS, **names})
    groups: dict[str, list[MediaItem]] = {}
    lines = without = 0
    for number, entry in _entries(path):
        lines += 1
        source = f"{path.name}:{number}"
        if isinstance(entry, str):
            reader.skipped.append(SkippedItem(source, f"not a JSON object ({_short(entry)})"))
            continue
        items = reader.items_of(entry, source) if isinstance(entry, dict) else None
        if items is None:
            without += 1
        elif items.usable or not items.found:
            request = entry.get(names.get("request", ("request",))[0])
            group = groups.setdefault(f"request {request}" if isinstance(request, str | int) else source, [])
            group.extend(items.usable)
    counts: dict[str, Any] = {"lines": lines, "lines_without_size": without}
    if reader.unread:
        counts["fields_not_read"] = ", ".join(sorted(reader.unread))
        logging.getLogger("vitgraph").warning(
            "%s: fields that are not read: %s; --fields says which of them are sizes", path, counts["fields_not_read"]
        )
    return _workload(path, groups, reader.skipped, counts, _KEYS_RULE)


class _Found(NamedTuple):
    """Items of an entry: how many it names, and those that can be used."""

    found: int
    usable: list[MediaItem]


class _EntryReader:
    """Reads entries of a log; remembers what it left out and which fields it did not know.

    Args:
        height_first: Pairs and texts are height before width.
        names: The log's names of each field.
    """

    def __init__(self, height_first: bool, names: Mapping[str, Sequence[str]]) -> None:
        self._height_first = height_first
        self._names = names
        self.skipped: list[SkippedItem] = []
        self.unread: set[str] = set()

    def items_of(self, entry: Mapping[str, Any], source: str) -> _Found | None:
        """The items that an entry names; None where it names none."""
        lists = {key: entry[name] for key in LIST_KEYS if isinstance(entry.get(name := self._name(key)), list)}
        sizes = [(size, key in VIDEO_LISTS) for key, listed in lists.items() for size in listed]
        if not lists:
            parts = list(_media_parts(entry.get("body", entry)))
            if not parts and self._get(entry, "width") is None and self._get(entry, "height") is None:
                # The numbers of a text-only body, such as max_tokens, are none that could be sizes.
                kinds = list | dict if _BODY_FIELDS & entry.keys() else int | list | dict
                self._note(entry, {self._name(key) for key in LOG_FIELDS}, kinds)
                return None
            sizes = parts or [(entry, False)]
        usable = []
        for size, is_video in sizes:
            try:
                usable.append(self._item(size, source, is_video))
            except InputError as error:
                self.skipped.append(SkippedItem(source, str(error)))
        return _Found(len(sizes), usable)

    def _name(self, field: str) -> str:
        return self._names.get(field, (field,))[0]

    def _get(self, size: Mapping[str, Any], field: str) -> Any:
        return next((size[name] for name in self._names[field] if size.get(name) is not None), None)

    def _note(self, mapping: Mapping[str, Any], known: set[str], kinds: Any) -> None:
        other = {name for name, value in mapping.items() if isinstance(value, kinds) and not isinstance(value, bool)}
        self.unread |= other - known - _OTHER_FIELDS

    def _item(self, size: Any, source: str, is_video: bool) -> MediaItem:
        if isinstance(size, Mapping):
            url = _url_of(size)
            if url is not None and self._get(size, "width") is None:
                return _item_of_url(url, source)
            self._note(size, {name for field in SIZE_FIELDS for name in self._names[field]}, int | float | list | dict)
            found = {field: self._get(size, field) for field in SIZE_FIELDS}
            is_video = is_video or size.get("type") == "video"
            return make_item(size, source, is_video=is_video, **found)
        if isinstance(size, str) and size.startswith("data:"):
            return _item_of_url(size, source)
        match = _SIZE_TEXT.fullmatch(size) if isinstance(size, str) else None
        numbers = list(match.groups()) if match else list(size) if isinstance(size, list) else []
        if self._height_first:
            numbers[:2] = numbers[1::-1]
        if len(numbers) not in (2, 3):
            raise InputError(f"size {_short(size)} is no [width, height], WxH or object with width and height")
        width, height, frames = [*numbers, None][:3]
        return make_item(size, source, width=width, height=height, frames=frames, is_video=is_video)


def _media_parts(body: Any) -> Iterator[tuple[Any, bool]]:
    """Images and videos of an OpenAI request body (chat, responses) or one like it, each with whether it is a video."""
    conversation = (body.get("messages") or body.get("input")) if isinstance(body, Mapping) else None
    for message in conversation if isinstance(conversation, list) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else ():
            kind = str(part.get("type", "")) if isinstance(part, Mapping) else ""
            if "image" in kind or "video" in kind:
                yield part, "video" in kind


def _url_of(part: Mapping[str, Any]) -> str | None:
    """The URL of an image or video in a part of a request, or its base64 data as one."""
    for name in ("image_url", "video_url", "image", "video", "url"):
        value = part.get(name)
        value = value.get("url") if isinstance(value, Mapping) else value
        if isinstance(value, str):
            return value
    source = part.get("source")
    if isinstance(source, Mapping) and isinstance(source.get("data"), str):
        return f"data:{source.get('media_type', 'image')};base64,{source['data']}"
    return source.get("url") if isinstance(source, Mapping) and isinstance(source.get("url"), str) else None


def _item_of_url(url: str, source: str) -> MediaItem:
    """The image in a data URL, by its size."""
    head, _, data = url.partition(",")
    if not head.startswith("data:image") or not head.endswith(";base64"):
        raise InputError(f"{_short(url)} holds no image as base64 data; nothing is fetched, so log width and height")
    try:
        content = base64.b64decode(data, validate=True)
    except ValueError as error:
        raise InputError(f"{_short(url)} is not base64 ({error})") from error
    return MediaItem(*read_upright_size(content), source=source)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:60] + "…"


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
                numbers: dict[str, Any] = {name: parts.get(name) for name in SIZE_FIELDS}
                item = make_item(match.group(), source, **numbers)
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


def _entries(path: Path) -> Iterator[tuple[int, Any]]:
    """Numbered JSON values: the elements of one array, one object over several lines, or a value a line.

    A line that is no JSON is its own text.
    """
    lines = _lines(path)
    first = next(lines, None)
    if first is None:
        return
    whole = None
    if first[1].startswith("[") or _parsed(first[1]) is None:
        rest = list(lines)
        whole = _parsed("\n".join([first[1], *(line for _, line in rest)]))
        lines = iter(rest)
    if whole is not None:
        yield from enumerate(whole if isinstance(whole, list) else [whole], start=1)
        return
    for number, line in (first, *lines):
        value = _parsed(line)
        yield number, line if value is None else value


def _parsed(text: str) -> Any:
    try:
        return parse_json(text, "the entry", failure=InputError)
    except InputError:
        return None


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines that are not blank, of UTF-8 or UTF-16 text, compressed or not."""
    if path.exists() and not path.is_file():
        raise InputError(f"cannot read the log {path}: it is no regular file; save it first")
    try:
        with path.open("rb") as raw, unpacked(raw) as file:
            encoding = "utf-16" if file.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"
            for number, line in enumerate(io.TextIOWrapper(file, encoding, errors="replace"), start=1):
                if line.strip():
                    yield number, line.strip()
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"cannot read the log {path}: {getattr(error, 'strerror', None) or error}") from error


def unpacked(file: BufferedReader) -> Any:
    """The file's content, unpacked where it is compressed with gzip, whatever its name."""
    return gzip.open(file, "rb") if file.peek(2)[:2] == b"\x1f\x8b" else file


def make_item(
    size: Any,
    source: str,
    *,
    width: Any,
    height: Any,
    frames: Any = None,
    fps: Any = None,
    duration: Any = None,
    is_video: bool = False,
) -> MediaItem:
    """An item of the numbers that a log has for it; `duration` in seconds stands for frames where there is an `fps`.

    Raises:
        InputError: A number is missing or impossible; a video without frames is no image.
    """
    width, height, frames, fps, duration = (_number(value) for value in (width, height, frames, fps, duration))
    for name, value in (("fps", fps), ("duration", duration)):
        if value is not None and not is_rate(value):
            raise InputError(f"{name} of {_short(size)} must be {RATE_RULE}")
    if frames is None and fps is not None and duration is not None:
        frames = max(1, round(fps * duration))
    if frames is None and (is_video or duration is not None or fps is not None):
        raise InputError(f"video {_short(size)} needs frames (or num_frames), or a duration and an fps")
    width, height, frames = (_known(value, size) for value in (width, height, 1 if frames is None else frames))
    return MediaItem(width, height, frames, fps=fps if frames > 1 else None, source=source)


def _number(value: Any) -> Any:
    """The number that a text is; files have them quoted."""
    if isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?", value, re.ASCII):
        return float(value) if "." in value else int(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _known(value: Any, size: Any) -> int:
    if not is_int(value) or not 0 < value < _LARGEST:
        raise InputError(f"size {_short(size)} needs positive integers below {_LARGEST}")
    return int(value)


def _workload(
    path: Path, groups: Mapping[str, list[MediaItem]], skipped: list[SkippedItem], counts: Mapping[str, Any], rule: str
) -> Workload:
    if not any(groups.values()):
        first = f"; first: {skipped[0].source}: {skipped[0].reason}" if skipped else ""
        raise InputError(f"{path} has no usable size in {counts['lines']} lines{first}; {rule}")
    provenance: dict[str, str | int | float | bool | None] = {"dataset": "request log", "path": str(path), **counts}
    name = path.name.split(".", 1)[0] or path.name
    return Workload(name, number_requests(map(tuple, groups.values())), skipped=tuple(skipped), provenance=provenance)
