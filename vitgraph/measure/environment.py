"""What a run was measured on: device, driver, libraries, clocks, throttling, other users of the GPU."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable
from importlib import metadata
from typing import Any

import torch

from vitgraph.ranks.launch import OWN_PROCESSES
from vitgraph.records.sections import Environment, GpuState

LIBRARIES = (
    "torch",
    "transformers",
    "datasets",
    "triton",
    "flash-attn",
    "flash-attn-4",
    "flashinfer-python",
    "nvidia-cudnn-frontend",
    "nvidia-cudnn-cu13",
)

_GPU_QUERY = (
    "name",
    "driver_version",
    "power.limit",
    "power.draw",
    "temperature.gpu",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "clocks_event_reasons.hw_slowdown",
    "clocks_event_reasons.hw_thermal_slowdown",
    "clocks_event_reasons.sw_thermal_slowdown",
    "clocks_event_reasons.sw_power_cap",
)


def library_versions() -> dict[str, str | None]:
    """Installed version of each library that matters to a result; None where it is not installed."""
    versions: dict[str, str | None] = {}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def read_gpu_state(device: torch.device) -> GpuState | None:
    """Reads clocks, power, throttling and other processes; None without a GPU or without `nvidia-smi`."""
    if device.type != "cuda":
        return None
    index = str(device.index if device.index is not None else torch.cuda.current_device())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        index = visible.split(",")[int(index)].strip()
    answer = _nvidia_smi("--query-gpu=" + ",".join(_GPU_QUERY), "--id=" + index)
    if answer is None:
        return None
    values = dict(zip(_GPU_QUERY, (value.strip() for value in answer.split(",")), strict=False))
    apps = _nvidia_smi("--query-compute-apps=pid", "--id=" + index) or ""
    pids = {int(line) for line in apps.splitlines() if line.strip().isdigit()}
    return GpuState(values=values, other_processes=len(pids - OWN_PROCESSES - {os.getpid()}))


def _nvidia_smi(*arguments: str) -> str | None:
    try:
        result = subprocess.run(
            ["nvidia-smi", "--format=csv,noheader,nounits", *arguments],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def snapshot(device: torch.device) -> Environment:
    """Device, host and libraries; the encoder is not known yet."""
    facts: dict[str, Any] = {"device": "CPU"}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts = {
            "device": properties.name,
            "gpu_memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    state = read_gpu_state(device)
    return Environment(
        **facts,
        device_type="cuda" if device.type == "cuda" else "cpu",
        python=platform.python_version(),
        platform=platform.platform(),
        cpu=platform.processor() or platform.machine(),
        cpu_count=os.cpu_count(),
        libraries=library_versions(),
        gpu_states=() if state is None else (state,),
    )


def validity_problems(states: Iterable[GpuState | None]) -> list[str]:
    """Reasons why figures measured between these readings are invalid; empty where there are none."""
    problems = []
    for state in states:
        if state is None:
            continue
        if state.throttled_by:
            problems.append(f"the GPU was throttled ({', '.join(state.throttled_by)})")
        if state.other_processes:
            problems.append(f"{state.other_processes} other process(es) computed on the GPU")
    return sorted(set(problems))
