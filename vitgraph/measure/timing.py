"""Timing of one encoder call: wall clock between two synchronisations, and GPU time by events."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class CallTime:
    """One measured call.

    Attributes:
        wall_ms: Wall clock from the synchronisation before the call to the one after it.
        gpu_ms: Time between two events around the call on the device; None on a CPU.
        encode_ms: Of one rank's part of a call, encoding its share; else None.
        gather_ms: From the end of that to the end of the gather here.
    """

    wall_ms: float
    gpu_ms: float | None
    encode_ms: float | None = None
    gather_ms: float | None = None


class CallTimer:
    """Times calls on one device; its events are made once."""

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
