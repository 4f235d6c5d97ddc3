"""Which builder makes which kind of workload, and the sizes of images and logs, which a trace can hold without them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from vitgraph.errors import InputError, UsageError
from vitgraph.reading import is_file, is_folder, unpacked
from vitgraph.specs.parts import WorkloadSpec
from vitgraph.workloads.base import Workload
from vitgraph.workloads.encoded_image import read_folder
from vitgraph.workloads.hub_sets import parquet_files
from vitgraph.workloads.images import build_hf
from vitgraph.workloads.random_mm import build_random_mm
from vitgraph.workloads.request_log import read_json_log, read_text_log
from vitgraph.workloads.trace import SHIPPED_TRACES, build_trace

WORKLOAD_BUILDERS: dict[str, Callable[[WorkloadSpec], Workload]] = {
    "random-mm": build_random_mm,
    "hf": build_hf,
    "trace": build_trace,
}

AUTO, HF, IMAGES, JSON_LINES, TEXT = "auto", "hf", "images", "json-lines", "text"
KINDS = (AUTO, HF, IMAGES, JSON_LINES, TEXT)
DEFAULT_HF_REQUESTS = 1000
_FILE_ENDINGS = (".parquet", ".jsonl", ".ndjson", ".json", ".log", ".txt", ".csv", ".gz")


def build_workload(spec: WorkloadSpec) -> Workload:
    """Builds the workload that the options ask for.

    Raises:
        UsageError: If an option is out of range, contradicts the kind of workload, or the kind is unknown.
        InputError: If the source cannot be read or holds nothing usable.
    """
    builder = WORKLOAD_BUILDERS.get(spec.dataset_name)
    if builder is None:
        raise UsageError(f"--dataset-name is {spec.dataset_name!r}; {_name_rule(spec.dataset_name)}")
    if spec.dataset_name == "trace" and _holds_images(spec.dataset_path):
        spec, builder = replace(spec, dataset_name="hf"), build_hf
    _check_bounds(spec)
    return builder(spec)


def _holds_images(path: str | None) -> bool:
    """Whether what is named as a trace is a folder or a file of images: who names one means it."""
    if path is None or path in SHIPPED_TRACES:
        return False
    return path.endswith(".parquet") or is_folder(Path(path).expanduser())


def _name_rule(given: str) -> str:
    rule = f"known are {', '.join(WORKLOAD_BUILDERS)}"
    if given in SHIPPED_TRACES:
        return f"{rule}; for the shipped trace use --dataset-name trace --dataset-path {given}"
    if "/" in given:
        return f"{rule}; for a data set use --dataset-name hf --dataset-path {given}"
    near = difflib.get_close_matches(given, WORKLOAD_BUILDERS, n=1)
    return f"{rule}; did you mean {near[0]!r}?" if near else rule


def _check_bounds(spec: WorkloadSpec) -> None:
    """Refuses options that the kind of workload would pass over without a word."""
    pixels = spec.max_pixels_per_item
    if pixels is not None and spec.dataset_name == "random-mm":
        raise UsageError(
            f"--max-pixels-per-item is {pixels}, which random-mm does not take, since its buckets already name the "
            "sizes; write smaller sizes in --random-mm-bucket-config"
        )
    if spec.video_fps is not None and spec.dataset_name != "trace":
        raise UsageError(
            f"--video-fps is {spec.video_fps}, which only --dataset-name trace takes; videos of random-mm are files "
            "of 30 frames a second and hf reads images"
        )
    if spec.shuffle_trace and spec.dataset_name != "trace":
        raise UsageError(
            f"--shuffle-trace is set, which only --dataset-name trace takes; {spec.dataset_name} is shuffled or drawn "
            "with the seed anyway"
        )


def convert_source(
    source: str,
    *,
    kind: str = AUTO,
    pattern: str | None = None,
    height_first: bool = False,
    fields: Mapping[str, str] | None = None,
    num_requests: int | None = None,
    spec: WorkloadSpec | None = None,
) -> Workload:
    """Reads the sizes of a source as a workload without warm-ups.

    Args:
        source: Folder of images, data set (hub id, folder of parquet files or one of them), or log file.
        kind: What it is, one of `KINDS`; `auto` looks.
        pattern: Where a text log names sizes, see `read_text_log`; given, the source is a text log.
        height_first: Pairs in a JSON log are height before width.
        fields: The JSON log's own names of sizes, see `read_json_log`.
        num_requests: Requests wanted; None takes 1,000 rows of a data set and everything of other sources.
        spec: Options of a data set (subset, split, seed, order).

    Raises:
        UsageError: An option that contradicts the kind.
        InputError: The source cannot be found or read, or holds no usable size.
    """
    if kind not in KINDS:
        raise UsageError(f"--kind is {kind!r}; known: {', '.join(KINDS)}")
    if num_requests is not None and num_requests < 1:
        raise UsageError(f"--num-prompts is {num_requests}; it must be at least 1")
    chosen = _detect_kind(source, pattern is not None) if kind == AUTO else kind
    if (pattern is None) == (chosen == TEXT):
        given = f"--pattern is given, but {source} is read as {chosen}" if pattern else f"{source} is a text log"
        raise UsageError(f"{given}; a text log needs a --pattern, for example 'size=WxH', and nothing else takes one")
    for option in ("--height-first",) * height_first + ("--fields",) * bool(fields):
        if chosen != JSON_LINES:
            raise UsageError(f"{option} concerns JSON lines, but {source} is read as {chosen}")
    if chosen == HF:
        wanted = DEFAULT_HF_REQUESTS if num_requests is None else num_requests
        options = replace(
            spec or WorkloadSpec(), dataset_name="hf", dataset_path=source, num_prompts=wanted, num_warmups=0
        )
        return build_workload(replace(options, no_oversample=True))
    path = Path(source).expanduser()
    if chosen == IMAGES:
        workload = read_folder(path)
    elif chosen == TEXT:
        workload = read_text_log(path, pattern or "")
    else:
        workload = read_json_log(path, height_first=height_first, fields=fields)
    return replace(workload, requests=workload.requests[:num_requests])


def _detect_kind(source: str, has_pattern: bool) -> str:
    path = Path(source).expanduser()
    if is_folder(path):
        return HF if parquet_files(path) else IMAGES
    if has_pattern:
        return TEXT
    if is_file(path):
        if path.suffix == ".parquet":
            return HF
        with unpacked(path, "log") as file:
            start = file.read(4096)
        start = start.decode("utf-16" if start[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig", errors="replace")
        if start.lstrip().startswith(("{", "[")):
            return JSON_LINES
        raise UsageError(
            f"{source} is no parquet file and does not start with a JSON object; for a text log say where its sizes "
            "are, for example --pattern 'size=WxH' (a CSV of sizes is a trace already: --dataset-name trace), and "
            "for images name their folder"
        )
    if source.count("/") == 1 and path.suffix not in _FILE_ENDINGS and not is_folder(path.parent):
        return HF
    raise InputError(
        f"{source} does not exist; name a folder of images, a log file, a folder of parquet files or one of them, or a "
        "hub data set as owner/name"
    )
