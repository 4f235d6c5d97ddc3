"""Watches the host while a calibration runs: whether it is slow, and whether its speed changes meanwhile.

Short eager calls are bound by the host, so that a slow host makes eager slow and graphs look better than they are. They
are timed in sweeps that lie apart, and the fastest timing of each call is kept: when something else runs on the host's
core for seconds, what slows a call down so is not the encoder's; and where eager is taken to be faster than it mostly
is, graphs that would only just win are not used, which is the safe side for a promise never to be slower than eager.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from vitgraph.measure.trace import BusyTime
from vitgraph.predict.doubt import REFERENCE_LAUNCH_US
from vitgraph.records.calibrate_result import EagerPoint, HostCheck, Timing
from vitgraph.tuning.calibration_items import SizedItem

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
        """What is known of the host by now."""
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


Call = Sequence[SizedItem]

HOST_BOUND = 2.25
"""A call below this multiple of the shortest may be bound by the host: a slow host was seen to double a call's time."""

MOVED = 1.15
"""The host has moved where two sweeps' times of the same calls differ by this factor, in the median over calls."""

FEWEST_SHARED = 3
"""Calls that two sweeps must share to be compared."""


class EagerSweeps:
    """Timings of eager calls, at most one for each call and sweep."""

    def __init__(self, time_call: Callable[[Call, float], Timing]) -> None:
        self._time_call = time_call
        self._calls: dict[Hashable, Call] = {}
        self._sweeps: dict[str, dict[Hashable, Timing]] = defaultdict(dict)

    def __len__(self) -> int:
        """Calls that have a timing."""
        return len(self._calls)

    def add(self, name: str, call: Call, timing: Timing) -> None:
        """Takes in a call's timing as part of a sweep."""
        self._calls.setdefault(_key(call), call)
        self._sweeps[name][_key(call)] = timing

    def sweep(
        self,
        name: str,
        calls: Iterable[Call],
        *,
        is_late: Callable[[], bool],
        tick: Callable[[], None],
        share: float = 1.0,
        ends_device_bound: bool = False,
    ) -> None:
        """Times calls one after the other, until the time is up.

        Args:
            name: Of this sweep, unlike those before.
            is_late: Whether the time is up; asked before every call.
            ends_device_bound: Ends after the first call that is clearly bound by the device; for ascending calls.
        """
        shortest_ms = np.inf
        for call in calls:
            if is_late():
                return
            timing = self._time_call(call, share)
            self.add(name, call, timing)
            tick()
            shortest_ms = min(shortest_ms, timing.ms)
            if ends_device_bound and timing.ms > HOST_BOUND * shortest_ms:
                return

    def points(self, calls: Iterable[Call] | None = None) -> list[EagerPoint]:
        """Those of the calls that were timed, or all that were, each with its fastest timing."""
        return [
            EagerPoint(tuple(item.spec for item in call), self._fastest(_key(call)))
            for call in (self._calls.values() if calls is None else calls)
            if _key(call) in self._calls
        ]

    def fastest_ms(self, call: Call | None) -> float | None:
        """What a call takes at least; None without one."""
        return None if call is None else self._fastest(_key(call)).ms

    def host_bound(self) -> list[Call]:
        """Calls that a slow host may have slowed down."""
        fastest_ms = {key: self._fastest(key).ms for key in self._calls}
        limit_ms = HOST_BOUND * min(fastest_ms.values(), default=0.0)
        return [call for key, call in self._calls.items() if fastest_ms[key] < limit_ms]

    def movement_ms(self) -> tuple[float, float] | None:
        """How far the host's speed has moved.

        Returns:
            Medians of the same host-bound calls in two sweeps, the faster first, of those two that differ most; None
            where no two differ by more than `MOVED`.
        """
        host_bound = {_key(call) for call in self.host_bound()}
        found, largest = None, MOVED
        for one, other in combinations(self._sweeps.values(), 2):
            shared = host_bound & one.keys() & other.keys()
            if len(shared) < FEWEST_SHARED:
                continue
            times = np.array([(one[key].ms, other[key].ms) for key in shared])
            ratio = float(np.median(times[:, 1] / times[:, 0]))
            if max(ratio, 1.0 / ratio) > largest:
                largest = max(ratio, 1.0 / ratio)
                fast, slow = sorted(np.median(times, axis=0))
                found = float(fast), float(slow)
        return found

    def note(self) -> str | None:
        """How far the host's eager times have moved, in words; None where it was calm."""
        movement = self.movement_ms()
        if movement is None:
            return None
        return (
            f"this host's eager times move: the same short calls took {movement[0]:.1f} ms at one time and "
            f"{movement[1]:.1f} ms at another (medians), so something else uses its cores; the faster times were kept"
        )

    def _fastest(self, key: Hashable) -> Timing:
        return min((sweep[key] for sweep in self._sweeps.values() if key in sweep), key=lambda timing: timing.ms)


def _key(call: Call) -> Hashable:
    return tuple(item.geometry for item in call)
