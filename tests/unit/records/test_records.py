"""The run record: what it refuses, how it is saved and loaded, and what is derived from the samples."""

from __future__ import annotations

import copy
import errno
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vitgraph.errors import UsageError
from vitgraph.records import bench_record as records
from vitgraph.records.bench_record import RunRecord, Sample, SampleWriter, load_samples
from vitgraph.records.summary import build_comparison, build_summary

RUN_V1 = Path(__file__).parents[2] / "data" / "run-v1"


@pytest.fixture
def data() -> dict[str, Any]:
    return json.loads((RUN_V1 / "run.json").read_text(encoding="utf-8"))


def make_sample(request: int, mode: str, wall_ms: float, round_index: int = 0, gpu_ms: float | None = None) -> Sample:
    return Sample(round_index, request, mode, 0, wall_ms, gpu_ms, 1, 100, 400, 0, 0, 0)


def make_run(eager: list[float], graph: list[float], repeat: list[float] | None = None) -> list[Sample]:
    series = {"eager": eager, "graph": graph, "eager_repeat": repeat or []}
    return [make_sample(request, mode, ms) for mode, times in series.items() for request, ms in enumerate(times)]


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: rounded(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [rounded(entry) for entry in value]
    return round(value, 6) if isinstance(value, float) else value


def test_version_1_example_loads_and_agrees_with_its_samples() -> None:
    record = RunRecord.load(RUN_V1)
    assert record["schema_version"] == 1
    assert record["workload"]["name"] == "synthetic-example"
    loaded = record.load_samples()
    assert loaded.warning is None
    assert len(loaded.samples) == 320 * 2 * 3
    derived = build_summary(loaded.samples)
    for mode in ("eager", "graph"):
        assert rounded(derived[mode]).items() <= rounded(record["summary"][mode]).items()
    comparison = build_comparison(loaded.samples, seed=42)
    for metric in ("mean", "p50", "p99"):
        derived, saved = (found[metric] for found in (comparison, record["comparison"]))
        assert derived["delta_pct"] == pytest.approx(saved["delta_pct"])
        assert derived["ci95"] == pytest.approx(saved["ci95"], abs=0.2)
        assert derived["verdict"] == saved["verdict"]


def test_saving_keeps_every_field_and_the_order_of_the_format(data: dict[str, Any], tmp_path: Path) -> None:
    shuffled = dict(reversed(data.items()))
    path = RunRecord(shuffled).save(tmp_path)
    text = path.read_text(encoding="utf-8")
    assert text.startswith('{\n  "schema_version": 1,\n  "kind": "bench",\n')
    assert list(json.loads(text)) == list(records.TOP_LEVEL_FIELDS)
    assert RunRecord.load(path).data == data


def test_an_existing_record_is_replaced_only_with_overwrite(data: dict[str, Any], tmp_path: Path) -> None:
    RunRecord(data).save(tmp_path)
    newer = copy.deepcopy(data) | {"vitgraph_version": "9.9.9"}
    with pytest.raises(UsageError, match=r"run\.json exists; results are not replaced\. Use --overwrite"):
        RunRecord(newer).save(tmp_path)
    assert RunRecord.load(tmp_path)["vitgraph_version"] == data["vitgraph_version"]
    RunRecord(newer).save(tmp_path, overwrite=True)
    assert RunRecord.load(tmp_path)["vitgraph_version"] == "9.9.9"


def test_a_full_disk_leaves_the_old_record_and_says_what_is_saved(
    data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RunRecord(data).save(tmp_path)
    (tmp_path / "samples.csv").write_text("", encoding="utf-8")

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    newer = copy.deepcopy(data) | {"vitgraph_version": "9.9.9"}
    with pytest.raises(records.RecordFileError) as caught:
        RunRecord(newer).save(tmp_path, overwrite=True)
    message = str(caught.value)
    assert "No space left on device" in message
    assert f"Saved: the samples in {tmp_path / 'samples.csv'}. Not saved: settings, summary and counters" in message
    assert RunRecord.load(tmp_path)["vitgraph_version"] == data["vitgraph_version"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.json", "samples.csv"]


def test_a_newer_version_is_refused_with_both_versions(data: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(data | {"schema_version": 2}), encoding="utf-8")
    with pytest.raises(UsageError, match=r"schema_version 2; this vitgraph reads up to 1\. Update vitgraph"):
        RunRecord.load(tmp_path)


def test_older_versions_are_migrated_one_by_one(
    data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "SCHEMA_VERSION", 3)
    monkeypatch.setitem(records.MIGRATIONS, 1, lambda old: old | {"schema_version": 2, "vitgraph_version": "two"})
    monkeypatch.setitem(
        records.MIGRATIONS, 2, lambda old: old | {"schema_version": 3, "command": [old["vitgraph_version"]]}
    )
    (tmp_path / "run.json").write_text(json.dumps(data), encoding="utf-8")
    record = RunRecord.load(tmp_path)
    assert (record["schema_version"], record["command"]) == (3, ["two"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hits": 384}, "384 hits + 6 misses are not 389 items"),
        ({"misses_by_reason": {"too_many_tokens": 5}}, "misses by reason add up to 5, misses are 6"),
        ({"hit_rate": 0.5}, "hit_rate is 0.5; 383 of 389 items make it 0.98"),
        ({"items": 0, "hits": 0, "misses": 0, "misses_by_reason": {}, "hit_rate": 0.0}, "0 of 0 items make it None"),
    ],
)
def test_contradicting_counters_are_neither_saved_nor_loaded(
    data: dict[str, Any], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    data["graph"] |= change
    with pytest.raises(UsageError) as caught:
        RunRecord(data).save(tmp_path)
    assert message in str(caught.value)
    assert not (tmp_path / "run.json").exists()
    (tmp_path / "run.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(UsageError):
        RunRecord.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"status": "done"}, "status is 'done'; it must be one of complete, interrupted, error"),
        ({"status": "interrupted"}, "status 'interrupted' with reason None"),
        ({"status_reason": "stopped"}, "status 'complete' with reason 'stopped'"),
        ({"graph": None}, "a complete record needs its summary and graph sections"),
        ({"kind": "sweep"}, "kind 'sweep'"),
        ({"extra": 1}, "has unknown extra"),
    ],
)
def test_rules_of_the_top_level(data: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        RunRecord(data | change).validate()
    assert message in str(caught.value)


def test_a_missing_field_is_named(data: dict[str, Any]) -> None:
    del data["correctness"]
    with pytest.raises(UsageError, match="the record lacks correctness"):
        RunRecord(data).validate()


def test_numbers_that_are_not_finite_are_strings_in_the_file_only(data: dict[str, Any], tmp_path: Path) -> None:
    data["correctness"] |= {"max_rel_l2": math.nan, "tolerance": math.inf}
    path = RunRecord(data).save(tmp_path)
    saved = json.loads(path.read_text(encoding="utf-8"))["correctness"]
    assert (saved["max_rel_l2"], saved["tolerance"]) == ("nan", "inf")
    loaded = RunRecord.load(path)["correctness"]
    assert math.isnan(loaded["max_rel_l2"])
    assert loaded["tolerance"] == math.inf


def test_numpy_numbers_paths_and_tuples_are_saved_as_plain_values(data: dict[str, Any], tmp_path: Path) -> None:
    data["settings"]["bench"] = {"rounds": np.int64(3), "ratio": np.float32(0.5), "out": Path("a/b"), "pair": (1, 2)}
    loaded = RunRecord.load(RunRecord(data).save(tmp_path))
    assert loaded["settings"]["bench"] == {"rounds": 3, "ratio": 0.5, "out": "a/b", "pair": [1, 2]}


def test_a_value_without_a_place_in_json_is_named(data: dict[str, Any], tmp_path: Path) -> None:
    data["settings"]["bench"] = {"modes": [{"eager"}]}
    with pytest.raises(TypeError, match=r"record\.settings\.bench\.modes\[0\] is a set"):
        RunRecord(data).save(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "is not valid JSON"), ("[]", "no whole number schema_version"), ('{"schema_version": true}', "no whole")],
)
def test_a_file_that_is_no_record_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "run.json").write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        RunRecord.load(tmp_path)


def test_a_missing_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*run\.json: No such file"):
        RunRecord.load(tmp_path)


def test_samples_without_a_record_are_pointed_out(tmp_path: Path) -> None:
    with SampleWriter(tmp_path) as writer:
        writer.write(make_sample(0, "eager", 1.0))
    with pytest.raises(UsageError, match=r"samples\.csv beside it does: the run ended before its record was saved"):
        RunRecord.load(tmp_path)


def test_samples_are_in_the_file_as_soon_as_they_are_written(tmp_path: Path) -> None:
    samples = [make_sample(0, "eager", 1.25, gpu_ms=0.5), make_sample(0, "graph", 1.0)]
    with SampleWriter(tmp_path) as writer:
        for sample in samples:
            writer.write(sample)
        assert load_samples(tmp_path).samples == samples
    assert writer.path.read_text(encoding="ascii").splitlines()[1:] == [
        "0,0,eager,0,1.250000,0.500000,1,100,400,0,0,0",
        "0,0,graph,0,1.000000,,1,100,400,0,0,0",
    ]


def test_an_existing_result_is_not_measured_over(data: dict[str, Any], tmp_path: Path) -> None:
    RunRecord(data).save(tmp_path)
    with pytest.raises(UsageError, match=r"run\.json exists"):
        SampleWriter(tmp_path)


def test_overwriting_samples_removes_the_record_of_the_old_ones(data: dict[str, Any], tmp_path: Path) -> None:
    RunRecord(data).save(tmp_path)
    SampleWriter(tmp_path, overwrite=True).close()
    assert [path.name for path in tmp_path.iterdir()] == ["samples.csv"]
    assert load_samples(tmp_path).samples == []


def test_a_full_disk_while_measuring_says_how_many_samples_are_saved(tmp_path: Path) -> None:
    writer = SampleWriter(tmp_path)
    writer.write(make_sample(0, "eager", 1.0))
    os.dup2(os.open("/dev/full", os.O_WRONLY), writer._file.fileno())  # type: ignore[union-attr]
    with pytest.raises(records.RecordFileError) as caught:
        writer.write(make_sample(7, "graph", 1.0))
    writer.close()
    assert "No space left on device. Saved: the first 1 samples. Not saved: request 7 of round 0 (graph)" in str(
        caught.value
    )


@pytest.mark.parametrize("rest", ["0,1,gra", "0,1,graph,1,2.5,,1,100,400,0,0,0"])
def test_a_cut_last_line_is_left_out_and_reported(tmp_path: Path, rest: str) -> None:
    """A cut line may still parse, with digits missing, so only the line end makes it whole."""
    with SampleWriter(tmp_path) as writer:
        writer.write(make_sample(0, "eager", 1.0))
    with writer.path.open("a", encoding="ascii") as file:
        file.write(rest)
    loaded = load_samples(tmp_path)
    assert [sample.mode for sample in loaded.samples] == ["eager"]
    assert loaded.warning == f"{writer.path}: the last line was cut off and is left out; 1 are complete"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("0,1,graph,0,fast,,1,100,400,0,0,0", "line 2: could not convert string to float: 'fast'"),
        ("0,1,warp,0,1.0,,1,100,400,0,0,0", "line 2: mode 'warp' is none of eager, graph, eager_repeat, hf"),
        ("0,1,graph", "line 2: 3 cells instead of 12"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "samples.csv"
    path.write_text(",".join(records.SAMPLE_COLUMNS) + f"\n{line}\n", encoding="ascii")
    with pytest.raises(UsageError) as caught:
        load_samples(path)
    assert message in str(caught.value)


def test_a_file_with_other_columns_is_no_samples_file(tmp_path: Path) -> None:
    path = tmp_path / "samples.csv"
    path.write_text("request,ms\n0,1.0\n", encoding="ascii")
    with pytest.raises(UsageError, match="does not start with the header round,request,mode"):
        load_samples(path)


def test_a_request_is_the_mean_of_its_rounds() -> None:
    samples = [
        make_sample(0, "eager", 10.0, 0, gpu_ms=4.0),
        make_sample(0, "graph", 8.0, 0, gpu_ms=5.0),
        make_sample(0, "eager", 20.0, 1, gpu_ms=6.0),
        make_sample(0, "graph", 10.0, 1, gpu_ms=5.0),
    ]
    summary = build_summary(samples)
    assert summary["eager"] == {
        "mean_ms": 15.0,
        "p50_ms": 15.0,
        "p90_ms": 15.0,
        "p99_ms": 15.0,
        "p99_supported": False,
        "max_ms": 15.0,
        "std_ms": None,
        "n": 1,
        "gpu_mean_ms": 5.0,
        "outliers": 0,
    }
    comparison = build_comparison(samples)
    assert (comparison["requests"], comparison["rounds"]) == (1, 2)
    assert comparison["mean"]["delta_pct"] == pytest.approx(-40.0)


def test_an_interrupted_round_counts_only_where_both_modes_ran() -> None:
    samples = [
        make_sample(0, "eager", 10.0),
        make_sample(0, "graph", 5.0),
        make_sample(1, "eager", 99.0),
    ]
    assert {mode: entry["mean_ms"] for mode, entry in build_summary(samples).items()} == {"eager": 10.0, "graph": 5.0}
    comparison = build_comparison(samples)
    assert (comparison["requests"], comparison["unpaired_samples"]) == (1, 1)


def test_the_stock_forward_is_summarized_beside() -> None:
    summary = build_summary([*make_run([2.0], [1.0]), make_sample(0, "hf", 3.0)])
    assert list(summary) == ["eager", "graph", "hf"]
    assert summary["hf"]["mean_ms"] == 3.0
    assert summary["hf"]["gpu_mean_ms"] is None


def test_monolithic_graphs_are_compared_with_eager_and_two_paths_over_the_same_requests() -> None:
    samples = [*make_run([10.0, 10.0], [5.0, 4.0]), make_sample(0, "monolithic", 8.0)]
    summary, comparison = build_summary(samples), build_comparison(samples)
    assert {mode: (entry["n"], entry["mean_ms"]) for mode, entry in summary.items()} == {
        "eager": (1, 10.0),
        "graph": (1, 5.0),
        "monolithic": (1, 8.0),
    }
    assert (comparison["requests"], comparison["unpaired_samples"]) == (1, 2)
    deltas = [
        comparison[name]["mean"]["delta_pct"] for name in ("monolithic_against_eager", "two_paths_against_monolithic")
    ]
    assert deltas == [pytest.approx(-20.0), pytest.approx(-37.5)]
    assert comparison["mean"]["delta_pct"] == pytest.approx(-50.0)
    assert "monolithic_against_eager" not in build_comparison(make_run([10.0], [5.0]))


def test_no_samples_compare_to_nothing() -> None:
    assert build_summary([]) == {}
    comparison = build_comparison([])
    assert (comparison["requests"], comparison["mean"]["delta_pct"], comparison["verdict"]) == (0, None, "undecided")
    assert comparison["verdict_reason"] == "no call was measured in both"


def steady(factor: float) -> list[float]:
    return [factor * (1.0 + 0.1 * request) for request in range(20)]


BEYOND = "the 95% interval of the mean lies wholly beyond the noise floor of ±1.00%"
WITHIN = "the 95% interval of the mean lies wholly within ±2%"
NO_CONTROL = "the noise is not known, since too few calls were measured against themselves: measure more requests"
TOO_FEW = "5 calls are too few for an interval of the mean; it takes 10"


@pytest.mark.parametrize(
    ("graph", "repeat", "verdict", "reason"),
    [
        (steady(0.8), steady(1.01), "faster", BEYOND),
        (steady(1.2), steady(1.01), "slower", BEYOND),
        (steady(1.0), steady(1.01), "same", WITHIN),
        (steady(0.8), None, "undecided", NO_CONTROL),
        (steady(0.8)[:5], steady(1.01), "undecided", TOO_FEW),
    ],
)
def test_verdicts_come_with_their_reason(
    graph: list[float], repeat: list[float] | None, verdict: str, reason: str
) -> None:
    comparison = build_comparison(make_run(steady(1.0), graph, repeat))
    assert (comparison["verdict"], comparison["verdict_reason"]) == (verdict, reason)


def test_any_reason_against_the_times_makes_every_verdict_invalid() -> None:
    samples = make_run(steady(1.0), steady(0.8), steady(1.0))
    comparison = build_comparison(samples, invalid_reasons=["the clock dropped to 60%", "another process ran"])
    assert {comparison[metric]["verdict"] for metric in ("mean", "p50", "p99")} == {"invalid"}
    assert comparison["verdict_reason"] == "the clock dropped to 60%; another process ran"


def test_slower_requests_use_the_noise_of_the_repeat() -> None:
    slower = build_comparison(make_run([10.0] * 12, [9.0, 10.3, 10.6, 12.0] * 3, [10.5] * 12))["slower_than_eager"]
    assert slower["threshold_pct"] == pytest.approx(5.0)
    assert (slower["count"], slower["share"], slower["n"]) == (6, 0.5, 12)
    assert (slower["over_2pct_count"], slower["over_2pct_share"]) == (9, 0.75)


def test_a_few_repeats_are_no_noise_of_a_request() -> None:
    slower = build_comparison(make_run([10.0] * 4, [9.0, 10.3, 10.6, 12.0], [10.5] * 4))["slower_than_eager"]
    assert (slower["threshold_pct"], slower["count"], slower["share"]) == (None, None, None)
    assert slower["over_2pct_count"] == 3


def test_records_and_reports_load_neither_torch_nor_what_they_do_not_need() -> None:
    code = (
        "import sys, vitgraph.records.bench_record;"
        "print([m for m in ('torch', 'pandas', 'matplotlib', 'rich') if m in sys.modules]);"
        "import vitgraph.report.console, vitgraph.report.csv_tables, vitgraph.report.plots;"
        "print([m for m in ('torch', 'pandas', 'matplotlib') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["[]", "[]"]
