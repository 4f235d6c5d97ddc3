"""What is derived from the samples of a comparison: gains, verdicts against the best, and how sure the advice is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from made_up_comparison import MEANS, make_record, make_samples

from vitgraph.errors import UsageError
from vitgraph.measure.compare_results import derive_results, fastest_shares
from vitgraph.records.compare_samples import (
    BACKEND_SAMPLES_FILE,
    BackendSample,
    BackendSampleWriter,
    load_backend_samples,
    repeat_times,
    series_times,
)
from vitgraph.records.files import RecordFileError
from vitgraph.records.summary import build_comparison

TWO = {"A": (5.0, 4.0), "B": (5.0, 4.001)}


def test_a_gain_is_that_of_a_bench_run_over_the_same_requests() -> None:
    samples = [row for row in make_samples() if row.backend == "FLASHINFER" and not row.is_repeat]
    expected = build_comparison([row.sample for row in samples])
    row = make_record().rows[1]
    assert row["improvement"]["mean"]["delta_pct"] == expected["mean"]["delta_pct"]
    assert row["improvement"]["mean"]["ci95"] == expected["mean"]["ci95"]
    assert row["improvement"]["mean"]["improvement_pct"] == pytest.approx(19.6, abs=0.1)
    assert row["improvement"]["mean"]["verdict"] == "faster"
    assert row["improvement"]["p99"]["delta_pct"] == expected["p99"]["delta_pct"]
    assert row["slower_than_eager"]["over_2pct_count"] == expected["slower_than_eager"]["over_2pct_count"] == 0


def test_the_best_is_clear_where_all_others_are_slower_beyond_the_noise() -> None:
    record = make_record()
    advice = record["recommendation"]
    assert (advice["backend"], advice["mode"], advice["sure"]) == ("FLASHINFER", "graph", "clear")
    assert advice["fastest_in_share"] == 1.0
    assert "the nearest is TRITON_ATTN graph" in advice["text"]
    standings = [(entry["backend"], entry["mode"], entry["verdict"]) for entry in record["comparison"]["standings"]]
    assert standings[:3] == [
        ("FLASHINFER", "graph", "best"),
        ("TRITON_ATTN", "graph", "slower"),
        ("FLASH_ATTN", "graph", "slower"),
    ]
    assert len(standings) == 7
    assert record.rows[0]["verdict_vs_best"]["mode"] == "graph"
    assert record.rows[4]["verdict_vs_best"]["mode"] == "eager"
    assert record.rows[3]["verdict_vs_best"] is None


def test_two_that_differ_by_less_than_the_noise_are_undecided() -> None:
    record = make_record(TWO, make_samples(TWO, noise=0.02))
    advice = record["recommendation"]
    assert advice["sure"] == "undecided"
    assert advice["mode"] == "graph"
    assert "graph" in advice["text"].split("undecided:")[1]
    assert 0.3 < advice["fastest_in_share"] < 0.99


def test_too_few_calls_measured_twice_leave_the_noise_unknown_and_nothing_is_clear() -> None:
    samples = [row for row in make_samples() if not row.is_repeat]
    record = make_record(samples=samples)
    assert record["comparison"]["noise_floor_pct"]["graph"]["mean"] is None
    assert record["recommendation"]["sure"] == "undecided"
    assert record.rows[0]["improvement"]["mean"]["verdict"] == "undecided"


def test_a_disturbed_run_gives_no_advice_and_only_invalid_verdicts() -> None:
    record = make_record(invalid_reasons=("the GPU was throttled (hw_slowdown)",))
    assert record["recommendation"]["backend"] is None
    assert record["recommendation"]["text"] == "No recommendation: the GPU was throttled (hw_slowdown)."
    assert {entry["verdict"] for entry in record["comparison"]["standings"]} == {"invalid"}


def test_the_only_one_that_ran_is_no_choice() -> None:
    alone: dict[str, tuple[float | None, float | None]] = {"TORCH_SDPA": (9.1, None)}
    advice = make_record(alone, make_samples(alone))["recommendation"]
    assert (advice["backend"], advice["mode"], advice["sure"]) == ("TORCH_SDPA", "eager", "undecided")
    assert "nothing else could be measured" in advice["text"]


def test_another_backend_with_the_lowest_p99_is_named() -> None:
    samples = [
        replace(row, sample=replace(row.sample, wall_ms=30.0))
        if row.series == ("FLASHINFER", "graph") and row.sample.request < 5
        else row
        for row in make_samples({**MEANS, "FLASHINFER": (5.4, 3.9)})
    ]
    record = make_record(samples=samples)
    assert record["recommendation"]["backend"] == "FLASHINFER"
    assert "P99 is lowest with TRITON_ATTN in graph mode" in record["recommendation"]["text"]


def test_only_requests_that_every_series_has_are_compared() -> None:
    samples = [row for row in make_samples() if not (row.backend == "TRITON_ATTN" and row.sample.request >= 350)]
    record = make_record(samples=samples)
    assert {row["eager"]["n"] for row in record.rows if row["eager"]} == {350}
    assert record["comparison"]["unpaired_samples"] == 50 * 5


def test_of_several_processes_the_noisiest_gives_the_floor() -> None:
    quiet = make_samples({"A": (5.0, 4.0)}, noise=0.001)
    loud = make_samples({"B": (5.0, 4.0)}, noise=0.05)
    together = make_record(TWO, [*quiet, *loud])
    apart = make_record(TWO, [*quiet, *loud])
    comparison = apart.data["comparison"] | {"isolated": True}
    derive_results(apart.rows, comparison, [*quiet, *loud], seed=0)
    alone = make_record({"B": (5.0, 4.0)}, loud)["comparison"]["noise_floor_pct"]
    assert comparison["noise_floor_pct"] == alone
    assert together["comparison"]["noise_floor_pct"]["graph"]["mean"] < alone["graph"]["mean"]


def test_the_share_of_resamples_counts_who_is_fastest() -> None:
    fast, slow = np.full(20, 1.0), np.full(20, 2.0)
    assert fastest_shares([slow, fast], seed=0) == [0.0, 1.0]
    even, odd = np.tile([1.0, 2.0], 50), np.tile([2.0, 1.0], 50)
    assert fastest_shares([even, odd], seed=0)[0] == pytest.approx(0.5, abs=0.1)


def test_a_call_measured_twice_is_paired_with_its_own_first_time() -> None:
    samples = make_samples(TWO, requests=3)
    pairs = repeat_times([row for row in samples if not (row.is_repeat and row.backend == "B")], "graph")
    firsts = series_times([row for row in samples if row.backend == "A"], [("A", "graph")]).times["A/graph"]
    assert pairs.times["first"].tolist() == firsts.tolist()
    assert len(pairs.times["second"]) == 3


def test_samples_come_back_as_they_were_written(tmp_path) -> None:
    samples = make_samples(TWO, requests=2)
    with BackendSampleWriter(tmp_path) as writer:
        for sample in samples:
            writer.write(sample)
    path = tmp_path / BACKEND_SAMPLES_FILE
    loaded = load_backend_samples(path)
    assert [row.to_row() for row in loaded] == [row.to_row() for row in samples]
    path.write_text(path.read_text() + "A,0,1,1,eager,0,1.23", encoding="ascii")
    assert load_backend_samples(tmp_path) == loaded
    path.write_text(path.read_text().replace("A,0,0,0,eager", "A,2,0,0,eager"), encoding="ascii")
    with pytest.raises(UsageError, match="line 2: repeat is '2'"):
        load_backend_samples(tmp_path)
    with pytest.raises(UsageError, match="results are not replaced"):
        BackendSampleWriter(tmp_path)


def test_a_full_disk_says_what_is_saved(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample: BackendSample = make_samples(TWO, requests=1)[0]
    with BackendSampleWriter(tmp_path) as writer:
        writer.write(sample)

        def fill_up(cells: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(writer, "_append", fill_up)
        with pytest.raises(RecordFileError, match=r"Saved: the first 1 samples.*\(A, eager\)"):
            writer.write(sample)
