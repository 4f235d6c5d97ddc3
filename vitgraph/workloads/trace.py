"""Size traces: CSV files of item sizes, read as requests, written from a workload, and the ones that are shipped."""

from __future__ import annotations

import csv
import difflib
import functools
import hashlib
import io
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vitgraph.errors import InputError, UsageError
from vitgraph.reading import MOST_BYTES, is_file, unpacked
from vitgraph.records.store import write_file
from vitgraph.specs.parts import WorkloadSpec
from vitgraph.workloads.base import (
    MediaItem,
    Provenance,
    Request,
    Workload,
    choose_warmups,
    is_rate,
    shrink_size,
)

TRACE_FOLDER = Path(__file__).with_name("traces")
DEFAULT_TRACE = "mixed-chat"


@dataclass(frozen=True)
class ShippedTrace:
    """A size trace that comes with the package; its `statement` of what it is and is not travels with every result, and
    `video_fps` is assumed for its videos, whose source names none."""

    statement: str
    video_fps: float | None = None


SHIPPED_TRACES: dict[str, ShippedTrace] = {
    "mixed-chat": ShippedTrace(
        "3,300 real image sizes in an assumed mix of figures, receipts, photos and screenshots; not VisionArena-Chat, "
        "not a measurement of traffic"
    ),
    "mixed-media": ShippedTrace(
        "261 real image sizes and 29 real sizes of short videos, nine images to a video; the shares are an assumption"
    ),
    "documents": ShippedTrace("1,767 real sizes of photographed and scanned receipts; not a measurement of traffic"),
    "screenshots": ShippedTrace("978 real sizes of desktop, browser and phone screenshots from documentation"),
    "videos": ShippedTrace(
        "1,570 real sizes and file frame counts of short web videos; a rate of 29.97 frames a second is assumed where "
        "none is given",
        video_fps=29.97,
    ),
}

MOST_SECONDS = 1e10
"""Latest arrival; beyond it the resolution of a float is microseconds, and the number is of another unit."""

_SIZE_COLUMNS = ("width", "height", "frames")
_COLUMNS = (*_SIZE_COLUMNS, "request", "fps", "call", "arrival_s")
_INTEGER = re.compile(r"-?[0-9]{1,99}", re.ASCII)
_LONGEST_HEADER = 200
_HEADER_RULE = (
    "the first line must name the columns width,height and, where needed, frames, request, fps, call and arrival_s"
)


def resolve_trace_path(name_or_path: str | None) -> tuple[Path, str | None]:
    """Finds a trace by a name of `SHIPPED_TRACES`, which wins over a file of that name here (write `./name` for the
    file), or by the path of a CSV file; None is the default trace.

    Returns:
        The file, and the shipped name if it is one.

    Raises:
        InputError: If there is neither.
    """
    given = DEFAULT_TRACE if name_or_path is None else name_or_path
    if given in SHIPPED_TRACES:
        return TRACE_FOLDER / f"{given}.csv", given
    path = Path(given).expanduser()
    if is_file(path):
        return path, None
    known = ", ".join(SHIPPED_TRACES)
    near = difflib.get_close_matches(path.stem, SHIPPED_TRACES, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise InputError(
        f"trace {given!r} is no file, no folder of images and no shipped trace; --dataset-path takes a CSV file with "
        f"the columns width,height[,frames][,request], a folder of images, or one of {known}{hint}"
    )


def build_trace(spec: WorkloadSpec) -> Workload:
    """Reads a size trace as a workload of random pixels.

    The first `num_prompts` requests in file order are measured (after a permutation with the seed if `shuffle_trace`).
    A trace that has fewer is used as it is and the provenance says so; it is never repeated. Warm-ups are the requests
    after the measured ones where enough are left, otherwise drawn among all.

    Raises:
        InputError: If the trace cannot be found or read, or a row is not what it must be.
    """
    path, shipped = resolve_trace_path(spec.dataset_path)
    assumed_fps = SHIPPED_TRACES[shipped].video_fps if shipped else None
    video_fps = assumed_fps if spec.video_fps is None else spec.video_fps
    with unpacked(path, "trace") as file:
        content = bytes(file.read(MOST_BYTES + 1))
    if len(content) > MOST_BYTES:
        raise InputError(f"the trace {path} has more than {MOST_BYTES:,} bytes; take a part of it")
    given = _parse_requests(path.name, content, video_fps)
    bound = spec.max_pixels_per_item
    found = list(given) if bound is None else [_shrunk(request, bound) for request in given]
    pairs = zip(given, found, strict=True)
    num_shrunk = sum(item != other for old, new in pairs for item, other in zip(old.items, new.items, strict=True))
    if spec.shuffle_trace:
        found = [found[int(index)] for index in np.random.default_rng(spec.seed).permutation(len(found))]
    groups = [request.items for request in found]
    warmups, warmup_source = choose_warmups(groups, spec.num_prompts, spec.num_warmups, spec.seed)
    requests = tuple(replace(request, index=index) for index, request in enumerate(found[: spec.num_prompts]))
    provenance: Provenance = {
        "dataset": "trace",
        "trace": shipped or str(path),
        "file_sha256": hashlib.sha256(content).hexdigest(),
        "requests_in_trace": len(found),
        "requests_wanted": spec.num_prompts,
        "requests_taken": len(requests),
        "fewer_than_wanted": len(requests) < spec.num_prompts,
        "shuffled": spec.shuffle_trace,
        "seed": spec.seed,
        "warmups": warmup_source,
        "max_pixels_per_item": spec.max_pixels_per_item,
        "items_shrunk": num_shrunk,
        "video_fps": video_fps,
        "statement": SHIPPED_TRACES[shipped].statement if shipped else None,
    }
    return Workload(shipped or path.stem, requests, warmups, provenance=provenance)


def save_trace(workload: Workload, path: str | Path, *, overwrite: bool = False) -> Path:
    """Writes the measured requests of a workload to a CSV file that reads back with the same fingerprint; returns its
    path.

    The columns are width, height, frames and request; fps where a video still has file frames; call and arrival_s where
    requests name them. A request without items is a row whose sizes are empty. Warm-ups and pixels are not written.

    Raises:
        UsageError: If the file exists and is not to be overwritten, or no request has an item.
        RecordFileError: If it cannot be written.
    """
    target = Path(path)
    if workload.num_items == 0:
        raise UsageError(f"workload {workload.name!r} has no items to write to {target}; a trace needs at least one")
    rows = [row for index, request in enumerate(workload.requests) for row in _rows_of(index, request)]
    columns = [
        column for column in _COLUMNS if column in (*_SIZE_COLUMNS, "request") or any(row[column] for row in rows)
    ]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    if target.exists() and not overwrite:
        raise UsageError(f"{target} exists; name another file, or ask for it to be overwritten")
    return write_file(target, text.getvalue().encode(), "the trace")


def _rows_of(index: int, request: Request) -> list[dict[str, object]]:
    """The rows of a request by column; values that are not known are empty."""
    arrival = "" if request.arrival_s is None else repr(request.arrival_s)
    of_request = {"request": index, "call": request.call or "", "arrival_s": arrival}
    cells = [
        {
            "width": item.width,
            "height": item.height,
            "frames": item.frames,
            "fps": "" if item.fps is None else repr(float(item.fps)),
        }
        for item in request.items
    ]
    return [{**dict.fromkeys(_COLUMNS, ""), **of_item, **of_request} for of_item in cells or [{}]]


Rows = list[tuple[str, dict[str, str]]]
"""Place (`file:line`) and cells by column of each row of a request."""


@functools.lru_cache(maxsize=8)
def _parse_requests(name: str, content: bytes, video_fps: float | None) -> tuple[Request, ...]:
    """Every request, in the order in which they first appear; one command asks for the same trace several times."""
    groups: dict[str, Rows] = {}
    for place, row in _rows(name, content):
        request = row.get("request", place)
        if not request:
            raise InputError(f"{place}: column request is empty; name the request of every row, or drop the column")
        groups.setdefault(request, []).append((place, row))
    found = tuple(_request(index, *group, video_fps) for index, group in enumerate(groups.items()))
    if not any(request.items for request in found):
        raise InputError(
            f"{name}: no rows with a size; {_HEADER_RULE}, and each further line is an item, for example 640,480,1"
        )
    return found


def _rows(name: str, content: bytes) -> Iterator[tuple[str, dict[str, str]]]:
    """Place and cells by column of every row that is not blank."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name}: byte {error.start} is not UTF-8; save the trace as plain CSV in UTF-8 (a spreadsheet may have "
            "saved a workbook or UTF-16); for images name their folder"
        ) from error
    reader = csv.reader(io.StringIO(text, newline=""))
    header: list[str] = []
    try:
        for cells in reader:
            cells, place = [cell.strip() for cell in cells], f"{name}:{reader.line_num}"
            if not any(cells):
                continue
            if not header:
                header = _check_header(place, cells)
            elif len(cells) != len(header):
                raise InputError(
                    f"{place}: {len(cells)} values ({','.join(cells)!r}) for {len(header)} columns "
                    f"({','.join(header)}); every row needs one value a column"
                )
            else:
                yield place, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise InputError(f"{name}:{reader.line_num}: not CSV ({error}); {_HEADER_RULE}") from error
    if not header:
        raise InputError(f"{name}: no header; {_HEADER_RULE}")


def _check_header(place: str, cells: list[str]) -> list[str]:
    header = [cell.lower() for cell in cells]
    # An unknown column is refused, since a misspelt `frames` would turn videos into images without a word.
    wrong = {
        "repeated": sorted({column for column in header if header.count(column) > 1}),
        "unknown": [column for column in header if column not in _COLUMNS],
        "missing": [column for column in ("width", "height") if column not in header],
    }
    parts = [f"{word} column {', '.join(map(repr, columns))}" for word, columns in wrong.items() if columns]
    if parts:
        shown = " and ".join(parts) if len(",".join(cells)) <= _LONGEST_HEADER else "no such columns"
        raise InputError(
            f"{place}: header {','.join(cells)[:_LONGEST_HEADER]!r} has {shown}; {_HEADER_RULE}. "
            "`vitgraph workload convert` makes such a file of images and logs"
        )
    return header


def _request(index: int, name: str, rows: Rows, video_fps: float | None) -> Request:
    """A request of its rows; its call and arrival are those of the first."""
    first_place, first = rows[0]
    call = first.get("call") or None
    empty = [place for place, row in rows if "request" in row and not any(map(row.get, _SIZE_COLUMNS))]
    items = []
    for place, row in rows:
        if (row.get("call") or None) != call:
            raise InputError(
                f"{place}: request {name!r} is in call {call!r} and in {row.get('call')!r}; it can be in one only. "
                "Give its parts request names of their own"
            )
        if place not in empty:
            items.append(_item(place, row, video_fps))
    if items and empty:
        raise InputError(
            f"{empty[-1]}: columns width and height are empty, yet request {name!r} has other rows; an empty row "
            "stands for a request without items and must be its only one"
        )
    return Request(index, tuple(items), call, _arrival(first_place, first.get("arrival_s", "")))


def _item(place: str, row: dict[str, str], video_fps: float | None) -> MediaItem:
    sizes: dict[str, Any] = {column: row[column] for column in _SIZE_COLUMNS if column in row}
    sizes |= {column: int(text) for column, text in sizes.items() if _INTEGER.fullmatch(text)}
    fps: Any = row.get("fps") or video_fps
    return MediaItem(**sizes, fps=_number(fps) if is_rate(_number(fps)) else fps, source=place)


def _number(text: Any) -> float:
    """NaN where the text is no number."""
    try:
        return float(text)
    except (TypeError, ValueError):
        return math.nan


def _arrival(place: str, text: str) -> float | None:
    # Seconds since 1970 in nanoseconds, say, are of another unit.
    if text and not abs(_number(text)) <= MOST_SECONDS:
        raise InputError(f"{place}: column arrival_s is {text!r}; it must be a number of seconds, for example 12.5")
    return _number(text) if text else None


def _shrunk(request: Request, max_pixels: int) -> Request:
    sizes = [shrink_size(item.width, item.height, max_pixels) for item in request.items]
    items = [replace(item, width=size[0], height=size[1]) for item, size in zip(request.items, sizes, strict=True)]
    return replace(request, items=tuple(items))
