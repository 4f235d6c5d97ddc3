"""The samples table: a sample is a call, requests weigh it, and damage is named by its line."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from vitgraph.errors import UsageError
from vitgraph.records.sample_table import COLUMNS, Sample, Samples, SampleWriter, read_samples
from vitgraph.records.store import SAMPLES_FILE, RecordFileError, ResultFolder


def a_sample(call: int, series: str, wall_ms: float, requests: tuple[int, ...] = (0,), **more: object) -> Sample:
    counts = {"round": 0, "position": 0, "items": 1, "tokens": 64, "input_rows": 256}
    return Sample(call=call, requests=requests, series=series, wall_ms=wall_ms, **{**counts, **more})  # type: ignore[arg-type]


def write(folder: Path, samples: list[Sample]) -> Path:
    with ResultFolder(folder, overwrite=True) as result, SampleWriter(result) as writer:
        for sample in samples:
            writer.write(sample)
    return folder / SAMPLES_FILE


def test_samples_of_a_folder_that_vanished_are_not_taken_for_saved(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with ResultFolder(folder) as result, SampleWriter(result) as writer:
        writer.write(UNEQUAL[0])
        shutil.rmtree(folder)
        with pytest.raises(RecordFileError, match=r"removed meanwhile\. Saved: nothing\. Not saved: call 0 of round 0"):
            writer.write(UNEQUAL[1])
        with pytest.raises(RecordFileError, match=r"No such file or directory\. Saved: nothing"):
            result.save(SimpleNamespace(model_dump_json=lambda indent: "{}"))  # type: ignore[arg-type]


UNEQUAL = [
    a_sample(0, "eager", 30.0, (0, 1, 2)),
    a_sample(0, "graph", 15.0, (0, 1, 2)),
    a_sample(1, "eager", 20.0, (4,)),
    a_sample(1, "graph", 10.0, (4,)),
    a_sample(0, "eager_repeat", 33.0, (0, 1, 2)),
]


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    read = read_samples(write(tmp_path, UNEQUAL))
    assert read.warning is None
    assert read.frame[list(COLUMNS)].astype(str).equals(Samples.of(UNEQUAL).frame.astype(str))
    packed = tmp_path / "samples.csv.gz"
    packed.write_bytes(gzip.compress((tmp_path / SAMPLES_FILE).read_bytes()))
    assert len(read_samples(packed)) == len(UNEQUAL)


def test_times_are_of_a_request_and_calls_have_weights() -> None:
    times = Samples.of(UNEQUAL).paired(["eager", "graph"])
    assert times.times["eager"] == pytest.approx([10.0, 20.0])
    assert times.requests.tolist() == [3, 1] and times.request_count == 4
    assert np.average(times.times["eager"], weights=times.requests) == pytest.approx(50.0 / 4)


def test_a_call_counts_in_rounds_that_every_series_has() -> None:
    samples = [*UNEQUAL, a_sample(0, "eager", 60.0, (0, 1, 2), round=1)]
    times = Samples.of(samples).paired(["eager", "graph"])
    assert times.times["eager"] == pytest.approx([10.0, 20.0])
    assert (times.rounds, times.unpaired) == (1, 1)
    assert len(Samples.of(samples).paired(["eager", "hf"]).calls) == 0


def test_repeats_are_paired_with_their_first_time() -> None:
    samples = [
        *UNEQUAL,
        *(a_sample(2, f"A/graph{suffix}", ms, (5,)) for suffix, ms in (("", 8.0), ("_repeat", 9.0))),
    ]
    table = Samples.of(samples)
    assert table.repeated(["eager"]).times["second"] == pytest.approx([11.0])
    assert table.repeated(["A/graph", "B/graph"]).times["first"] == pytest.approx([8.0])


def test_sharing_is_a_request_and_counts_one_round() -> None:
    rows = [
        a_sample(0, "graph", 12.0, (0, 1), rank=rank, round=number, encode_ms=4.0 + 4 * rank, gather_ms=5.0 - 4 * rank)
        for number in (0, 1)
        for rank in (0, 1)
    ]
    found = Samples.of(rows).sharing("graph", 2)
    assert found is not None
    assert found.gather_ms == pytest.approx(0.5)
    assert found.time_imbalance == pytest.approx(8 / 6)
    assert [part.wait_ms for part in found.ranks] == pytest.approx([2.0, 0.0])
    assert [part.items for part in found.ranks] == [1, 1]
    assert Samples.of(rows[:1]).sharing("graph", 2) is None


def test_a_last_line_without_its_end_is_left_out(tmp_path: Path) -> None:
    file = write(tmp_path, UNEQUAL)
    file.write_bytes(file.read_bytes()[:-4])
    read = read_samples(file)
    assert len(read) == len(UNEQUAL) - 1
    assert "cut off" in str(read.warning)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("30.000000", "nan"),
        ("30.000000", "-1"),
        ("30.000000", "9" * 5000),
        ("30.000000", "1e999"),
        (",64,", ",6.5,"),
        (",64,", ",,"),
        (",eager,", ",,"),
        ("0 1 2", "0 x"),
        ("0 1 2", ""),
        ("0 1 2,", "0,1,2,"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, old: str, new: str) -> None:
    file = write(tmp_path, UNEQUAL)
    file.write_text(file.read_text().replace(old, new, 1))
    with pytest.raises(UsageError, match="line 2"):
        read_samples(file)


@pytest.mark.parametrize("content", [b"", b"a,b\n1,2\n", b"\xff\xfe", b"\n"])
def test_what_is_no_samples_file_is_refused(tmp_path: Path, content: bytes) -> None:
    for name in ("samples.csv", "samples.csv.gz"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError):
            read_samples(tmp_path / name)
