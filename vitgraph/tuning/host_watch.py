"""Watches the host while a calibration runs: whether it is slow, and whether its speed changes meanwhile.

Short eager calls are bound by the host, so that a slow host makes eager slow and graphs look better than they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from vitgraph.measure.timing import BusyTime
from vitgraph.predict.doubt import REFERENCE_LAUNCH_US
from vitgraph.records.kinds.calibrate import HostCheck

LAYERS = 50
"""Small layers in a row of a look: few enough launches for the queue of a device never to fill."""

LOOKS = 3
"""Rows of which a look takes the median."""

QUICK_LOOKS = 9
"""Looks at a host that is compared with that of a profile."""

SLOWED = 1.3
"""A look is of a slowed host where it is this multiple of the fast ones, which the 10th percentile stands for."""

STRAY = 0.1
"""Share of the looks that may be slowed on a host that is steady."""

HOST_BOUND_SHARE = 0.6
"""A call is bound by the host where its kernels take at most this share of its time."""


class HostWatch:
    """Looks at the host's speed between the measurements.

    Args:
        time_layer: Host time of a small layer in µs, measured now.
    """

    def __init__(self, time_layer: Callable[[], float]) -> None:
        self._time_layer = time_layer
        self._looks_us: list[float] = []
        self._trace: BusyTime | None = None

    def look(self) -> None:
        """Times the small layer now."""
        self._looks_us.append(self._time_layer())

    def is_slowed(self) -> bool:
        """Looks, and says whether the host is slower than it is at its fast times."""
        self.look()
        return bool(self._slowed()[-1])

    def _slowed(self) -> NDArray[np.bool_]:
        looks = np.array(self._looks_us)
        return looks > SLOWED * np.percentile(looks, 10) if len(looks) else looks.astype(bool)

    def take_trace(self, trace: BusyTime | None) -> None:
        """Takes in what a trace says of a short eager call; None where there is none."""
        self._trace = trace

    def check(self, traced_ms: float | None) -> HostCheck:
        """What is known of the host by now.

        Args:
            traced_ms: What the traced call takes without tracing; None where no call was traced.
        """
        launch_us = None
        if self._trace is not None and traced_ms is not None and self._trace.kernels:
            is_host_bound = self._trace.busy_ms <= HOST_BOUND_SHARE * traced_ms
            launch_us = 1e3 * traced_ms / self._trace.kernels if is_host_bound else None
        looks, slowed = np.array(self._looks_us), self._slowed()
        is_unsteady = len(looks) > 0 and slowed.mean() > STRAY
        return HostCheck(
            launch_us=launch_us,
            reference_launch_us=REFERENCE_LAUNCH_US,
            looks=len(looks),
            layer_us=float(np.median(looks[~slowed])) if len(looks) else None,
            slowed_layer_us=float(np.median(looks[slowed])) if is_unsteady else None,
            slowed_share=float(slowed.mean()) if len(looks) else None,
        )


def host_layer_us(device: torch.device) -> float:
    """Host time of the small layer in µs, in the median of some looks."""
    look = layer_timer(device)
    look()
    return float(np.median([look() for _ in range(QUICK_LOOKS)]))


def layer_timer(device: torch.device) -> Callable[[], float]:
    """Makes a timer of the host's time for a small layer of five operations, in µs; it waits for no kernel."""
    rows, weight = torch.zeros(1, 64, device=device), torch.zeros(64, 64, device=device)

    def row_us() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        for _ in range(LAYERS):
            hidden = functional.linear(functional.layer_norm(rows, (64,)), weight)
            rows + functional.linear(functional.gelu(hidden), weight)
        return (time.perf_counter() - started) * 1e6 / LAYERS

    return lambda: float(np.median([row_us() for _ in range(LOOKS)]))
