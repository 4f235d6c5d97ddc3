"""Result folders: refused before anything is measured, locked, and every error of the system is one line."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from vitgraph.errors import UsageError
from vitgraph.records.record import BenchRecord
from vitgraph.records.results import BenchResult
from vitgraph.records.series import GraphFacts
from vitgraph.records.store import (
    RUN_FILE,
    RecordFileError,
    ResultFolder,
    beside,
    check_file,
    new_folder,
    read_record,
    write_file,
)

Usage = namedtuple("Usage", "total used free")


def a_record(**fields: object) -> BenchRecord:
    return BenchRecord.model_validate({"result": BenchResult(graph=GraphFacts(policy="greedy")), **fields})


def one_line(raised: pytest.ExceptionInfo[Exception]) -> str:
    text = str(raised.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("path", ["/proc/nope/x", "/dev/null/x"])
def test_a_folder_that_cannot_be_is_refused_in_one_line(path: str) -> None:
    with pytest.raises(UsageError) as raised:
        ResultFolder(Path(path))
    assert path.split("/x")[0] in one_line(raised)


def test_a_read_only_folder_is_refused_and_none_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(path: Path, content: bytes) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "write_bytes", read_only)
    with pytest.raises(UsageError) as raised:
        ResultFolder(tmp_path / "run")
    assert "Read-only file system" in one_line(raised)
    assert not (tmp_path / "run").exists()


def test_a_full_disk_is_refused_before_measuring_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10, 10, 0))
    with pytest.raises(UsageError) as raised:
        ResultFolder(tmp_path / "a" / "b")
    assert "0 MiB free" in one_line(raised)
    assert not (tmp_path / "a").exists()


def test_an_older_result_is_kept_unless_asked(tmp_path: Path) -> None:
    with ResultFolder(tmp_path / "run") as folder:
        folder.save(a_record())
    with pytest.raises(UsageError):
        ResultFolder(tmp_path / "run")
    with ResultFolder(tmp_path / "run", overwrite=True) as folder:
        folder.save(a_record(status="interrupted", status_reason="stopped"))
    assert read_record(tmp_path / "run").status == "interrupted"


def test_a_run_that_saved_nothing_leaves_no_folder(tmp_path: Path) -> None:
    with ResultFolder(tmp_path / "a" / "b"):
        pass
    assert not (tmp_path / "a").exists()


@pytest.mark.slow
def test_a_second_writer_of_a_folder_is_refused(tmp_path: Path) -> None:
    program = f"from vitgraph.records.store import *; ResultFolder(Path({str(tmp_path)!r}), overwrite=True)"
    with ResultFolder(tmp_path, overwrite=True):
        second = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "another vitgraph is writing" in second.stderr
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_default_names_of_one_second_differ() -> None:
    assert len({new_folder("bench", "model") for _ in range(10)}) == 10


def test_a_disk_that_fills_up_says_what_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with ResultFolder(tmp_path / "run") as folder:
        folder.save(a_record())
        (folder.path / "samples.csv").write_text("call\n")
        folder.samples_saved = 7
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(RecordFileError) as raised:
            folder.save(a_record())
        text = one_line(raised)
        assert "No space left" in text and "7 samples" in text and "an earlier state" in text
        with pytest.raises(RecordFileError, match="No space left"):
            folder.write("trace.json", b"{}")
        with pytest.raises(RecordFileError, match="Not saved: the profile"):
            write_file(tmp_path / "file.json", b"{}", "the profile")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [RUN_FILE, "samples.csv"]


def test_single_files_are_checked_too(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("old")
    for path in (tmp_path, tmp_path / "there", tmp_path / "there" / "x", Path("/proc/nope/x.json")):
        with pytest.raises(UsageError):
            check_file(path)
    check_file(tmp_path / "new" / "file.json")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "..", ""])
def test_a_record_names_no_file_outside_of_its_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError):
        beside(tmp_path / RUN_FILE, name)
    with ResultFolder(tmp_path, overwrite=True) as folder:
        folder.save(a_record(samples_file="samples.csv"))
    file = tmp_path / RUN_FILE
    file.write_text(file.read_text().replace("samples.csv", name))
    with pytest.raises(UsageError, match=r"run\.json"):
        read_record(tmp_path)
