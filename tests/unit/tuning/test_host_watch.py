"""Slow and unsteady hosts are named at once and in the record, and reach the advice: nothing is really timed."""

from __future__ import annotations

import math
from collections.abc import Callable
from io import StringIO
from itertools import count

import pytest
from rich.console import Console

from vitgraph.measure.progress import SilentProgress
from vitgraph.measure.series import CallTime
from vitgraph.measure.trace import BusyTime
from vitgraph.models.encoder import VisionEncoder
from vitgraph.predict.cost_model import CostModel
from vitgraph.predict.doubt import SLOW_LAUNCH_US, describe_profile, host_problems, model_error, profile_doubts
from vitgraph.predict.profile import CalibrationProfile, profile_of
from vitgraph.report.to_terminal import render
from vitgraph.report.views.parts import calibrate_document
from vitgraph.tuning import calibration, device_timing
from vitgraph.tuning.calibration import calibrate
from vitgraph.tuning.device_timing import DeviceTiming
from vitgraph.tuning.host_watch import HostWatch

KERNELS = 250


def watched(looks_us: list[float], traced_ms: float | None = None, busy_ms: float = 2.0) -> dict[str, str]:
    """What is wrong with a host that was looked at, and that ran a short eager call."""
    times = iter(looks_us)
    host = HostWatch(lambda: next(times))
    for _ in looks_us:
        host.look()
    host.take_trace(None if traced_ms is None else BusyTime(busy_ms, traced_ms, KERNELS))
    return host_problems(host.check(traced_ms))


@pytest.mark.parametrize("eager_ms", [9.0, 12.6, 14.5])
def test_a_usual_host_is_not_mentioned(eager_ms: float) -> None:
    assert watched([70.0, 74.0, 71.0, 69.0] * 10, eager_ms) == {}


@pytest.mark.parametrize("eager_ms", [25.0, 43.5])
def test_a_host_that_is_slow_throughout_is_named_with_the_reference(eager_ms: float) -> None:
    problems = watched([120.0] * 40, eager_ms)
    assert list(problems) == ["slow"]
    assert f"{eager_ms / KERNELS * 1e3:.0f} µs a kernel in short eager calls, where H200 hosts took 45" in str(problems)


def test_a_call_that_the_device_binds_says_nothing_of_the_host() -> None:
    assert watched([70.0] * 10, traced_ms=30.0, busy_ms=28.0) == {}


@pytest.mark.parametrize("slowed", [5, 20, 35])
def test_a_host_in_two_states_is_named_with_both(slowed: int) -> None:
    problems = watched([70.0] * (40 - slowed) + [120.0] * slowed)
    assert list(problems) == ["unsteady"]
    assert "took it 70 µs at most times and 120 µs" in problems["unsteady"]
    assert f"in {slowed / 40:.0%} of 40 looks" in problems["unsteady"]


def test_a_stray_look_does_not_make_a_host_unsteady() -> None:
    assert watched([70.0] * 39 + [300.0]) == {}


class Machine:
    """A machine whose eager calls take as long as its host needs, and replays a tenth of it; nothing is measured.

    Args:
        host_ms: Host time of an eager call, by how many calls were timed before.
        kernels: Of an eager call.
    """

    def __init__(self, host_ms: Callable[[int], float], kernels: int = KERNELS) -> None:
        self.host_ms, self.kernels = host_ms, kernels
        self._timed = count()

    def eager_ms(self) -> float:
        return self.host_ms(next(self._timed))

    def calibrate(
        self, tower: VisionEncoder, monkeypatch: pytest.MonkeyPatch, progress: SilentProgress
    ) -> CalibrationProfile:
        """A calibration on this machine."""

        def time_call(timer: object, call: Callable[[], object]) -> CallTime:
            is_eager = "encode_eagerly" in getattr(call, "__code__", time_call.__code__).co_names
            return CallTime(self.eager_ms() if is_eager else 1.5, None)

        trace = BusyTime(1.0, 10.0, self.kernels)
        monkeypatch.setattr(DeviceTiming, "trace", lambda timing, items: trace)
        monkeypatch.setattr("vitgraph.measure.series.CallTimer.time", time_call)
        monkeypatch.setattr(calibration, "layer_timer", lambda device: lambda: 5.0 * self.host_ms(next(self._timed)))
        monkeypatch.setattr(device_timing, "SECONDS_A_POINT", 0.0)
        monkeypatch.setattr(device_timing, "FEWEST_REPEATS", 1)
        model = {"name": "qwen3-vl-debug", "row": "qwen3_vl"}
        return calibrate(
            tower,
            max_tokens=130,
            model=model,
            budgets=(64, 128),
            slots=(2,),
            holdout_calls=6,
            time_limit_s=math.inf,
            progress=progress,
        )


def test_a_slow_host_is_told_before_the_end_and_doubted(tower: VisionEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    progress = SilentProgress()
    profile = Machine(lambda timed: 25.0).calibrate(tower, monkeypatch, progress)
    assert [note for note in progress.notes if note.startswith("a slow host: 100 µs a kernel")]
    kept = profile_of(profile.to_record())
    assert kept.host == profile.host is not None
    assert [doubt for doubt in profile_doubts(kept, model_error(CostModel(kept))) if "a slow host" in doubt]
    console = Console(width=160, record=True, file=StringIO())
    render(calibrate_document(describe_profile(kept)), console)
    shown = console.export_text()
    assert "100 µs a kernel of short eager calls (usual hosts: 45)" in shown
    assert "measure it first: the profile is of a slow host" in shown


def test_a_host_that_slows_down_is_told_once_and_its_held_out_calls_are_doubted(
    tower: VisionEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = SilentProgress()
    profile = Machine(lambda timed: 10.0 if timed < 20 else 17.0).calibrate(tower, monkeypatch, progress)
    assert len([note for note in progress.notes if "unsteady" in note]) == 1
    assert profile.host is not None and profile.host.slowed_layer_us == 85.0
    doubts = profile_doubts(profile, model_error(CostModel(profile)))
    assert [doubt for doubt in doubts if "misses its own eager calls" in doubt]
    assert set(profile.notes) >= set(host_problems(profile.host).values())


@pytest.mark.parametrize("slow", [(0.9, 0.95), (0.7, 1.3)])
@pytest.mark.slow
def test_a_host_that_is_slow_for_a_while_leaves_its_mark_on_no_held_out_call(
    tower: VisionEncoder, monkeypatch: pytest.MonkeyPatch, slow: tuple[float, float]
) -> None:
    calm = Machine(lambda timed: 10.0)
    calm.calibrate(tower, monkeypatch, SilentProgress())
    last = next(calm._timed)  # what a calm run times last are held-out calls
    uneasy = Machine(lambda timed: 17.0 if slow[0] * last < timed < slow[1] * last else 10.0)
    profile = uneasy.calibrate(tower, monkeypatch, SilentProgress())
    assert {point.eager.ms for point in profile.holdout} == {10.0}


def test_a_usual_host_leaves_no_note(tower: VisionEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    progress = SilentProgress()
    profile = Machine(lambda timed: 12.0).calibrate(tower, monkeypatch, progress)
    assert progress.notes == []
    assert not [note for note in profile.notes if "eager times" in note]
    assert profile.host is not None
    assert profile.host.launch_us == pytest.approx(48.0) and profile.host.launch_us < SLOW_LAUNCH_US
