"""Sizes out of request logs: which lines give which requests, and what is left out with its reason."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from vitgraph.errors import InputError, UsageError
from vitgraph.workloads.base import Workload
from vitgraph.workloads.request_log import compile_pattern, read_json_log, read_text_log


def sizes(workload: Workload) -> list[list[tuple[int, int, int]]]:
    return [[(item.width, item.height, item.frames) for item in request.items] for request in workload.requests]


def write(tmp_path: Path, text: str, name: str = "log.jsonl") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"width": 640, "height": 480}', [(640, 480, 1)]),
        ('{"width": "640", "height": "480"}', [(640, 480, 1)]),
        ('{"width": 640, "height": 360, "frames": 120, "fps": 30}', [(640, 360, 120)]),
        ('{"image_sizes": [[640, 480], [30, 50]], "model": "m"}', [(640, 480, 1), (30, 50, 1)]),
        ('{"image_sizes": ["640x480", "64x32x8"]}', [(640, 480, 1), (64, 32, 8)]),
        ('{"images": [{"width": 1, "height": 2}], "videos": [[3, 4, 5]]}', [(1, 2, 1), (3, 4, 5)]),
        ('{"items": [{"width": 1, "height": 2, "frames": 1}]}', [(1, 2, 1)]),
    ],
)
def test_the_spellings_of_a_size(line: str, expected: list[tuple[int, int, int]], tmp_path: Path) -> None:
    assert sizes(read_json_log(write(tmp_path, line))) == [expected]


def test_each_line_is_a_request_unless_it_names_one(tmp_path: Path) -> None:
    text = '{"width":1,"height":1,"request":"b"}\n\n{"width":2,"height":2}\n{"width":3,"height":3,"request":"b"}\n'
    workload = read_json_log(write(tmp_path, text))
    assert sizes(workload) == [[(1, 1, 1), (3, 3, 1)], [(2, 2, 1)]]
    assert workload.requests[1].items[0].source == "log.jsonl:3"


def test_frame_rates_are_kept(tmp_path: Path) -> None:
    workload = read_json_log(write(tmp_path, '{"width": 6, "height": 4, "frames": 9, "fps": 29.97}'))
    assert workload.requests[0].items[0].fps == 29.97


def test_pairs_may_be_height_first(tmp_path: Path) -> None:
    path = write(tmp_path, '{"image_sizes": [[480, 640], "32x64x8", {"width": 5, "height": 6}]}')
    assert sizes(read_json_log(path, height_first=True)) == [[(640, 480, 1), (64, 32, 8), (5, 6, 1)]]


def test_what_is_left_out_is_counted_or_named(tmp_path: Path) -> None:
    lines = (
        '{"width": 640, "height": 480}', '{"prompt": "no image"}', '{"image_sizes": []}', "not json", "[1, 2]",
        '{"width": 0, "height": 4}', '{"width": 4}', '{"image_sizes": [[1], [7, 8]]}',
        '{"width": 2, "height": 2, "frames": 4, "fps": -1}', '{"width": 1e3, "height": 4}',
    )  # fmt: skip
    workload = read_json_log(write(tmp_path, "\n".join(lines)))
    # An empty list is a request without items; a line whose sizes are all unusable is none.
    assert sizes(workload) == [[(640, 480, 1)], [], [(7, 8, 1)]]
    assert workload.provenance["lines"] == 10
    assert workload.provenance["lines_without_size"] == 2
    assert [item.source for item in workload.skipped] == [f"log.jsonl:{line}" for line in (4, 6, 7, 8, 9, 10)]
    reasons = [item.reason for item in workload.skipped]
    assert "not a JSON object" in reasons[0]
    assert "'width': 0" in reasons[1]
    assert "fps" in reasons[4]


def test_a_log_without_sizes_says_what_a_line_needs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no usable size in 1 lines; a line names its sizes as width and height"):
        read_json_log(write(tmp_path, '{"a": 1}'))
    with pytest.raises(InputError, match=r"first: log\.jsonl:1: not a JSON object"):
        read_json_log(write(tmp_path, "x"))


def test_compressed_and_missing_logs(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"width": 6, "height": 4}\n'))
    workload = read_json_log(path)
    assert (workload.name, sizes(workload)) == ("log", [[(6, 4, 1)]])
    with pytest.raises(InputError, match=r"cannot read the log .*none\.jsonl: No such file"):
        read_json_log(tmp_path / "none.jsonl")
    (tmp_path / "bad.gz").write_bytes(b"plain")
    with pytest.raises(InputError, match=r"cannot read the log .*bad\.gz: Not a gzipped file"):
        read_json_log(tmp_path / "bad.gz")


ACCESS = (
    '10.0.0.1 - - [01/Jan/2026:00:00:00 +0000] "POST /v1/chat/completions HTTP/1.1" 200 9 "-" size=1640x480 id=a\n'
    '10.0.0.1 - - [01/Jan/2026:00:00:01 +0000] "GET /health HTTP/1.1" 200 2 "-" size=- id=b\n'
    '10.0.0.1 - - [01/Jan/2026:00:00:02 +0000] "POST /v1/chat/completions HTTP/1.1" 200 9 "-" size=30x50,60x70 id=a\n'
)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("size=WxH", [[(1640, 480, 1)], [(30, 50, 1)]]),
        ("WxH", [[(1640, 480, 1)], [(30, 50, 1), (60, 70, 1)]]),
        (r"size=(?P<height>\d+)x(?P<width>\d+)", [[(480, 1640, 1)], [(50, 30, 1)]]),
        (r"WxH.* id=(?P<request>\w)", [[(1640, 480, 1), (30, 50, 1)]]),
    ],
)
def test_a_pattern_finds_the_sizes_of_a_text_log(
    pattern: str, expected: list[list[tuple[int, int, int]]], tmp_path: Path
) -> None:
    workload = read_text_log(write(tmp_path, ACCESS, "access.log"), pattern)
    assert sizes(workload) == expected
    assert (workload.provenance["lines"], workload.provenance["lines_without_size"]) == (3, 1)


def test_a_placeholder_takes_whole_numbers_and_frames() -> None:
    expression = compile_pattern("v=WxHxF")
    assert [match.groups() for match in expression.finditer("v=640x360x12 v=1x2")] == [("640", "360", "12")]
    assert compile_pattern("WxH").search("id1640x480x") is not None
    assert compile_pattern("WxH").findall("1640x480") == [("1640", "480")]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [("size=", "names no size; write WxH"), (r"(?P<width>\d+)", "names no size"), ("WxH(", "not a regular expression")],
)
def test_patterns_without_a_size_are_refused(pattern: str, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        compile_pattern(pattern)


def test_a_size_of_zero_in_a_text_log_is_named(tmp_path: Path) -> None:
    workload = read_text_log(write(tmp_path, "size=0x4\nsize=6x4\n", "access.log"), "size=WxH")
    assert sizes(workload) == [[(6, 4, 1)]]
    assert [item.source for item in workload.skipped] == ["access.log:1"]
