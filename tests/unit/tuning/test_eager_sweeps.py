"""Eager calls timed in sweeps, on a host that something slows down for a while: nothing is really timed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.measure.series import CallTime
from vitgraph.measure.setup import resolve_source
from vitgraph.models.encoder import VisionEncoder
from vitgraph.planning.packing import PackedBatch
from vitgraph.predict.profile import CalibrationProfile
from vitgraph.records.calibrate_result import Timing
from vitgraph.specs.parts import ModelSpec
from vitgraph.tuning import calibration
from vitgraph.tuning.calibration import calibrate
from vitgraph.tuning.calibration_items import ItemCatalogue, SizedItem
from vitgraph.tuning.device_timing import DeviceTiming
from vitgraph.tuning.host_watch import Call, EagerSweeps

LAUNCH_MS, PER_TOKEN_MS, SLOWDOWN = 15.0, 0.02, 1.7


class Host:
    """Eager calls take the longer of their launches and their device time; some launches, counted, are slow.

    Args:
        slow: Places of the slow calls among all that are timed.
    """

    def __init__(self, slow: range = range(0)) -> None:
        self.slow = slow
        self.timed: list[int] = []

    def eager(self, items: Call, share: float = 1.0) -> Timing:
        tokens = sum(item.spec.output_tokens for item in items)
        launch_ms = LAUNCH_MS * (SLOWDOWN if len(self.timed) in self.slow else 1.0)
        self.timed.append(tokens)
        ms = max(launch_ms, PER_TOKEN_MS * tokens)
        return Timing(ms, ms, ms, 3)


def undisturbed_ms(tokens: int) -> float:
    return max(LAUNCH_MS, PER_TOKEN_MS * tokens)


@pytest.fixture(scope="module")
def calls() -> list[Call]:
    catalogue = ItemCatalogue(resolve_source(ModelSpec("qwen3-vl-30b-a3b")).rule(), 8192)
    return [catalogue.fill("default", budget) for budget in (64, 128, 256, 512, 1024, 2048, 4096, 8192)]


def swept(host: Host, calls: Sequence[Call]) -> EagerSweeps:
    sweeps = EagerSweeps(host.eager)
    sweeps.sweep("early", calls, is_late=lambda: False, tick=lambda: None, ends_device_bound=True)
    sweeps.sweep("main", calls, is_late=lambda: False, tick=lambda: None)
    return sweeps


@pytest.mark.parametrize("slow", [range(6), range(7, 16), range(5, 11)], ids=["early", "main", "between"])
def test_each_call_keeps_the_timing_of_the_undisturbed_host(calls: list[Call], slow: range) -> None:
    for point in swept(Host(slow), calls).points(calls):
        assert point.time.ms == undisturbed_ms(sum(spec.output_tokens for spec in point.items))


def test_a_host_that_moved_is_named_with_both_times(calls: list[Call]) -> None:
    sweeps = swept(Host(range(7, 16)), calls)
    assert sweeps.movement_ms() == (LAUNCH_MS, LAUNCH_MS * SLOWDOWN)
    note = sweeps.note()
    assert note is not None
    assert "15.0 ms at one time and 25.5 ms at another" in note


def test_a_calm_host_is_not_mentioned(calls: list[Call]) -> None:
    sweeps = swept(Host(), calls)
    assert sweeps.movement_ms() is None
    assert sweeps.note() is None


def test_few_fast_timings_tell_of_a_host_that_was_slow_in_both_sweeps(calls: list[Call]) -> None:
    sweeps = swept(Host(range(100)), calls)
    assert sweeps.note() is None
    for call in calls[:3]:
        sweeps.add("beside", call, Host().eager(call))
    assert sweeps.movement_ms() == (LAUNCH_MS, LAUNCH_MS * SLOWDOWN)


def test_calls_bound_by_the_device_are_timed_once(calls: list[Call]) -> None:
    host = Host()
    sweeps = swept(host, calls)
    twice = {tokens for tokens in host.timed if host.timed.count(tokens) == 2}
    assert max(twice) < 2500
    assert min(set(host.timed) - twice) > 4000
    assert [sum(item.spec.output_tokens for item in call) for call in sweeps.host_bound()] == host.timed[:5]


def test_a_sweep_ends_when_the_time_is_up(calls: list[Call]) -> None:
    sweeps = EagerSweeps(Host().eager)
    sweeps.sweep("main", calls, is_late=lambda: len(sweeps) >= 3, tick=lambda: None)
    assert len(sweeps.points(calls)) == 3


def profile_on(host: Host, tower: VisionEncoder, monkeypatch: pytest.MonkeyPatch) -> CalibrationProfile:
    """A calibration whose eager times are the host's; replays and whole calls take none."""
    beside_eager = DeviceTiming.beside_eager

    def beside(
        timing: DeviceTiming,
        manager: EncoderCudaGraphManager,
        items: list[SizedItem],
        batches: Sequence[PackedBatch] | None = None,
        share: float = 1.0,
    ) -> tuple[Timing, Timing]:
        if batches is None:
            return beside_eager(timing, manager, items, share=share)
        found = host.eager(items)
        return found, found

    monkeypatch.setattr(DeviceTiming, "eager", lambda timing, items, share=1.0: host.eager(items, share))
    monkeypatch.setattr(DeviceTiming, "beside_eager", beside)
    monkeypatch.setattr("vitgraph.measure.series.CallTimer.time", lambda timer, call: CallTime(1.5, None))
    monkeypatch.setattr("vitgraph.tuning.device_timing.SECONDS_A_POINT", 0.0)
    monkeypatch.setattr("vitgraph.tuning.device_timing.FEWEST_REPEATS", 1)
    model = {"name": "qwen3-vl-debug", "row": "qwen3_vl"}
    return calibrate(
        tower,
        max_tokens=300,
        model=model,
        budgets=(64, 128, 256),
        slots=(2,),
        holdout_calls=2,
        time_limit_s=math.inf,
    )


@pytest.mark.slow
def test_calibration_on_a_host_that_slows_down_keeps_its_own_times(
    tower: VisionEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(range(3, 100))
    profile = profile_on(host, tower, monkeypatch)
    assert {point.time.ms for point in profile.eager} == {LAUNCH_MS}
    assert [note for note in profile.notes if "eager times move" in note]
    assert len(host.timed) == 3 + 3 + 1 + 3  # The early, the main and the last sweep, and one call beside misses.


def test_the_first_stage_alone_has_eager_times(tower: VisionEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []

    def stop(run: calibration._Calibration) -> list[Call]:
        found.append(len(run.profile.eager))
        raise RuntimeError("far enough")

    monkeypatch.setattr(calibration._Calibration, "_measure_eager", stop)
    with pytest.raises(RuntimeError, match="far enough"):
        profile_on(Host(), tower, monkeypatch)
    assert found == [3]
