"""Replays timed alone: how long it may take, what comes first, and what a stop in the midst of it leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.measure import diagnose as diagnostics
from vitgraph.measure import run, series
from vitgraph.measure.bench import BenchRun, run_bench
from vitgraph.measure.calls import CallInputs, EncoderCall, make_calls
from vitgraph.measure.diagnose import Diagnosis
from vitgraph.measure.preparation import prepare_bench
from vitgraph.measure.progress import SilentProgress
from vitgraph.measure.trace import BusyTime
from vitgraph.models.encoder import VisionEncoder
from vitgraph.planning.budgets import plan_budgets, resolve_budget_settings
from vitgraph.records.record import BenchRecord
from vitgraph.records.series import CallOverhead
from vitgraph.records.store import read_record
from vitgraph.report import say
from vitgraph.report.documents import document_of
from vitgraph.report.views.graph_tables import per_path_table, shown_paths
from vitgraph.specs.asked import BenchSpec
from vitgraph.specs.parts import GraphSpec, ModelSpec, RunSpec, WorkloadSpec
from vitgraph.workloads.base import MediaItem, Request

USES = {320: 3, 256: 2, 384: 1}
"""Calls of each size; every size has a graph of its own, in this order of use."""
BUDGETS = [128, 64, 192]


@pytest.fixture
def manager(tower: VisionEncoder) -> Iterator[EncoderCudaGraphManager]:
    manager = EncoderCudaGraphManager(tower, plan_budgets(resolve_budget_settings((1, 192), sorted(BUDGETS), 4, 0)))
    manager.capture()
    yield manager
    manager.clear()


@pytest.fixture
def calls(tower: VisionEncoder) -> list[EncoderCall]:
    sides = [side for side in sorted(USES) for _ in range(USES[side])]
    return make_calls([Request(index, (MediaItem(side, side),)) for index, side in enumerate(sides)], tower.rule, 1)[0]


Pretend = Callable[[EncoderCudaGraphManager, float], list[int]]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """Makes every replay of a manager take some milliseconds of a clock that nothing else moves.

    Returns what will hold the repeats of each trace.
    """

    def install(manager: EncoderCudaGraphManager, replay_ms: float) -> list[int]:
        now, traced = 0.0, []

        def replay() -> None:
            nonlocal now
            now += replay_ms / 1e3

        def busy_time(call: Callable[[], None], device: torch.device, repeats: int) -> BusyTime:
            traced.append(repeats)
            for _ in range(repeats):
                call()
            return BusyTime(replay_ms, replay_ms, 10)

        for graph in manager.graphs.values():
            monkeypatch.setattr(graph.graph, "_run", replay)
        for module in (diagnostics, series):
            monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now))
        monkeypatch.setattr(diagnostics, "busy_time", busy_time)
        return traced

    return install


@pytest.mark.parametrize(("replay_ms", "timed"), [(100.0, 3), (2000.0, 2), (20_000.0, 1)])
def test_graphs_are_timed_from_the_most_used_one_on_until_the_limit(
    manager: EncoderCudaGraphManager, calls: list[EncoderCall], pretend: Pretend, replay_ms: float, timed: int
) -> None:
    pretend(manager, replay_ms)
    diagnosis = Diagnosis(manager, CallInputs(manager.model, calls, 0), calls)  # type: ignore[arg-type]
    found = dict(diagnosis.replays(diagnosis.most_used_graphs()))
    assert [key.token_budget for key in found] == BUDGETS[:timed]
    assert all(times["replay_ms"] == pytest.approx(replay_ms) for times in found.values())
    assert all(times["launch_gap"] == pytest.approx(1.0) for times in found.values())


@pytest.mark.parametrize(("replay_ms", "repeats"), [(2.0, 5), (40.0, 5), (140.0, 2), (450.0, 1)])
def test_a_long_replay_is_traced_once(
    manager: EncoderCudaGraphManager, calls: list[EncoderCall], pretend: Pretend, replay_ms: float, repeats: int
) -> None:
    traced = pretend(manager, replay_ms)
    diagnosis = Diagnosis(manager, CallInputs(manager.model, calls, 0), calls)  # type: ignore[arg-type]
    assert len(list(diagnosis.replays(diagnosis.most_used_graphs()))) == 3
    assert traced == [repeats] * 3


@pytest.mark.parametrize(("replay_ms", "shapes"), [(100.0, 3), (500.0, 2), (20_000.0, 1)])
def test_call_shapes_are_measured_from_the_most_frequent_one_on_until_the_limit(
    manager: EncoderCudaGraphManager, calls: list[EncoderCall], pretend: Pretend, replay_ms: float, shapes: int
) -> None:
    pretend(manager, replay_ms)
    diagnosis = Diagnosis(manager, CallInputs(manager.model, calls, 0), calls)  # type: ignore[arg-type]
    found = list(diagnosis.call_overheads())
    assert [shape.tokens for shape in found] == [100, 64, 144][:shapes]
    assert all(shape.call_ms == pytest.approx(replay_ms) for shape in found)
    assert all(shape.overhead_ms == pytest.approx(0.0, abs=1e-6) for shape in found)


def stopped_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, model: str, side: Sequence[int], stop: BaseException
) -> BenchRecord:
    """Record of a run that `stop` ends in the trace of its second graph, if nothing else stops it before."""
    traces = 0

    def busy_time(call: Callable[[], None], device: torch.device, repeats: int) -> BusyTime:
        nonlocal traces
        traces += 1
        if traces == 2:
            raise stop
        return BusyTime(1e-6, None, 10)

    def captured(self: BenchRun, *_: Any) -> None:
        # From here on only the record asks for the device.
        self.device = torch.device("cuda", 0)

    monkeypatch.setattr(BenchRun, "_save_before_measuring", captured)
    monkeypatch.setattr(BenchRun, "release", lambda self: None)
    monkeypatch.setattr(run, "matrix_rate_flops", lambda device, dtype: 1e12)
    monkeypatch.setattr(diagnostics, "busy_time", busy_time)
    sizes = {(height, height, 1): 1.0 / len(side) for height in side}
    spec = BenchSpec(
        ModelSpec(model, load_format="dummy", device="cpu", dtype="float32"),
        GraphSpec(token_budgets=(64, 300)),
        RunSpec(rounds=1),
        WorkloadSpec(num_prompts=8, num_warmups=1, random_mm_bucket_config=sizes),
    )
    with nullcontext() if isinstance(stop, KeyboardInterrupt) else pytest.raises(type(stop)):
        run_bench(prepare_bench(spec), folder, SilentProgress())
    record = read_record(folder)
    assert isinstance(record, BenchRecord)
    return record


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop", "status", "reason"),
    [
        (KeyboardInterrupt(), "interrupted", "stopped by the user after the measuring, while graphs were timed alone"),
        (RuntimeError("the profiler is in use"), "error", "RuntimeError: the profiler is in use"),
    ],
)
def test_a_stop_in_the_second_graph_keeps_the_figures_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: BaseException, status: str, reason: str
) -> None:
    record = stopped_run(tmp_path, monkeypatch, "qwen3-vl-debug", (256, 320), stop)
    assert (record.status, record.status_reason) == (status, reason)
    graph = record.result.graph
    most_used, other = sorted(graph.per_budget, key=lambda row: -row.replays)
    assert (most_used.replay_ms or 0) > 0 and most_used.gpu_busy_ms == 1e-6
    assert other.replay_ms is None
    assert graph.launch_gap == pytest.approx(most_used.launch_gap) and (graph.launch_gap or 0) > 1
    assert [row.replay_ms for row in graph.per_path] == [None]
    assert record.environment is not None and record.environment.matrix_rate_tflops == 1.0
    assert (record.result.latency["graph"].times_speed_of_light or 0) > 0


@pytest.mark.slow
def test_a_path_whose_graph_was_not_timed_reads_as_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = stopped_run(tmp_path, monkeypatch, "deepseek-ocr-debug", (200,), KeyboardInterrupt())
    times = {row.path: row.replay_ms for row in record.result.graph.per_path}
    assert (times["global"] or 0) > 0 and times["local"] is None
    rows = per_path_table(record.result.graph).rows
    assert {row["path"]: row["replay_ms"] for row in rows} == {**times, "all": None}
    cells = {row[0].text: row[-1].text for row in shown_paths(record.result.graph).cells()}
    assert cells == {"global": say.ms(times["global"]), "local": "not measured"}
    (chart,) = (chart for chart in document_of(record).charts if chart.name == "paths")
    _, time_axes = chart.draw().axes
    assert [text.get_text() for text in time_axes.texts] == [say.short(times["global"]), "not measured"]


def test_a_stop_in_the_second_call_shape_keeps_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overhead = CallOverhead(items=1, tokens=64, replays=1, call_ms=2.0, replays_ms=1.5, overhead_ms=0.5)

    def measure(*_: Any) -> Iterator[CallOverhead]:
        yield overhead
        raise KeyboardInterrupt

    monkeypatch.setattr(Diagnosis, "call_overheads", measure)
    record = stopped_run(tmp_path, monkeypatch, "qwen3-vl-debug", (256,), KeyboardInterrupt())
    assert record.status == "interrupted"
    assert record.result.graph.call_overheads == (overhead,)
    assert all((row.replay_ms or 0) > 0 for row in record.result.graph.per_path)
