"""Sizes out of request logs: which lines give which requests, and what is left out with its reason."""

from __future__ import annotations

import base64
import bz2
import gzip
import io
import json
import lzma
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from PIL import Image

from vitgraph.errors import InputError, UsageError
from vitgraph.specs.parts import WorkloadSpec
from vitgraph.workloads.base import Workload
from vitgraph.workloads.registry import build_workload, convert_source
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
        ('{"images": {"width": 1, "height": 2}}', [(1, 2, 1)]),
        ('{"image_sizes": "640×480"}', [(640, 480, 1)]),
        ('{"width": 1, "height": 2, "images": []}', [(1, 2, 1)]),
    ],
)
def test_the_spellings_of_a_size(line: str, expected: list[tuple[int, int, int]], tmp_path: Path) -> None:
    assert sizes(read_json_log(write(tmp_path, line))) == [expected]


def test_each_line_is_a_request_unless_it_names_one(tmp_path: Path) -> None:
    text = '{"width":1,"height":1,"request":"b"}\n\n{"width":2,"height":2}\n{"width":3,"height":3,"request":"b"}\n'
    workload = read_json_log(write(tmp_path, text))
    assert sizes(workload) == [[(1, 1, 1), (3, 3, 1)], [(2, 2, 1)]]
    assert workload.requests[1].items[0].source == "log.jsonl:3"


def test_what_names_no_request_joins_no_lines(tmp_path: Path) -> None:
    lines = '{"request": "POST /v1/chat/completions HTTP/1.1", "width": 1, "height": 2}\n'
    lines += '{"request": "/v1/chat/completions", "width": 1, "height": 2}\n' * 2
    lines += '{"request": 7, "width": 3, "height": 4}\n{"request": 7.0, "width": 5, "height": 6}'
    assert sizes(read_json_log(write(tmp_path, lines))) == [*[[(1, 2, 1)]] * 3, [(3, 4, 1), (5, 6, 1)]]


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
        '{"width": 2, "height": 2, "frames": 4, "fps": -1}', '{"width": 1.5, "height": 4}',
    )  # fmt: skip
    workload = read_json_log(write(tmp_path, "\n".join(lines)))
    # An empty list is a request without items; a line whose sizes are all unusable is none.
    assert sizes(workload) == [[(640, 480, 1)], [], [(7, 8, 1)]]
    assert workload.provenance["lines"] == 10
    assert workload.provenance["lines_without_size"] == 2
    assert [item.source for item in workload.skipped] == [f"log.jsonl:{line}" for line in (4, 6, 7, 8, 9, 10)]
    reasons = [item.reason for item in workload.skipped]
    assert "not a JSON object" in reasons[0]
    assert '"width": 0, "height": 4}: width is 0; it must be a positive integer' in reasons[1]
    assert "fps" in reasons[4]


def test_a_log_without_sizes_says_what_a_line_needs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no usable size in 1 lines; an entry names its sizes at its top as width"):
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
    (tmp_path / "bad.gz").write_bytes(gzip.compress(b'{"width": 6}' * 99)[:-9])
    with pytest.raises(InputError, match=r"cannot read the log .*bad\.gz: Compressed file ended"):
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
    ],
)
def test_a_pattern_finds_the_sizes_of_a_text_log(
    pattern: str, expected: list[list[tuple[int, int, int]]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    workload = read_text_log(write(tmp_path, ACCESS, "access.log"), pattern)
    assert sizes(workload) == expected
    assert (workload.provenance["lines"], workload.provenance["lines_without_size"]) == (3, 1)
    assert ("further sizes behind a match of --pattern, which are not read: 1" in caplog.text) == (len(expected[1]) < 2)


def test_a_pattern_may_name_the_request(tmp_path: Path) -> None:
    workload = read_text_log(write(tmp_path, ACCESS, "access.log"), r"WxH.* id=(?P<request>\w)")
    assert sizes(workload) == [[(1640, 480, 1), (30, 50, 1)]]


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


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"videos": [{"width": 1280, "height": 720, "num_frames": 16, "fps": 2}]}', (1280, 720, 16, 2)),
        ('{"videos": [[1280, 720, 16]]}', (1280, 720, 16, None)),
        ('{"videos": [{"width": 1280, "height": 720, "duration": 4.5, "fps": 30}]}', (1280, 720, 135, 30)),
        ('{"items": [{"type": "video", "width": 64, "height": 48, "n_frames": "8"}]}', (64, 48, 8, None)),
        ('{"width": 64, "height": 48, "frames": 8.0, "frame_rate": 25}', (64, 48, 8, 25)),
    ],
)
def test_videos_stay_videos(line: str, expected: tuple[int, int, int, float | None], tmp_path: Path) -> None:
    (item,) = read_json_log(write(tmp_path, line)).requests[0].items
    assert (item.width, item.height, item.frames, item.fps) == expected


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"videos": [{"width": 1280, "height": 720}]}', "needs frames"),
        ('{"videos": ["1280x720"]}', "needs frames"),
        ('{"videos": [{"width": 1280, "height": 720, "duration": 4}]}', "needs frames"),
        ('{"videos": [{"width": 1280, "height": 720, "frames": 1000000000}]}', "at most 999999999"),
        ('{"videos": [{"width": 1280, "height": 720, "frames": 999999999}]}', "at most 1000000"),
        ('{"items": [{"width": 12, "height": 7, "duration": -1, "fps": 3}]}', "duration"),
        ('{"videos": [{"width": 12, "height": 7, "frames": 9, "fps": 1e-320}]}', "fps"),
        ('{"videos": [{"width": 12, "height": 7, "duration": 1e300, "fps": 30}]}', "duration"),
        ('{"videos": [{"width": 12, "height": 7, "duration": 900000, "fps": 30}]}', "at most 1000000"),
        ('{"images": [{"url": "https://example.org/a.png"}]}', "nothing is fetched"),
        ('{"images": [{"url": "data:image/png;base64,?"}]}', "base64"),
        ('{"images": ["data:video/mp4;base64,AA=="]}', "no image"),
        ('{"messages": [{"content": [{"type": "image_url", "image_url": "data:image/png;base64,AAAA"}]}]}', "PIL"),
        ('{"input": [{"content": [{"type": "input_image", "file_id": "f1"}]}]}', "holds no image as data"),
    ],
)  # fmt: skip
def test_what_names_no_size_is_left_out_with_its_reason(line: str, reason: str, tmp_path: Path) -> None:
    workload = read_json_log(write(tmp_path, f'{line}\n{{"width": 1, "height": 2}}'))
    assert sizes(workload) == [[(1, 2, 1)]]
    assert reason in workload.skipped[0].reason
    assert " at 0x" not in workload.skipped[0].reason


def image_url(width: int, height: int) -> str:
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def test_images_of_request_bodies_are_measured(tmp_path: Path) -> None:
    parts = [
        {"type": "text", "text": "Compare."},
        {"type": "image_url", "image_url": {"url": image_url(30, 20)}},
        {"type": "image_url", "image_url": image_url(5, 6)},
    ]
    answers = [{"role": "user", "content": [{"type": "input_image", "image_url": image_url(7, 8)}]}]
    source = {"type": "base64", "media_type": "image/png", "data": image_url(9, 4).split(",")[1]}
    bodies = [
        {"model": "m", "messages": [{"role": "system", "content": "x"}, {"role": "user", "content": parts}]},
        {"custom_id": "a", "body": {"messages": [{"role": "user", "content": parts[:2]}]}},
        {"input": answers},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]},
        {"messages": [{"role": "user", "content": "no image"}]},
    ]
    workload = read_json_log(write(tmp_path, "\n".join(map(json.dumps, bodies))))
    assert sizes(workload) == [[(30, 20, 1), (5, 6, 1)], [(30, 20, 1)], [(7, 8, 1)], [(9, 4, 1)]]
    assert workload.provenance["lines_without_size"] == 1


def test_images_are_found_where_clients_and_gateways_put_them(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": [{"image_url": {"url": image_url(30, 20)}}]}]
    shown = {"type": "image", "source": {"data": image_url(9, 4).split(",")[1]}}
    answer = {"type": "tool_result", "content": [{"type": "text", "text": "seen"}, shown]}
    screen = {"type": "computer_call_output", "output": {"type": "computer_screenshot", "image_url": image_url(7, 8)}}
    bare = [{"content": [{"image_url": image_url(5, 6).replace("image/png", kind)}]} for kind in ("", "IMAGE/PNG")]
    entries = [
        {"messages": [*messages, {"role": "user", "content": [answer]}]},
        {"input": [screen, *messages]},
        {"request": "POST /v1 HTTP/1.1", "request_body": json.dumps({"messages": messages})},
        {"messages": messages, "proxy_server_request": {"body": {"messages": messages}}},
        {"id": "a", "input": {"messages": [{"content": [{"image": image_url(30, 20)}]}]}, "output": "text"},
        {"custom_id": "a", "body": {"messages": bare}},
    ]
    workload = read_json_log(write(tmp_path, "\n".join(map(json.dumps, entries))))
    both = [(30, 20, 1), (9, 4, 1)]
    assert sizes(workload) == [both, [(7, 8, 1), (30, 20, 1)], *[[(30, 20, 1)]] * 3, [(5, 6, 1)] * 2]
    assert not workload.skipped


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize(
    "pack", [bytes, gzip.compress, bz2.compress, lzma.compress, partial(pa.compress, codec="zstd", asbytes=True)]
)
@pytest.mark.parametrize(
    "text", ['{"width": 6, "height": 4}\n', '[{"width": 6, "height": 4}]', '{\n"width": 6,\n"height": 4}']
)
def test_marks_packing_and_layout_do_not_matter(text: str, pack: Any, encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(pack(text.encode(encoding)))
    assert sizes(read_json_log(path)) == [[(6, 4, 1)]]
    assert sizes(convert_source(str(path))) == [[(6, 4, 1)]]


@pytest.mark.parametrize("name", ["a.zip", "a.tar", "a.tar.gz"])
def test_archives_are_refused_as_such(name: str, tmp_path: Path) -> None:
    write(tmp_path, '{"width": 6, "height": 4}')
    kind = {".zip": "zip", ".tar": "tar", ".gz": "gztar"}[Path(name).suffix]
    path = shutil.make_archive(str(tmp_path / "a"), kind, tmp_path, "log.jsonl")
    for look in (convert_source, lambda given: build_workload(WorkloadSpec(dataset_name="trace", dataset_path=given))):
        with pytest.raises(InputError, match="it is an archive or a workbook; unpack it"):
            look(path)


def test_fields_that_are_not_read_are_said_and_can_be_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, '{"pics": "3x2", "size": 1.5}\n{"images": [{"width": 6, "height": 4, "nframes": 8}]}')
    workload = read_json_log(path)
    assert workload.provenance["fields_not_read"] == "nframes, pics"
    assert "fields that are not read: nframes, pics; --fields" in caplog.text
    again = read_json_log(path, fields={"images": "pics", "frames": "nframes"})
    assert sizes(again) == [[(3, 2, 1)]]
    assert sizes(read_json_log(path, fields={"frames": "nframes"})) == [[(6, 4, 8)]]


def test_a_size_that_is_no_count_of_bytes_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, '{"size": 9}\n{"width": 6, "height": 4}')
    assert sizes(read_json_log(path)) == [[(6, 4, 1)]] and not caplog.text
    path = write(tmp_path, '{"size": [3, 2]}\n{"width": 6, "height": 4}')
    assert sizes(read_json_log(path)) == [[(6, 4, 1)]]
    assert "fields that are not read: size;" in caplog.text


def test_numbers_of_entries_without_a_size_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    body = '{"messages": [], "max_tokens": 7}'
    path = write(tmp_path, f'{{"w": 3, "h": 2}}\n{{"w": 5, "h": 4}}\n{body}\n{{"width": 6, "height": 4}}')
    assert sizes(read_json_log(path)) == [[(6, 4, 1)]]
    assert caplog.text.count("fields that are not read: h, w; --fields") == 1
    assert len(sizes(read_json_log(path, fields={"width": "w", "height": "h"}))) == 2


def test_pipes_and_devices_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(InputError, match="no regular file"):
            read_json_log(path)
