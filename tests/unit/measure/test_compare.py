"""A comparison of backends in one process: who is measured in which order, and what becomes of those that fail."""

from __future__ import annotations

import gc
import json
import weakref
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from vitgraph.attention import registry
from vitgraph.attention.base import TorchSdpaBackend
from vitgraph.errors import BackendError, IncorrectOutputError, NothingReplayedError, UsageError
from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.measure import candidate as candidate_module
from vitgraph.measure import compare
from vitgraph.measure.candidate import Candidate, CandidateSeries
from vitgraph.measure.compare import Comparison, choose_backends, prepare_compare
from vitgraph.measure.correctness import limit_of
from vitgraph.measure.diagnose import Diagnosis
from vitgraph.measure.experiment import Experiment
from vitgraph.measure.progress import SilentProgress
from vitgraph.measure.trace import BusyTime
from vitgraph.models.encoder import VisionEncoder
from vitgraph.records.candidates import failure
from vitgraph.records.record import CompareRecord
from vitgraph.records.results import Candidate as CandidateRow
from vitgraph.records.sample_table import read_samples
from vitgraph.records.stats import CPU_REPLAY_REASON
from vitgraph.records.store import SAMPLES_FILE, read_record
from vitgraph.specs.asked import BenchSpec, CompareSpec
from vitgraph.specs.parts import GraphSpec, ModelSpec, RunSpec, WorkloadSpec

REQUESTS = 5


class Good(TorchSdpaBackend):
    name = "GOOD"


class AlsoGood(TorchSdpaBackend):
    name = "ALSO_GOOD"


class Missing(TorchSdpaBackend):
    name = "MISSING"

    @classmethod
    def unavailable_reason(cls, device: torch.device) -> str | None:
        return "the package is not installed"


class Unfit(TorchSdpaBackend):
    name = "UNFIT"

    def unsupported_reason(self, head_width: int, dtype: torch.dtype) -> str | None:
        return f"head width {head_width} is odd"


class Wrong(TorchSdpaBackend):
    name = "WRONG"

    def varlen(self, *arguments: Any) -> torch.Tensor:
        return super().varlen(*arguments) * 1.5


class NotANumber(TorchSdpaBackend):
    name = "NOT_A_NUMBER"

    def varlen(self, *arguments: Any) -> torch.Tensor:
        return super().varlen(*arguments) * float("nan")


class TooLarge(TorchSdpaBackend):
    name = "TOO_LARGE"

    def varlen(self, *arguments: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nsecond line")


class NoCapture(TorchSdpaBackend):
    name = "NO_CAPTURE"

    def varlen(self, *arguments: Any) -> torch.Tensor:
        if self.is_on_graph_path:
            raise RuntimeError("operation not permitted when stream is capturing")
        return super().varlen(*arguments)


FAKES = (Good, AlsoGood, Missing, Unfit, Wrong, NotANumber, TooLarge, NoCapture)


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    for fake in FAKES:
        monkeypatch.setitem(registry.BACKENDS, fake.name, fake)


def prepare(*backends: str, dtype: str = "float32", rounds: int = 1, budgets: tuple[int, ...] = (32, 64)) -> Any:
    bench = BenchSpec(
        ModelSpec("qwen3-vl-debug", load_format="dummy", device="cpu", dtype=dtype),
        GraphSpec(token_budgets=budgets),
        RunSpec(rounds=rounds),
        WorkloadSpec(
            num_prompts=REQUESTS, num_warmups=1, random_mm_bucket_config={(256, 256, 1): 0.5, (256, 224, 1): 0.5}
        ),
    )
    return prepare_compare(CompareSpec(bench, backends))


def run(folder: Path, *backends: str, **options: Any) -> CompareRecord:
    return Comparison.of(prepare(*backends, **options), SilentProgress()).record(folder)


def reload(folder: Path) -> CompareRecord:
    record = read_record(folder, "compare-backends")
    assert isinstance(record, CompareRecord)
    return record


def rows_of(record: CompareRecord) -> dict[str, CandidateRow]:
    return {row.name: row for row in record.result.candidates}


def calls_of(row: CandidateRow, mode: str) -> int | None:
    """Calls that a latency of the row is of; None where it has none."""
    latency = row.mode(mode).latency
    return None if latency is None else latency.calls


def states(record: CompareRecord) -> dict[str, tuple[str, str]]:
    return {name: (row.eager.status, row.graph.status) for name, row in rows_of(record).items()}


def test_each_kind_of_failure_keeps_its_row_and_the_rest_goes_on(tmp_path: Path) -> None:
    record = run(tmp_path, *(fake.name for fake in FAKES))
    assert states(record) == {
        "GOOD": ("ok", "ok"),
        "ALSO_GOOD": ("ok", "ok"),
        "MISSING": ("unavailable", "unavailable"),
        "UNFIT": ("unsupported", "unsupported"),
        "WRONG": ("incorrect", "incorrect"),
        "NOT_A_NUMBER": ("incorrect", "incorrect"),
        "TOO_LARGE": ("out_of_memory", "out_of_memory"),
        "NO_CAPTURE": ("ok", "capture_failed"),
    }
    rows = rows_of(record)
    reasons = {name: str(row.reason) for name, row in rows.items()}
    assert reasons["MISSING"] == "the package is not installed"
    assert "head width 24 is odd" in reasons["UNFIT"]
    assert "at most 1e-05 passes" in reasons["WRONG"]
    assert (rows["WRONG"].eager.error_vs_float32 or 0.0) > 1e-3
    assert "distance nan" in reasons["NOT_A_NUMBER"]
    assert reasons["TOO_LARGE"].endswith("CUDA out of memory. Tried to allocate 9 GiB")
    assert reasons["NO_CAPTURE"] == "graph: RuntimeError: operation not permitted when stream is capturing"
    for name, row in rows.items():
        for mode in ("eager", "graph"):
            assert calls_of(row, mode) == (REQUESTS if row.mode(mode).status == "ok" else None), name
    assert rows["NO_CAPTURE"].gain is None
    gain = rows["GOOD"].gain
    assert gain is not None and gain.mean.verdict == "invalid"
    assert record.status == "complete"
    assert failure(record.result) is None


def test_samples_are_interleaved_and_name_their_backend(tmp_path: Path) -> None:
    record = run(tmp_path, "GOOD", "ALSO_GOOD", rounds=2)
    samples = read_samples(tmp_path / SAMPLES_FILE).calls
    per_call = 2 * 2 + 1
    assert len(samples) == 2 * REQUESTS * per_call
    first = samples[:per_call]
    assert first["position"].tolist() == list(range(per_call))
    measured = [name for name in first["series"] if not name.endswith("_repeat")]
    assert sorted(measured) == sorted(f"{name}/{mode}" for name in ("GOOD", "ALSO_GOOD") for mode in ("eager", "graph"))
    assert samples["series"].str.endswith("_repeat").sum() == 2 * REQUESTS
    assert (samples[samples["series"].str.contains("eager")]["hits"] == 0).all()
    assert record.result.comparison.rounds == 2
    assert record.result.comparison.requests == REQUESTS


def test_a_cpu_run_is_labelled_and_recommends_nothing(tmp_path: Path) -> None:
    record = run(tmp_path, "TORCH_SDPA", "FLASH_ATTN")
    assert states(record) == {"TORCH_SDPA": ("ok", "ok"), "FLASH_ATTN": ("unavailable", "unavailable")}
    assert record.result.comparison.mode == "cpu-replay"
    assert record.result.recommendation.name is None
    assert CPU_REPLAY_REASON in record.result.recommendation.text
    assert record.environment is not None and record.environment.encoder is not None
    assert record.environment.encoder.dtype == "float32"
    assert record.settings["compare"]["backends"] == ["TORCH_SDPA", "FLASH_ATTN"]  # type: ignore[call-overload,index]


def test_in_half_precision_a_backend_may_have_the_towers_own_rounding(tmp_path: Path) -> None:
    record = run(tmp_path, "GOOD", "WRONG", dtype="bfloat16")
    reference = record.result.comparison.reference
    assert reference is not None and reference.own_error is not None
    assert 1e-3 < reference.own_error < 2e-2
    assert reference.limit == 3e-2
    # The same attention and the same weights give the same error, so the weights are the same.
    assert rows_of(record)["GOOD"].eager.error_vs_float32 == reference.own_error
    assert states(record) == {"GOOD": ("ok", "ok"), "WRONG": ("incorrect", "incorrect")}


def test_the_limit_grows_with_the_towers_own_error_and_never_falls_below_the_floor() -> None:
    assert limit_of(0.04, 3e-2) == pytest.approx(0.06)
    assert limit_of(0.01, 3e-2) == 3e-2
    assert limit_of(float("nan"), 3e-2) == 3e-2


def test_a_tower_that_refuses_capture_is_measured_eagerly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: VisionEncoder) -> str | None:
        return "it reads lengths on the host" if self.attention.name == "GOOD" else None

    monkeypatch.setattr(VisionEncoder, "capture_refusal", refuse)
    record = run(tmp_path, "GOOD", "ALSO_GOOD")
    assert states(record) == {"GOOD": ("ok", "unsupported"), "ALSO_GOOD": ("ok", "ok")}
    good = record.result.candidates[0]
    assert good.reason == "graph: it reads lengths on the host"
    assert calls_of(good, "eager") == REQUESTS
    assert isinstance(failure(record.result.but(candidates=(good,))), NothingReplayedError)


def test_graphs_that_would_replay_nothing_are_a_failure_of_the_mode(tmp_path: Path) -> None:
    record = Comparison.of(_exact(prepare("GOOD", budgets=(37, 111))), SilentProgress()).record(tmp_path)
    assert states(record) == {"GOOD": ("ok", "error")}
    assert "would replay nothing: all 5 items go eager (5 not_exact)" in str(record.result.candidates[0].reason)
    assert isinstance(failure(record.result), NothingReplayedError)


def _exact(prepared: Any) -> Any:
    from dataclasses import replace

    bench = replace(prepared.spec.bench, graph=replace(prepared.spec.bench.graph, packing="exact"))
    return prepare_compare(replace(prepared.spec, bench=bench))


def test_where_nothing_can_be_measured_the_record_says_why(tmp_path: Path) -> None:
    missing = failure(run(tmp_path / "missing", "MISSING", "UNFIT").result)
    assert isinstance(missing, BackendError)
    assert "the package is not installed" in str(missing)
    wrong = failure(run(tmp_path / "wrong", "WRONG", "MISSING").result)
    assert isinstance(wrong, IncorrectOutputError)
    assert len(read_samples(tmp_path / "wrong" / SAMPLES_FILE)) == 0


def test_a_backend_that_fails_while_it_is_measured_loses_its_latency_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Candidate.attempt
    calls = Counter[str]()

    def fail_late(self: Candidate, mode: str, work: Any) -> Any:
        def failing() -> Any:
            calls[mode] += 1
            # One attempt checks the mode, and one warms it up.
            if calls[mode] > 4:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            return work()

        return real(self, mode, failing if (self.name, mode) == ("GOOD", "graph") else work)

    monkeypatch.setattr(Candidate, "attempt", fail_late)
    record = run(tmp_path, "GOOD", "ALSO_GOOD")
    assert states(record) == {"GOOD": ("ok", "error"), "ALSO_GOOD": ("ok", "ok")}
    good, also_good = record.result.candidates
    assert "illegal memory access" in str(good.reason)
    assert calls_of(good, "graph") is None
    assert calls_of(good, "eager") == calls_of(also_good, "graph") == REQUESTS
    assert "GOOD/graph" in read_samples(tmp_path / SAMPLES_FILE).series


def test_a_stop_by_the_user_keeps_the_calls_that_every_backend_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = CandidateSeries.time
    timed: list[str] = []

    def stop(self: CandidateSeries, *arguments: Any) -> Any:
        # Four of them are the warm-up.
        if len(timed) == 4 + 13:
            raise KeyboardInterrupt
        timed.append(self.name)
        return real(self, *arguments)

    monkeypatch.setattr(CandidateSeries, "time", stop)
    record = run(tmp_path, "GOOD", "ALSO_GOOD")
    assert record.status == "interrupted"
    assert {calls_of(row, "graph") for row in record.result.candidates} == {2}
    assert record.result.comparison.unpaired_samples == 3
    assert reload(tmp_path) == record


def test_a_stop_after_the_measuring_keeps_every_latency(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(self: Any, *arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compare.Comparison, "diagnose", stop)
    record = run(tmp_path, "GOOD")
    assert record.status == "interrupted"
    assert calls_of(record.result.candidates[0], "graph") == REQUESTS


def test_a_stop_before_the_measuring_leaves_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(self: Any, *arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Experiment, "warm_up", stop)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "GOOD")
    assert reload(tmp_path).status_reason == "stopped by the user before the measuring began"


def test_backends_that_fail_are_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoders: dict[str, Any] = {}
    freed: list[str] = []
    real_load, real_warm_up = candidate_module.load, Experiment.warm_up

    def load(*arguments: Any, **options: Any) -> Any:
        encoder, facts = real_load(*arguments, **options)
        encoders[facts.attn_backend] = weakref.ref(encoder)
        return encoder, facts

    def warm_up(self: Experiment, *arguments: Any) -> None:
        gc.collect()
        freed.extend(name for name, encoder in encoders.items() if encoder() is None)
        real_warm_up(self, *arguments)

    monkeypatch.setattr(candidate_module, "load", load)
    monkeypatch.setattr(Experiment, "warm_up", warm_up)
    run(tmp_path, "WRONG", "GOOD", "TOO_LARGE")
    assert freed == ["WRONG", "TOO_LARGE"]


@pytest.mark.parametrize("stopped_in", ["the second capture", "the measuring", "nothing"])
def test_all_graphs_are_released_however_the_comparison_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped_in: str
) -> None:
    managers: list[EncoderCudaGraphManager] = []
    most_graphs: list[int] = []
    real = EncoderCudaGraphManager.capture_some

    def capture(self: EncoderCudaGraphManager, *arguments: Any) -> None:
        managers.append(self)
        real(self, *arguments)
        most_graphs.append(len(self.graphs))
        if stopped_in == "the second capture" and len(managers) == 2:
            raise KeyboardInterrupt

    def stop(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(EncoderCudaGraphManager, "capture_some", capture)
    if stopped_in == "the measuring":
        monkeypatch.setattr(Experiment, "warm_up", stop)
    with pytest.raises(KeyboardInterrupt) if stopped_in != "nothing" else nullcontext():
        run(tmp_path, "GOOD", "ALSO_GOOD")
    assert len(managers) == 2
    assert min(most_graphs) > 0
    assert [manager.graphs for manager in managers] == [{}, {}]
    assert [manager.buffer_bytes for manager in managers] == [0, 0]


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison that takes its device for a GPU once it has measured."""
    real = compare.Comparison.diagnose

    def diagnose(self: Any, *given: Any) -> None:
        device, self.device = self.device, torch.device("cuda", 0)
        try:
            real(self, *given)
        finally:
            self.device = device

    monkeypatch.setattr(compare.Comparison, "diagnose", diagnose)
    monkeypatch.setattr(candidate_module, "busy_time", lambda call, device, repeats: BusyTime(2.0, 2.1, 700))


@pytest.mark.parametrize("is_stopped", [False, True])
def test_replays_are_averaged_by_use_and_the_busy_share_is_that_of_whole_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pretended_gpu: None, is_stopped: bool
) -> None:
    def replays(self: Diagnosis, graphs: Any) -> Any:
        for key in graphs:
            times = {"replay_ms": 1.1 * key.token_budget, "gpu_busy_ms": 1.0 * key.token_budget, "launch_gap": 1.05}
            yield key, times
            if is_stopped:
                raise KeyboardInterrupt

    monkeypatch.setattr(Diagnosis, "replays", replays)
    record = run(tmp_path, "GOOD", budgets=(64, 128))
    (row,) = record.result.candidates
    assert row.graphs is not None
    most_used, other = sorted(row.graphs.per_budget, key=lambda use: -use.replays)
    assert most_used.replays > other.replays
    assert row.graphs.launch_gap == pytest.approx(1.05)
    if is_stopped:
        assert record.status == "interrupted"
        assert row.graphs.gpu_busy_ms == pytest.approx(most_used.token_budget)
        assert other.gpu_busy_ms is None and row.eager.busy is None
        return
    rows = sum(use.token_budget * use.replays for use in row.graphs.per_budget)
    assert row.graphs.gpu_busy_ms == pytest.approx(rows / REQUESTS)
    samples = read_samples(tmp_path / SAMPLES_FILE).calls
    for mode in ("eager", "graph"):
        busy = row.mode(mode).busy
        assert busy is not None and (busy.calls, busy.gpu_busy_ms) == (3, 2.0)
        assert busy.share == pytest.approx(2.0 / busy.wall_ms)
        walls = samples[samples["series"] == f"GOOD/{mode}"]["wall_ms"]
        assert walls.min() <= busy.wall_ms <= walls.max()


def test_a_failed_diagnosis_keeps_the_latencies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pretended_gpu: None
) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("the profiler is in use")

    monkeypatch.setattr(Candidate, "diagnose", fail)
    progress = SilentProgress()
    record = Comparison.of(prepare("GOOD"), progress).record(tmp_path)
    assert progress.notes == ["GOOD: GPU-busy time was not measured (RuntimeError: the profiler is in use)"]
    assert record.status == "complete"
    assert calls_of(record.result.candidates[0], "graph") == REQUESTS


def test_a_result_is_not_replaced_unasked(tmp_path: Path) -> None:
    run(tmp_path, "GOOD")
    with pytest.raises(UsageError, match="--overwrite"):
        run(tmp_path, "GOOD")


def test_backends_are_named_once_and_by_their_own_names() -> None:
    assert choose_backends(()) == tuple(registry.BACKENDS)
    assert choose_backends(("TORCH_SDPA", "auto")) == ("TORCH_SDPA", "auto")
    for names, error, match in (
        (("XFORMERS",), BackendError, "unknown attention backend 'XFORMERS'"),
        (("GOOD", "GOOD"), UsageError, "GOOD twice"),
    ):
        with pytest.raises(error, match=match):
            choose_backends(names)


def test_a_record_breaks_no_rule_unseen(tmp_path: Path) -> None:
    record = run(tmp_path, "GOOD", "MISSING")
    file = tmp_path / "run.json"
    for change, message in (
        (("eager", "latency", record.result.candidates[0].eager.latency), r"1\.eager: a latency with status 'unavail"),
        (("reason", None), r"candidates\.1: status 'unavailable' with reason None; ok alone has none"),
    ):
        data = record.model_dump(mode="json")
        place = data["result"]["candidates"][1]
        for name in change[:-2]:
            place = place[name]
        value = change[-1]
        place[change[-2]] = value if value is None else value.model_dump(mode="json")  # type: ignore[attr-defined]
        file.write_text(json.dumps(data), encoding="utf-8")
        with pytest.raises(UsageError, match=message):
            read_record(tmp_path)
    file.write_text('{"kind": "bench", "format": 2}', encoding="utf-8")
    with pytest.raises(UsageError, match="is of kind 'bench'; what is read here is compare-backends"):
        reload(tmp_path)
