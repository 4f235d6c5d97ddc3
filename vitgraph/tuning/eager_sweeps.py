"""Times eager calls in sweeps that lie apart, and keeps the fastest timing of each call.

A short eager call is bound by the host, whose speed may change for seconds when something else runs on its core. What
slows a call down so is not the encoder's; and where eager is taken to be faster than it mostly is, graphs that would
only just win are not used, which is the safe side for a promise never to be slower than eager.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations

import numpy as np

from vitgraph.records.kinds.calibrate import EagerPoint, Timing
from vitgraph.tuning.calibration_items import SizedItem

Call = Sequence[SizedItem]

HOST_BOUND = 2.25
"""A call below this multiple of the shortest may be bound by the host: a slow host was seen to double a call's time."""

MOVED = 1.15
"""The host has moved where two sweeps' times of the same calls differ by this factor, in the median over calls."""

FEWEST_SHARED = 3
"""Calls that two sweeps must share to be compared."""


class EagerSweeps:
    """Timings of eager calls, at most one for each call and sweep.

    Args:
        time_call: Times one call in a share of the usual time.
    """

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
            calls: What to time, in this order.
            is_late: Whether the time is up; asked before every call.
            tick: Called after each call.
            share: Share of the usual time to spend on each call.
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
