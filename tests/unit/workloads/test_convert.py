"""What a source is taken for, and the workload that comes of it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from vitgraph.errors import InputError, UsageError
from vitgraph.specs.parts import WorkloadSpec
from vitgraph.workloads import registry
from vitgraph.workloads.base import Workload
from vitgraph.workloads.registry import build_workload, convert_source


def first_size(workload: Workload) -> tuple[int, int]:
    item = workload.requests[0].items[0]
    return item.width, item.height


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for name, size in (("a.png", (64, 48)), ("b.png", (30, 50))):
        Image.new("RGB", size).save(folder / name)
    (folder / "c.png").write_bytes(b"damaged")
    return folder


@pytest.fixture
def arena(tmp_path: Path) -> Path:
    rows = []
    for width in range(100, 130):
        buffer = io.BytesIO()
        Image.new("RGB", (width, 40)).save(buffer, "PNG")
        rows.append([{"bytes": buffer.getvalue(), "path": None}])
    path = tmp_path / "arena" / "part.parquet"
    path.parent.mkdir()
    pq.write_table(pa.table({"images": rows}), path)
    return path


def test_a_folder_of_images(photos: Path) -> None:
    workload = convert_source(str(photos))
    assert workload.name == "photos"
    assert [first_size(workload), len(workload.requests)] == [(64, 48), 2]
    assert [item.source for item in workload.skipped] == ["c.png"]
    assert workload.provenance == {"dataset": "folder", "path": str(photos)}
    assert len(convert_source(str(photos), num_requests=1).requests) == 1


@pytest.mark.parametrize("whole_folder", [True, False])
def test_a_data_set_gives_the_requests_that_a_bench_would_measure(arena: Path, whole_folder: bool) -> None:
    source = str(arena.parent if whole_folder else arena)
    converted = convert_source(source, num_requests=12, spec=WorkloadSpec(disable_shuffle=True))
    measured = build_workload(
        WorkloadSpec("hf", dataset_path=source, num_prompts=12, num_warmups=5, disable_shuffle=True)
    )
    assert converted.fingerprint() == measured.fingerprint()
    assert converted.warmups == ()


def test_a_data_set_is_not_repeated_to_a_thousand(arena: Path) -> None:
    assert len(convert_source(str(arena), spec=WorkloadSpec(disable_shuffle=True)).requests) == 30


def test_a_hub_name_is_read_from_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    asked = []

    def build(spec: WorkloadSpec) -> Workload:
        asked.append((spec.dataset_name, spec.dataset_path, spec.num_prompts, spec.no_oversample, spec.seed))
        return Workload("x", ())

    monkeypatch.setattr(registry, "build_workload", build)
    convert_source("lmarena-ai/vision-arena-bench-v0.1", spec=WorkloadSpec(seed=42))
    assert asked == [("hf", "lmarena-ai/vision-arena-bench-v0.1", 1000, True, 42)]


def test_logs_are_told_apart_by_their_first_byte_and_by_the_pattern(tmp_path: Path) -> None:
    path = tmp_path / "requests"
    path.write_text('\n {"width": 6, "height": 4}\n')
    assert first_size(convert_source(str(path))) == (6, 4)
    path.write_text('{"size": "8x9"}\n')
    assert first_size(convert_source(str(path), pattern='"WxH"')) == (8, 9)
    path.write_text('{"image_sizes": [[4, 6]]}\n')
    assert first_size(convert_source(str(path), height_first=True)) == (6, 4)


@pytest.mark.parametrize(
    ("name", "options", "error", "expected"),
    [
        ("access.log", {}, UsageError, "for a text log say where its sizes are, for example --pattern 'size=WxH'"),
        ("access.log", {"kind": "text"}, UsageError, "is a text log; a text log needs a --pattern"),
        ("photos", {"pattern": "WxH"}, UsageError, "--pattern is given, but .*photos is read as images"),
        ("photos", {"height_first": True}, UsageError, "--height-first concerns JSON lines"),
        ("photos", {"kind": "jpeg"}, UsageError, "--kind is 'jpeg'; known: auto, hf, images, json-lines, text"),
        ("photos", {"num_requests": 0}, UsageError, "--num-prompts is 0"),
        ("none.log", {}, InputError, "does not exist; name a folder of images, a log file"),
    ],
)
def test_sources_that_cannot_be_read_as_asked(
    name: str, options: dict[str, Any], error: type[Exception], expected: str, photos: Path
) -> None:
    (photos.parent / "access.log").write_text("GET / 200\n")
    with pytest.raises(error, match=expected):
        convert_source(str(photos.parent / name), **options)


def test_a_missing_log_in_a_known_folder_is_not_looked_for_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "build_workload", lambda spec: pytest.fail("the hub was asked"))
    (tmp_path / "logs").mkdir()
    for missing in ("logs/today", "elsewhere/access.log"):
        with pytest.raises(InputError, match="does not exist"):
            convert_source(missing)
