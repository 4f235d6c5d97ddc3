"""Which builder makes which kind of workload, and the checks that all kinds share."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from vitgraph.errors import UsageError
from vitgraph.reading import is_folder
from vitgraph.specs import WorkloadSpec
from vitgraph.workloads.base import Workload
from vitgraph.workloads.images import build_hf
from vitgraph.workloads.random_mm import build_random_mm
from vitgraph.workloads.trace import SHIPPED_TRACES, build_trace

WORKLOAD_BUILDERS: dict[str, Callable[[WorkloadSpec], Workload]] = {
    "random-mm": build_random_mm,
    "hf": build_hf,
    "trace": build_trace,
}


def build_workload(spec: WorkloadSpec) -> Workload:
    """Builds the workload that the options ask for.

    Args:
        spec: The options.

    Returns:
        The workload.

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
