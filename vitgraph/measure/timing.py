"""Timing of one encoder call: wall clock between two synchronisations, and GPU time by events."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class CallTime:
    """One measured call.

    Attributes:
        wall_ms: Wall clock from the synchronisation before the call to the one after it.
        gpu_ms: Time between two events around the call on the device; None on a CPU.
    """

    wall_ms: float
    gpu_ms: float | None


class CallTimer:
    """Times calls on one device; its events are made once.

    Args:
        device: Where the calls run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events = (
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            if device.type == "cuda"
            else None
        )

    def time(self, call: Callable[[], object]) -> CallTime:
        """Runs `call` once and times it; its result is dropped."""
        if self._events is None:
            started = time.perf_counter()
            call()
            return CallTime((time.perf_counter() - started) * 1e3, None)
        start, end = self._events
        torch.cuda.synchronize(self._device)
        started = time.perf_counter()
        start.record()
        result = call()
        end.record()
        torch.cuda.synchronize(self._device)
        wall_ms = (time.perf_counter() - started) * 1e3
        del result
        return CallTime(wall_ms, start.elapsed_time(end))

    def median_ms(self, call: Callable[[], object], repeats: int, limit_ms: float = math.inf) -> float:
        """Median wall clock of up to `repeats` calls; of fewer, but at least 3, once they took `limit_ms` together."""
        times: list[float] = []
        while len(times) < repeats and (len(times) < 3 or sum(times) < limit_ms):
            times.append(self.time(call).wall_ms)
        return sorted(times)[len(times) // 2]


MATMUL_SIZE = 8192
MATMUL_REPEATS = 10


def matrix_rate_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Floating-point operations a second of a large matrix product on random data; None on a CPU.

    It is the unit of `speed of light`; measured in the run, because it depends on the card, its power limit and clocks.
    """
    if device.type != "cuda":
        return None
    left = torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=device, dtype=dtype)
    right = torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=device, dtype=dtype)
    timer = CallTimer(device)
    for _ in range(3):
        torch.mm(left, right)
    times = sorted(timer.time(lambda: torch.mm(left, right)).gpu_ms or 0.0 for _ in range(MATMUL_REPEATS))
    return 2.0 * MATMUL_SIZE**3 / (times[len(times) // 2] * 1e-3)


@dataclass(frozen=True, slots=True)
class BusyTime:
    """What a profiler trace says of one call, averaged over its repeats.

    Attributes:
        busy_ms: Time in which at least one kernel or copy ran.
        span_ms: From the start of the call's first kernel to the end of its last; None where the trace does not split
            evenly into the repeats. Both come from one trace, so a change of clocks cancels in their ratio.
        kernels: Kernels and copies.
    """

    busy_ms: float
    span_ms: float | None
    kernels: int


def busy_time(call: Callable[[], object], device: torch.device, repeats: int) -> BusyTime | None:
    """GPU-busy time of a call, from a profiler trace; None on a CPU, or where the profiler saw nothing."""
    if device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize(device)
    # There is one cycle, and without the last argument torch warns that it keeps no other.
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(repeats):
            call()
            torch.cuda.synchronize(device)
    intervals = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    return summarize_trace(intervals, repeats)


def summarize_trace(intervals: Sequence[tuple[float, float]], repeats: int) -> BusyTime | None:
    """Busy time and span of one repeat, from the `(start, end)` of every kernel in microseconds, in order of start."""
    if not intervals:
        return None
    per_repeat, rest = divmod(len(intervals), repeats)
    spans = [intervals[i : i + per_repeat] for i in range(0, len(intervals), per_repeat)] if not rest else []
    span = sum(max(end for _, end in chunk) - chunk[0][0] for chunk in spans)
    busy, busy_until = 0.0, intervals[0][0]
    for start, end in intervals:
        busy += max(0.0, end - max(start, busy_until))
        busy_until = max(busy_until, end)
    return BusyTime(busy / repeats / 1e3, span / repeats / 1e3 if spans else None, round(len(intervals) / repeats))
