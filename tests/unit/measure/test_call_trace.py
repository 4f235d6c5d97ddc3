"""Sums of traces: overlap counts once as busy, gaps are what nothing covers, kinds and names add up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vitgraph.measure import trace as call_trace
from vitgraph.measure.trace import (
    ATTENTION,
    COPY,
    KINDS,
    PRODUCT,
    TracedKernel,
    summarize_traces,
    trace_calls,
    trace_of_kernels,
)

FLASH, GEMM, MEMCPY = "flash_fwd_kernel", "nvjet_tst_64x64_64x8_2x1_v_bz_TNT", "Memcpy HtoD (Pinned -> Device)"
CPU = torch.device("cpu")


def test_overlapping_kernels_are_busy_once() -> None:
    trace = trace_of_kernels(
        [
            TracedKernel(GEMM, 100.0, 50.0),
            TracedKernel(MEMCPY, 110.0, 10.0),
            TracedKernel(FLASH, 140.0, 30.0),
            TracedKernel(GEMM, 200.0, 20.0),
        ]
    )
    assert (trace.busy_us, trace.span_us) == (90.0, 120.0)


def test_nothing_traced_is_nothing_spent() -> None:
    trace = trace_of_kernels([])
    assert (trace.busy_us, trace.span_us) == (0.0, 0.0)


def test_a_summary_is_the_mean_of_its_traces() -> None:
    first = trace_of_kernels([TracedKernel(GEMM, 0.0, 1000.0), TracedKernel(FLASH, 1500.0, 500.0)])
    second = trace_of_kernels([TracedKernel(GEMM, 0.0, 3000.0), TracedKernel(MEMCPY, 3000.0, 1000.0)])
    found = summarize_traces([first, second])
    assert (found["kernels"], found["busy_ms"], found["span_ms"], found["gap_ms"]) == (2.0, 2.75, 3.0, 0.25)
    assert found["kinds"][PRODUCT] == {"ms": 2.0, "kernels": 1.0}
    assert found["kinds"][ATTENTION] == {"ms": 0.25, "kernels": 0.5}
    assert found["kinds"][COPY] == {"ms": 0.5, "kernels": 0.5}
    assert list(found["kinds"]) == list(KINDS)
    assert [entry["name"] for entry in found["top"]] == [GEMM, MEMCPY, FLASH]


def test_gaps_that_only_tracing_makes_are_left_out() -> None:
    trace = trace_of_kernels([TracedKernel(GEMM, 0.0, 1000.0), TracedKernel(FLASH, 2000.0, 1000.0)])
    found = summarize_traces([trace], untraced_ms=2.25)
    assert (found["busy_ms"], found["span_ms"], found["gap_ms"]) == (2.0, 2.25, 0.25)
    assert summarize_traces([trace], untraced_ms=1.9)["gap_ms"] == 0.0


def fake_event(name: str, on_gpu: bool, start: float, end: float, own: float = 0.0, *, annotation: bool = False) -> Any:
    kind = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    span = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(
        name=name, device_type=kind, time_range=span, self_cpu_time_total=own, is_user_annotation=annotation
    )


def test_a_gpu_trace_holds_what_ran_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [
        fake_event("cudaGraphLaunch", False, 0.0, 5.0, 5.0),
        fake_event(GEMM, True, 10.0, 30.0),
        fake_event(FLASH, True, 31.0, 41.0),
        fake_event("## Call CompiledFxGraph ##", True, 0.0, 90.0, annotation=True),
    ]
    asked: list[list[Any]] = []

    def profiled(call: Any, device: torch.device, activities: list[Any]) -> Any:
        asked.append(activities)
        return SimpleNamespace(events=lambda: events)

    monkeypatch.setattr(call_trace, "_profiled", profiled)
    traces = trace_calls(lambda: None, torch.device("cuda", 0), 3)
    # One more than asked for: the first trace sets the profiler up.
    assert (len(traces), len(asked)) == (3, 4)
    assert asked[0] == [torch.profiler.ProfilerActivity.CUDA]
    assert (len(traces[0].kernels), traces[0].busy_us, traces[0].span_us) == (2, 30.0, 31.0)


def test_a_cpu_trace_holds_the_own_time_of_operators() -> None:
    left, right = torch.randn(64, 256), torch.randn(256, 64)
    (trace,) = trace_calls(lambda: torch.mm(left, right).relu(), CPU, 1)
    names = [kernel.name for kernel in trace.kernels]
    assert names.count("aten::mm") == 1
    assert 0 < trace.busy_us <= trace.span_us
