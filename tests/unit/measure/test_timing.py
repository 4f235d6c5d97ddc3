"""What is read from a profiler trace: overlaps count once, gaps show in the span."""

from __future__ import annotations

import pytest
import torch

from vitgraph.measure.diagnose import launch_gap
from vitgraph.measure.series import CallTimer, matrix_rate_flops
from vitgraph.measure.trace import BusyTime, TracedKernel, busy_time


def test_overlapping_kernels_count_once_and_gaps_only_in_the_span() -> None:
    kernels = [TracedKernel("k", again + start, 1000.0) for again in (0.0, 10_000.0) for start in (0.0, 500.0, 2000.0)]
    found = BusyTime.of(kernels, 2)
    assert found is not None
    assert found.busy_ms == pytest.approx(2.5)
    assert found.span_ms == pytest.approx(3.0)
    assert found.kernels == 3


def test_a_trace_that_does_not_split_into_the_repeats_has_no_span() -> None:
    found = BusyTime.of([TracedKernel("k", start, 1.0) for start in (0.0, 2.0, 4.0)], 2)
    assert found is not None
    assert found.span_ms is None
    assert BusyTime.of([], 2) is None


def test_a_cpu_has_wall_time_only() -> None:
    device = torch.device("cpu")
    time = CallTimer(device).time(lambda: None)
    assert time.wall_ms >= 0
    assert time.gpu_ms is None
    assert busy_time(lambda: None, device, 1) is None
    assert matrix_rate_flops(device, torch.float32) is None


@pytest.mark.parametrize(
    ("replay_ms", "span_ms", "gap"), [(1.1, 1.3, 1.1), (1.3, 1.1, 1.1), (0.9, 1.2, 1.0), (1.2, None, 1.2)]
)
def test_the_launch_gap_is_the_smaller_of_two_that_err_upwards_and_never_below_one(
    replay_ms: float, span_ms: float | None, gap: float
) -> None:
    assert launch_gap(replay_ms, BusyTime(1.0, span_ms, 10)) == pytest.approx(gap)
