"""Requests to encode: random-mm, hub and local data sets, size traces."""

from vitgraph.specs import WorkloadSpec
from vitgraph.workloads.base import MediaItem, Request, SkippedItem, Workload
from vitgraph.workloads.encoded_image import EncodedImage
from vitgraph.workloads.images import convert_folder
from vitgraph.workloads.random_mm import parse_bucket_config, parse_limit_mm_per_prompt
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
    "parse_bucket_config",
    "parse_limit_mm_per_prompt",
    "save_trace",
]
