"""Sizes out of request logs: JSON lines that name them, and text lines that a pattern finds them in."""

from __future__ import annotations

import base64
import codecs
import io
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from vitgraph.errors import InputError, UsageError
from vitgraph.reading import parse_json, unpacked
from vitgraph.workloads.base import RATE_RULE, MediaItem, Provenance, SkippedItem, Workload, is_rate, number_requests
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
    (
        *("bytes", "created", "detail", "filename", "format", "id", "index", "media_type", "messages", "mime_type"),
        *("modality", "model", "name", "path", "prompt", "request", "request_id", "size", "time", "timestamp"),
        *("tokens", "type", "url"),
    )
)
"""Fields that say nothing of sizes."""

_CONVERSATIONS = ("messages", "input")
_BODY_FIELDS = frozenset([*_CONVERSATIONS, "body", "prompt"])
_IMAGE_KEYS, _VIDEO_KEYS = ("image_url", "image"), ("video_url", "video")
_REQUEST_LINE = re.compile(r"([A-Z]+ )?(/|https?://)\S*( HTTP/\S+)?")
"""What web servers log as `request`: many requests have the same."""

SIZE_PLACEHOLDERS = ("WxHxF", "WxH")
"""Stand for numbers in a pattern: width, height and, in the first, frames."""

_SIZE_TEXT = re.compile(r"(\d+) ?[xX×] ?(\d+)(?: ?[xX×] ?(\d+))?", re.ASCII)
_FOLLOWING_SIZE = re.compile(r"[,;| ]+(\d+)x\d+", re.ASCII)
_KEYS_RULE = (
    "an entry names its sizes at its top as width and height (and frames, fps for a video), as a list in "
    f"{', '.join(LIST_KEYS)}, or as images in data URLs of a request's messages"
)


def read_json_log(path: Path, *, height_first: bool = False, fields: Mapping[str, str] | None = None) -> Workload:
    """Reads a log of JSON objects, each a request: one a line, or all in one array; the file may be compressed.

    A request names the sizes of its items, or is or holds the body of an OpenAI request, whose images in data URLs are
    measured. One without any item (a text-only request, another kind of entry) is left out and counted; an empty list
    stands for a request without items. Entries with an equal `request` value form one request, unless it is a web
    server's request line. `fields` are the log's own names for some of `LOG_FIELDS`; with `height_first` pairs and
    texts are height before width.

    Raises:
        InputError: The file cannot be read, or no entry has a usable size.
        UsageError: A field that no log has.
    """
    for field, own in (fields or {}).items():
        if field not in LOG_FIELDS:
            raise UsageError(f"--fields has {field!r}: {own!r}; it maps {', '.join(LOG_FIELDS)} to own names")
    names = {field: (own,) for field, own in (fields or {}).items()}
    reader = _EntryReader(height_first, {**SIZE_FIELDS, **names})
    log = _Log(path)
    for number, entry in _entries(path):
        source = log.next_line(number)
        if isinstance(entry, str):
            log.skipped.append(SkippedItem(source, f"not a JSON object ({_short(entry)})"))
            continue
        sizes = reader.sizes_of(entry) if isinstance(entry, dict) else None
        if sizes is None:
            log.without_size += 1
        else:
            request = entry.get(names.get("request", ("request",))[0])
            if isinstance(request, str) and _REQUEST_LINE.fullmatch(request):
                request = None
            log.add(source, request, [partial(reader.item, *size) for size in sizes])
    unread = ", ".join(sorted(reader.unread))
    if unread:
        logging.getLogger("vitgraph").warning(
            "%s: fields that are not read: %s; --fields says which of them are sizes", path, unread
        )
    return log.workload(_KEYS_RULE, **({"fields_not_read": unread} if unread else {}))


class _Log:
    """What the lines of a log have given so far; `without_size` counts those that name no size."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = self.without_size = 0
        self._groups: dict[str, list[MediaItem]] = {}
        self.skipped: list[SkippedItem] = []

    def next_line(self, number: int) -> str:
        """Counts a line, and names it."""
        self._lines += 1
        return f"{self._path.name}:{number}"

    def add(self, source: str, request: Any, sizes: Sequence[Callable[[], MediaItem]]) -> None:
        """Adds items to a request, which is the line's own where `request` is no name."""
        items = []
        for make in sizes:
            try:
                items.append(replace(make(), source=source))
            except InputError as error:
                self.skipped.append(SkippedItem(source, str(error)))
        # A line whose sizes are all unusable is no request, one with an empty list of them is.
        if items or not sizes:
            name = f"request {_number(request)}" if isinstance(request, str | int | float) else source
            self._groups.setdefault(name, []).extend(items)

    def workload(self, rule: str, **facts: str) -> Workload:
        if not any(self._groups.values()):
            first = f"; first: {self.skipped[0].source}: {self.skipped[0].reason}" if self.skipped else ""
            raise InputError(f"{self._path} has no usable size in {self._lines} lines{first}; {rule}")
        provenance: Provenance = {
            "dataset": "request log",
            "path": str(self._path),
            "lines": self._lines,
            "lines_without_size": self.without_size,
            **facts,
        }
        name = self._path.name.split(".", 1)[0] or self._path.name
        requests = number_requests(map(tuple, self._groups.values()))
        return Workload(name, requests, skipped=tuple(self.skipped), provenance=provenance)


class _EntryReader:
    """Reads entries of a log by its `names` of each field; remembers which fields it did not know."""

    def __init__(self, height_first: bool, names: Mapping[str, Sequence[str]]) -> None:
        self._height_first = height_first
        self._names = names
        self.unread: set[str] = set()

    def sizes_of(self, entry: Mapping[str, Any]) -> list[tuple[Any, bool]] | None:
        """What an entry names as sizes, each with whether it is said to be a video; None where it names none."""
        named = {key: entry[name] for key in LIST_KEYS if entry.get(name := self._name(key)) is not None}
        lists = [(value, key in VIDEO_LISTS) for key, value in named.items() if isinstance(value, list)]
        sizes = [(size, is_video) for value, is_video in lists for size in value]
        sizes = sizes or list(_media_parts(_conversation(entry)))
        if not sizes and (self._get(entry, "width") is not None or self._get(entry, "height") is not None):
            sizes = [(entry, False)]
        if not sizes and not lists:
            sizes = [(value, key in VIDEO_LISTS) for key, value in named.items() if isinstance(value, str | dict)]
        if not sizes and not lists:
            # The numbers of a text-only body, such as max_tokens, are none that could be sizes.
            kinds = list | dict if _BODY_FIELDS & entry.keys() else int | list | dict
            self._note(entry, {self._name(key) for key in LOG_FIELDS}, kinds)
            return None
        return sizes

    def _name(self, field: str) -> str:
        return self._names.get(field, (field,))[0]

    def _get(self, size: Mapping[str, Any], field: str) -> Any:
        return next((size[name] for name in self._names[field] if size.get(name) is not None), None)

    def _note(self, mapping: Mapping[str, Any], known: set[str], kinds: Any) -> None:
        other = {
            name
            for name, value in mapping.items()
            if (isinstance(value, kinds) and not isinstance(value, bool))
            or (isinstance(value, str) and _SIZE_TEXT.fullmatch(value))
        }
        # A `size` that is a number counts bytes.
        self.unread |= (
            other - known - (_OTHER_FIELDS if isinstance(mapping.get("size"), int) else _OTHER_FIELDS - {"size"})
        )

    def item(self, size: Any, is_video: bool) -> MediaItem:
        """The item of a size; an `InputError` where it is none."""
        url = _url_of(size) if isinstance(size, Mapping) and self._get(size, "width") is None else size
        if isinstance(url, str) and (url is not size or url[:5].lower() == "data:"):
            return _item_of_url(url)
        if isinstance(size, Mapping):
            known = {name for field in SIZE_FIELDS for name in self._names[field]}
            self._note(size, known | {self._name(key) for key in LIST_KEYS}, int | float | list | dict)
            found = {field: self._get(size, field) for field in SIZE_FIELDS}
            if found["width"] is None and found["height"] is None:
                raise InputError(f"{_short(size)} names no width and height, and holds no image as data")
            return make_item(size, is_video=is_video or size.get("type") == "video", **found)
        match = _SIZE_TEXT.fullmatch(size) if isinstance(size, str) else None
        numbers = list(match.groups()) if match else list(size) if isinstance(size, list) else []
        if self._height_first:
            numbers[:2] = numbers[1::-1]
        if len(numbers) not in (2, 3):
            raise InputError(
                f"size {_short(size)} is no [width, height], WxH or object with width and height; no file is opened, "
                "so convert the folder of the images"
            )
        return make_item(size, is_video=is_video, **dict(zip(("width", "height", "frames"), numbers, strict=False)))


def _conversation(entry: Mapping[str, Any]) -> list[Any]:
    """The messages of an OpenAI request body (chat, responses) or one like it, which an entry is or holds, perhaps as a
    text of JSON; no second copy of them."""
    texts = {
        name: value for name, value in entry.items() if isinstance(value, str) and value.lstrip()[:1] in ("{", "[")
    }
    held = {**entry, **{name: _parsed(text) for name, text in texts.items()}}
    listed = (held[name] for name in _CONVERSATIONS if isinstance(held.get(name), list))
    inner = (_conversation(value) for value in held.values() if isinstance(value, dict))
    return next(filter(None, (*listed, *inner)), [])


def _media_parts(content: Any) -> Iterator[tuple[Any, bool]]:
    """Images and videos in the content of messages, that of a tool's answer too, each with whether it is a video."""
    if isinstance(content, dict):
        kind = str(content.get("type", ""))
        is_video = "video" in kind or any(content.get(key) is not None for key in _VIDEO_KEYS)
        if is_video or "image" in kind or any(content.get(key) is not None for key in _IMAGE_KEYS):
            yield content, is_video
            return
    for each in content.values() if isinstance(content, dict) else content if isinstance(content, list) else ():
        yield from _media_parts(each)


def _url_of(part: Mapping[str, Any]) -> str | None:
    """The URL of an image or video in a part of a request, or its base64 data as one."""
    for name in (*_IMAGE_KEYS, *_VIDEO_KEYS, "url"):
        value = part.get(name)
        value = value.get("url") if isinstance(value, Mapping) else value
        if isinstance(value, str):
            return value
    source = part.get("source")
    if isinstance(source, Mapping) and isinstance(source.get("data"), str):
        return f"data:{source.get('media_type', 'image')};base64,{source['data']}"
    return source.get("url") if isinstance(source, Mapping) and isinstance(source.get("url"), str) else None


def _item_of_url(url: str) -> MediaItem:
    """The image in a data URL, by its size."""
    head, _, data = url.partition(",")
    kind, *parameters = head.lower().split(";")
    # Clients send images as application/octet-stream or of no kind too, and servers take them.
    if not kind.startswith("data:") or kind.startswith(("data:video", "data:audio")) or parameters[-1:] != ["base64"]:
        raise InputError(f"{_short(url)} holds no image as base64 data; nothing is fetched, so log width and height")
    try:
        content = base64.b64decode(data, validate=True)
    except ValueError as error:
        raise InputError(f"{_short(url)} is not base64 ({error})") from error
    return MediaItem(*read_upright_size(content))


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:60] + "…"


def read_text_log(path: Path, pattern: str) -> Workload:
    """Reads a log of text lines; every match in a line is an item of that line's request.

    Lines without a match are counted and left out. Lines with an equal `request` group form one request. The file may
    be compressed. `pattern` is a regular expression with the groups `width` and `height`, and where needed
    `frames` and `request`; or one in which `WxH` or `WxHxF` stands for the numbers.

    Raises:
        UsageError: The pattern is no regular expression or names no width and height.
        InputError: The file cannot be read, or no line has a usable size.
    """
    expression = compile_pattern(pattern)
    log = _Log(path)
    num_partly_read = 0
    for number, line in _lines(path):
        source = log.next_line(number)
        matches = list(expression.finditer(line))
        log.without_size += not matches
        read = {min(match.start("width"), match.start("height")) for match in matches}
        following = (_FOLLOWING_SIZE.match(line, match.end()) for match in matches)
        num_partly_read += any(size is not None and size.start(1) not in read for size in following)
        for match in matches:
            parts = match.groupdict()
            sizes: dict[str, Any] = {field: parts.get(field) for field in SIZE_FIELDS}
            log.add(source, parts.get("request"), [partial(make_item, match.group(), **sizes)])
    if num_partly_read:
        logging.getLogger("vitgraph").warning(
            "%s: lines with further sizes behind a match of --pattern, which are not read: %d; a pattern of WxH alone "
            "finds every size of a line",
            path,
            num_partly_read,
        )
    return log.workload(f"--pattern {pattern!r} must match where a line names a size")


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
    with unpacked(path, "log") as file:
        encoding = "utf-16" if file.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"
        for number, line in enumerate(io.TextIOWrapper(file, encoding, errors="replace"), start=1):
            if line.strip():
                yield number, line.strip()


def make_item(
    size: Any,
    *,
    width: Any = None,
    height: Any = None,
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
    return MediaItem(width, height, 1 if frames is None else frames, fps, source=f"size {_short(size)}")


def _number(value: Any) -> Any:
    """The number that a text is; files have them quoted."""
    if isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?", value, re.ASCII):
        return float(value) if "." in value else int(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value
