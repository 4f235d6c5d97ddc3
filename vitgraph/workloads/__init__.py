"""Requests to encode: random-mm, hub and local data sets, size traces."""

from vitgraph.specs import WorkloadSpec
from vitgraph.workloads.base import MediaItem, Request, SkippedItem, Workload
from vitgraph.workloads.encoded_image import EncodedImage
from vitgraph.workloads.image_folder import convert_folder
from vitgraph.workloads.registry import WORKLOAD_BUILDERS, build_workload
from vitgraph.workloads.trace import SHIPPED_TRACES, save_trace

__all__ = [
    "SHIPPED_TRACES",
    "WORKLOAD_BUILDERS",
    "EncodedImage",
    "MediaItem",
    "Request",
    "SkippedItem",
    "Workload",
    "WorkloadSpec",
    "build_workload",
    "convert_folder",
    "save_trace",
]
