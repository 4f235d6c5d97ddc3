"""One process a backend: records are merged, and a process that crashes costs its own row only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from saved_run_folders import read_compare

from vitgraph.errors import UsageError
from vitgraph.measure.compare import Comparison, prepare_compare, run_isolated
from vitgraph.records.candidates import before_its_turn, failure
from vitgraph.records.sample_table import read_samples
from vitgraph.records.store import SAMPLES_FILE, ResultFolder
from vitgraph.specs.asked import BenchSpec, CompareSpec
from vitgraph.specs.parts import GraphSpec, ModelSpec, RunSpec, WorkloadSpec


class Silent:
    def phase(self, name: str, total: int | None = None) -> None: ...

    def step(self) -> None: ...

    def note(self, text: str) -> None: ...


def prepare(*backends: str) -> Any:
    bench = BenchSpec(
        ModelSpec("qwen3-vl-debug", load_format="dummy", device="cpu"),
        GraphSpec(token_budgets=(64,)),
        RunSpec(rounds=1),
        WorkloadSpec(num_prompts=12, num_warmups=1, random_mm_bucket_config={(256, 256, 1): 1.0}),
    )
    return prepare_compare(CompareSpec(bench, backends, isolate=True))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a process that measured TORCH_SDPA alone leaves."""
    folder = tmp_path_factory.mktemp("part")
    Comparison.of(prepare("TORCH_SDPA"), Silent()).record(folder)
    return folder


def program(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def leave(folder: Path, part: Path) -> list[str]:
    """A process that does nothing but leave the files of `folder`."""
    return program(f"import shutil; shutil.copytree({str(folder)!r}, {str(part)!r}, dirs_exist_ok=True)")


@pytest.mark.slow
def test_rows_and_samples_of_the_processes_are_merged(measured: Path, tmp_path: Path) -> None:
    def command(name: str, part: Path) -> list[str]:
        if name == "FLASHINFER":
            return program("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
        if name == "FLASH_ATTN":
            return program("import sys; sys.exit('line one\\nlibcuda.so: cannot open shared object file')")
        return leave(measured, part)

    folder = tmp_path / "run"
    record = run_isolated(prepare("TORCH_SDPA", "FLASHINFER", "FLASH_ATTN"), folder, Silent(), command)
    part, comparison = read_compare(measured), record.result.comparison
    rows = record.result.candidates
    assert record.status == "complete"
    assert comparison.isolated is True
    found, alone = rows[0].graph.latency, part.result.candidates[0].graph.latency
    assert found is not None and alone is not None and found.calls == alone.calls
    # The file of samples holds nanoseconds.
    assert found.mean_ms == pytest.approx(alone.mean_ms, rel=1e-6)
    assert record.environment is not None and record.environment.device == "CPU"
    assert comparison.reference == part.result.comparison.reference
    assert comparison.invalid_reasons == part.result.comparison.invalid_reasons
    assert [row.status for row in rows] == ["ok", "error", "error"]
    assert rows[1].reason == "its process was ended by signal 11 and left no record"
    assert rows[2].reason == (
        "its process ended with status 1 and left no record: libcuda.so: cannot open shared object file"
    )
    samples = [read_samples(place / SAMPLES_FILE).frame for place in (folder, measured)]
    assert samples[0].equals(samples[1])
    assert (folder / "parts" / "TORCH_SDPA" / "run.json").exists()


def test_a_process_that_failed_as_a_whole_gives_its_reason(measured: Path, tmp_path: Path) -> None:
    whole = read_compare(measured)
    failed = whole.result.but(candidates=(before_its_turn("TORCH_SDPA"),))
    source = tmp_path / "broken"
    with ResultFolder(source) as results:
        results.save(whole.but(status="error", status_reason="the checkpoint lacks 3 tensors", result=failed))
    found = run_isolated(prepare("TORCH_SDPA"), tmp_path / "run", Silent(), lambda name, part: leave(source, part))
    assert found.result.candidates[0].reason == "the checkpoint lacks 3 tensors"
    assert "the checkpoint lacks 3 tensors" in str(failure(found.result))


def test_a_stop_by_the_user_lets_the_process_save_and_starts_no_other(
    measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = subprocess.Popen.wait
    signals: list[int] = []
    started: list[str] = []

    def wait(self: Any, timeout: float | None = None) -> int:
        if timeout is None:
            real(self)
            raise KeyboardInterrupt
        return real(self, timeout)

    def command(name: str, part: Path) -> list[str]:
        started.append(name)
        return leave(measured, part)

    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    monkeypatch.setattr(subprocess.Popen, "send_signal", lambda self, number: signals.append(number))
    record = run_isolated(prepare("TORCH_SDPA", "FLASHINFER"), tmp_path / "run", Silent(), command)
    assert record.status == "interrupted"
    assert signals == [2]
    assert started == ["TORCH_SDPA"]
    measured_row, waiting = record.result.candidates
    assert measured_row.eager.latency is not None and measured_row.eager.latency.calls == 12
    assert waiting.reason == "the run ended before its turn"


def test_parts_of_an_earlier_run_are_not_replaced_unasked(measured: Path, tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    with pytest.raises(UsageError, match="parts exists"):
        run_isolated(prepare("TORCH_SDPA"), tmp_path, Silent(), lambda name, part: leave(measured, part))
