"""Size traces: CSV files of item sizes, read as requests, written from a workload, and the ones that are shipped."""

from __future__ import annotations

import csv
import difflib
import functools
import hashlib
import io
import math
import re
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from vitgraph.errors import InputError, UsageError
from vitgraph.reading import MOST_BYTES, is_file
from vitgraph.records.store import write_file
from vitgraph.specs import WorkloadSpec
from vitgraph.workloads.base import (
    RATE_RULE,
    MediaItem,
    Provenance,
    Request,
    Workload,
    choose_warmups,
    is_rate,
    shrink_size,
)
from vitgraph.workloads.request_log import unpacked

TRACE_FOLDER = Path(__file__).with_name("traces")
DEFAULT_TRACE = "mixed-chat"


@dataclass(frozen=True)
class ShippedTrace:
    """A size trace that comes with the package.

    Attributes:
        statement: What it is and is not; travels with every result.
        video_fps: Frame rate assumed for its videos, whose source names none.
    """

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
_POSITIVE_INTEGER = re.compile(r"0*[1-9][0-9]{0,8}", re.ASCII)
_HEADER_RULE = (
    "the first line must name the columns width,height and, where needed, frames, request, fps, call and arrival_s"
)


def resolve_trace_path(name_or_path: str | None) -> tuple[Path, str | None]:
    """Finds a trace by shipped name or by path.

    Args:
        name_or_path: A name of `SHIPPED_TRACES`, which wins over a file of that name here (write `./name` for the
            file), or the path of a CSV file. None is the default trace.

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

    Args:
        spec: The options; `dataset_path` names the trace.

    Returns:
        The workload.

    Raises:
        InputError: If the trace cannot be found or read, or a row is not what it must be.
    """
    path, shipped = resolve_trace_path(spec.dataset_path)
    assumed_fps = SHIPPED_TRACES[shipped].video_fps if shipped else None
    video_fps = assumed_fps if spec.video_fps is None else spec.video_fps
    content = _read_bytes(path)
    found = list(_parse_requests(path.name, content, video_fps))
    num_shrunk = 0
    if spec.max_pixels_per_item is not None:
        found, num_shrunk = _shrink_requests(found, spec.max_pixels_per_item)
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
    """Writes the measured requests of a workload as a trace that reads back with the same fingerprint.

    The columns are width, height, frames and request; fps where a video still has file frames; call and arrival_s where
    requests name them. A request without items is a row whose sizes are empty. Warm-ups and pixels are not written.

    Args:
        workload: What to write.
        path: The CSV file.
        overwrite: Replace a file that is there.

    Returns:
        The path.

    Raises:
        UsageError: If the file exists, or no request has an item.
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
    empty = {"width": "", "height": "", "frames": "", "fps": ""}
    return [{**_item_cells(item), **of_request} for item in request.items] or [{**empty, **of_request}]


def _item_cells(item: MediaItem) -> dict[str, object]:
    rate = "" if item.fps is None else repr(float(item.fps))
    return {"width": item.width, "height": item.height, "frames": item.frames, "fps": rate}


def _read_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as raw, unpacked(raw) as file:
            content = bytes(file.read(MOST_BYTES + 1))
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot read the trace {path}: {reason}; name a CSV file that can be read") from error
    if len(content) > MOST_BYTES:
        raise InputError(f"the trace {path} has more than {MOST_BYTES:,} bytes; take a part of it")
    return content


@dataclass(slots=True)
class _Rows:
    """What the rows of one request say; `call` and `arrival_s` are those of its first row."""

    call: str | None
    arrival_s: float | None
    items: list[MediaItem] = field(default_factory=list)


@functools.lru_cache(maxsize=8)
def _parse_requests(name: str, content: bytes, video_fps: float | None) -> tuple[Request, ...]:
    """Every request, in the order in which they first appear; one command asks for the same trace several times."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name}: byte {error.start} is not UTF-8; save the trace as plain CSV in UTF-8 (a spreadsheet may have "
            "saved a workbook or UTF-16)"
        ) from error
    reader = csv.reader(io.StringIO(text, newline=""))
    header: list[str] | None = None
    groups: dict[str, _Rows] = {}
    rows_without_items: dict[str, int] = {}
    try:
        for cells in reader:
            cells = [cell.strip() for cell in cells]
            if not any(cells):
                continue
            line = reader.line_num
            if header is None:
                header = _check_header(name, line, cells)
                continue
            row = _check_row_length(name, line, header, cells)
            request = row.get("request", f"line {line}")
            if not request:
                raise InputError(
                    f"{name}:{line}: column request is empty; name the request of every row, or drop the column"
                )
            rows = groups.setdefault(request, _Rows(row.get("call") or None, _parse_arrival(f"{name}:{line}", row)))
            if rows.call != (row.get("call") or None):
                raise InputError(
                    f"{name}:{line}: request {request!r} is in call {rows.call!r} and in {row.get('call')!r}; it can "
                    "be in one only. Give its parts request names of their own"
                )
            if "request" in row and not any(row.get(column) for column in _SIZE_COLUMNS):
                rows_without_items[request] = line
                continue
            rows.items.append(_parse_item(f"{name}:{line}", row, video_fps))
    except csv.Error as error:
        raise InputError(f"{name}:{reader.line_num}: not CSV ({error}); {_HEADER_RULE}") from error
    if header is None or not any(rows.items for rows in groups.values()):
        raise InputError(
            f"{name}: no {'rows' if header else 'header'}; {_HEADER_RULE}, and each further line is an "
            "item, for example 640,480,1"
        )
    for request, line in rows_without_items.items():
        if groups[request].items:
            raise InputError(
                f"{name}:{line}: columns width and height are empty, yet request {request!r} has other rows; an empty "
                "row stands for a request without items and must be its only one"
            )
    return tuple(
        Request(index, tuple(rows.items), rows.call, rows.arrival_s) for index, rows in enumerate(groups.values())
    )


def _check_header(name: str, line: int, cells: list[str]) -> list[str]:
    header = [cell.lower() for cell in cells]
    repeated = sorted({column for column in header if header.count(column) > 1})
    unknown = [column for column in header if column not in _COLUMNS]
    missing = [column for column in ("width", "height") if column not in header]
    if repeated or unknown or missing:
        # An unknown column is refused, since a misspelt `frames` would turn videos into images without a word.
        parts = [
            f"{word} column {', '.join(map(repr, columns))}"
            for word, columns in (("repeated", repeated), ("unknown", unknown), ("missing", missing))
            if columns
        ]
        raise InputError(f"{name}:{line}: header {','.join(cells)!r} has {' and '.join(parts)}; {_HEADER_RULE}")
    return header


def _check_row_length(name: str, line: int, header: list[str], cells: list[str]) -> dict[str, str]:
    if len(cells) != len(header):
        raise InputError(
            f"{name}:{line}: {len(cells)} values ({','.join(cells)!r}) for {len(header)} columns ({','.join(header)}); "
            "every row needs one value a column"
        )
    return dict(zip(header, cells, strict=True))


def _parse_item(source: str, row: dict[str, str], video_fps: float | None) -> MediaItem:
    sizes = {}
    for column in _SIZE_COLUMNS:
        text = row.get(column, "1" if column == "frames" else "")
        if not _POSITIVE_INTEGER.fullmatch(text):
            raise InputError(
                f"{source}: column {column} is {text!r}; it must be a positive integer below 1000000000, for example "
                f"{'1 for an image' if column == 'frames' else '640'}"
            )
        sizes[column] = int(text)
    fps = _parse_fps(source, row.get("fps", "")) or video_fps
    return MediaItem(**sizes, fps=fps if sizes["frames"] > 1 else None, source=source)


def _parse_fps(source: str, text: str) -> float | None:
    if not text:
        return None
    fps = _number(text)
    if not is_rate(fps):
        raise InputError(
            f"{source}: column fps is {text!r}; it must be {RATE_RULE}, for example 29.97, or empty where frames are "
            "already sampled"
        )
    return fps


def _number(text: str) -> float:
    """NaN where the text is no number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _parse_arrival(source: str, row: dict[str, str]) -> float | None:
    text = row.get("arrival_s", "")
    if not text:
        return None
    arrival = _number(text)
    # Seconds since 1970 in nanoseconds, say, are of another unit.
    if not abs(arrival) <= MOST_SECONDS:
        raise InputError(f"{source}: column arrival_s is {text!r}; it must be a number of seconds, for example 12.5")
    return arrival


def _shrink_requests(requests: list[Request], max_pixels: int) -> tuple[list[Request], int]:
    num_shrunk = 0
    found = []
    for request in requests:
        shrunk = []
        for item in request.items:
            width, height = shrink_size(item.width, item.height, max_pixels)
            num_shrunk += (width, height) != (item.width, item.height)
            shrunk.append(MediaItem(width, height, item.frames, item.fps, item.source))
        found.append(replace(request, items=tuple(shrunk)))
    return found, num_shrunk
