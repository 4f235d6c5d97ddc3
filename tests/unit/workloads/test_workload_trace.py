"""Size traces: what is read, what is refused with which words, what is written back."""

from __future__ import annotations

from pathlib import Path

import pytest

from vitgraph.errors import InputError, UsageError
from vitgraph.records.store import RecordFileError
from vitgraph.specs.parts import WorkloadSpec
from vitgraph.workloads.base import MediaItem, Request, Workload
from vitgraph.workloads.registry import build_workload
from vitgraph.workloads.trace import SHIPPED_TRACES, save_trace


def write(tmp_path: Path, text: str | bytes, name: str = "t.csv") -> str:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def read(path: str, **options) -> Workload:
    return build_workload(WorkloadSpec(dataset_name="trace", dataset_path=path, **{"num_warmups": 0, **options}))


def sizes(workload: Workload) -> list[list[tuple[int, int, int]]]:
    return [[(item.width, item.height, item.frames) for item in request.items] for request in workload.requests]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("width,height\n640,480\n320,240\n", [[(640, 480, 1)], [(320, 240, 1)]]),
        ("width,height,frames\n640,480,1\n320,240,16\n", [[(640, 480, 1)], [(320, 240, 16)]]),
        ("frames,height,width\n2,480,640\n", [[(640, 480, 2)]]),
        ("\ufeffwidth,height\n640,480\n", [[(640, 480, 1)]]),
        ("\n\nwidth,height\n\n640,480\n,\n\n320,240", [[(640, 480, 1)], [(320, 240, 1)]]),
        ("Width , HEIGHT\r\n 640 , 480 \r\n", [[(640, 480, 1)]]),
        ('"width","height"\n"640","480"\n', [[(640, 480, 1)]]),
        (
            "request,width,height\nb,1,2\na,3,4\nb,5,6\n",
            [[(1, 2, 1), (5, 6, 1)], [(3, 4, 1)]],
        ),
        ("width,height,request\n1,2,0\n,,1\n3,4,2\n", [[(1, 2, 1)], [], [(3, 4, 1)]]),
    ],
)
def test_accepted_files(tmp_path: Path, text: str, expected: list) -> None:
    workload = read(write(tmp_path, text))
    assert sizes(workload) == expected
    assert [request.index for request in workload.requests] == list(range(len(expected)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("width,height,frames\n640,480,1\n0,480,1\n", r"t\.csv:3: width is 0; it must be a positive integer"),
        ("width,height\n640,-480\n", r"t\.csv:2: height is -480; it must be a positive integer"),
        ("width,height\n640,480.0\n", r"t\.csv:2: height is '480\.0'; it must be a positive integer"),
        ("width,height\n640,\n", r"t\.csv:2: height is ''; it must be a positive integer"),
        ("width,height\n1_0,4\n", r"t\.csv:2: width is '1_0'; it must be a positive integer"),
        ("width,height\n١٢,4\n", r"t\.csv:2: width is '١٢'; it must be a positive integer"),
        ("width,height\n1000000000,4\n", r"width is 1000000000; it must be a positive integer of at most 999999999"),
        ("width,height,frames\n\n640,480,0\n", r"t\.csv:3: frames is 0; .* 1 for an image"),
        ("width,height,frames\n640,480,\n", r"t\.csv:2: frames is ''; .* 1 for an image"),
        ("width,height,frames\n640,480\n", r"t\.csv:2: 2 values \('640,480'\) for 3 columns"),
        ("width,height\n640,480,1\n", r"t\.csv:2: 3 values \('640,480,1'\) for 2 columns"),
        ("width,height,request\n640,480,\n", r"t\.csv:2: column request is empty; name the request of every row"),
        ("width,height,request\n1,2,a\n,,a\n", r"t\.csv:3: columns width and height are empty, yet request 'a' has"),
        ("width,height,frames,fps\n1,2,3,-1\n", r"t\.csv:2: fps is '-1'; it must be a positive number"),
        (
            "width,height,frames,fps\n1,2,3,1e-320\n",
            r"t\.csv:2: fps is .1e-320.; it must be a positive number, from",
        ),
        (
            "width,height,frames,fps\n1,2,3,1e300\n",
            r"t\.csv:2: fps is .1e300.; it must be a positive number, from",
        ),
        (
            "width,height,arrival_s\n1,2,1e300\n",
            r"t\.csv:2: column arrival_s is .1e300.; it must be a number of seconds",
        ),
        ("width,height,frames,fps\n1,2,3,nan\n", r"t\.csv:2: fps is 'nan'; it must be a positive number"),
        (
            "640,480\n320,240\n",
            r"t\.csv:1: header '640,480' has unknown column '640', '480' and missing column 'width'",
        ),
        ("width,height,frame\n640,480,16\n", r"header 'width,height,frame' has unknown column 'frame'; the first line"),
        ("width,width,height\n1,1,1\n", r"has repeated column 'width'; the first line must name"),
        ("width;height\n640;480\n", r"header 'width;height' has unknown column 'width;height' and missing"),
        (
            "width,height\n",
            r"t\.csv: no rows with a size; the first line must name the columns .* for example 640,480,1",
        ),
        ("width,height,request\n,,a\n", r"t\.csv: no rows with a size; "),
        ("", r"t\.csv: no header; the first line must name"),
        (b"\xff\xfew\x00i\x00", r"t\.csv: byte 0 is not UTF-8; save the trace as plain CSV in UTF-8"),
    ],
)
def test_refused_files_name_file_line_column_value_and_rule(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(write(tmp_path, text))


def test_field_beyond_the_csv_limit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"t\.csv:2: not CSV \(field larger than field limit"):
        read(write(tmp_path, "width,height\n" + "1" * 200_000 + ",2\n"))


def test_missing_trace_lists_the_shipped_ones(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"trace 'mixed_chat' is no file.*mixed-chat, mixed-media, documents, screenshots, videos"
    ):
        read("mixed_chat")
    with pytest.raises(InputError, match=r"did you mean 'documents'\?"):
        read("document.csv")
    with pytest.raises(InputError, match=r"holds no .parquet file"):
        read(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "rows", "pixels", "has_videos"),
    [
        ("mixed-chat", 3300, 3_080_253_828, False),
        ("documents", 1767, 1_654_321_311, False),
        ("screenshots", 978, 485_399_600, False),
        ("videos", 1570, 413_250_592, True),
    ],
)
def test_shipped_traces(name: str, rows: int, pixels: int, has_videos: bool) -> None:
    workload = read(name, num_prompts=10_000)
    items = [item for request in workload.requests for item in request.items]
    assert (len(workload.requests), len(items), workload.has_videos) == (rows, rows, has_videos)
    assert sum(item.width * item.height for item in items) == pixels
    assert workload.name == name
    assert workload.provenance["statement"] == SHIPPED_TRACES[name].statement


def test_default_trace_is_mixed_chat_and_says_what_it_is_not() -> None:
    workload = build_workload(WorkloadSpec(dataset_name="trace"))
    assert workload.fingerprint() == "482c2e708dafc1f4"
    assert (len(workload.requests), len(workload.warmups)) == (1000, 1)
    assert workload.requests[0].items[0] == MediaItem(720, 720, source="mixed-chat.csv:2")
    assert "not VisionArena-Chat" in str(workload.provenance["statement"])


def test_shipped_name_wins_over_a_file_and_a_path_reaches_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "width,height\n1,2\n", "documents")
    assert read("documents").num_items == 1000
    assert sizes(read("./documents")) == [[(1, 2, 1)]]


def test_prompts_are_the_first_and_warmups_the_following(tmp_path: Path) -> None:
    path = write(tmp_path, "width,height\n" + "".join(f"{side},{side}\n" for side in range(1, 8)))
    workload = read(path, num_prompts=3, num_warmups=2)
    assert [request.items[0].width for request in workload.requests] == [1, 2, 3]
    assert [request.items[0].width for request in workload.warmups] == [4, 5]
    assert workload.provenance["warmups"] == "the requests after the measured ones"
    assert workload.requests[1].items[0].source == "t.csv:3"


def test_short_trace_is_not_repeated_and_says_so(tmp_path: Path) -> None:
    workload = read(write(tmp_path, "width,height\n1,1\n2,2\n"), num_prompts=5, num_warmups=3)
    assert sizes(workload) == [[(1, 1, 1)], [(2, 2, 1)]]
    assert len(workload.warmups) == 3
    assert workload.provenance["fewer_than_wanted"] is True
    assert (workload.provenance["requests_wanted"], workload.provenance["requests_taken"]) == (5, 2)
    assert str(workload.provenance["warmups"]).startswith("drawn among all requests")


def test_shuffle_permutes_with_the_seed(tmp_path: Path) -> None:
    path = write(tmp_path, "width,height\n" + "".join(f"{side},{side}\n" for side in range(1, 30)))
    order = [read(path, shuffle_trace=True, seed=seed).fingerprint() for seed in (0, 0, 1)]
    assert order[0] == order[1] != order[2]
    assert order[0] != read(path).fingerprint()
    shuffled = sorted(request.items[0].width for request in read(path, shuffle_trace=True).requests)
    assert shuffled == list(range(1, 30))


def test_pixel_bound_shrinks_larger_items_only_and_counts_them(tmp_path: Path) -> None:
    path = write(tmp_path, "width,height,frames\n4000,3000,1\n100,100,1\n2000,1500,8\n")
    workload = read(path, max_pixels_per_item=750_000)
    assert sizes(workload) == [[(1000, 750, 1)], [(100, 100, 1)], [(1000, 750, 8)]]
    assert workload.provenance["items_shrunk"] == 2


def test_frame_rates(tmp_path: Path) -> None:
    path = write(tmp_path, "width,height,frames,fps\n8,8,30,25\n8,8,30,\n8,8,1,\n")
    assert [request.items[0].fps for request in read(path).requests] == [25.0, None, None]
    assert [request.items[0].fps for request in read(path, video_fps=10.0).requests] == [25.0, 10.0, None]


def test_shipped_videos_are_file_frames_at_an_assumed_rate() -> None:
    """Up to 5,395 frames a file would otherwise be taken for what reaches the encoder."""
    assert read("videos", num_prompts=1).requests[0].items[0].fps == 29.97
    assert read("videos", num_prompts=1).provenance["video_fps"] == 29.97
    assert read("videos", num_prompts=1, video_fps=24.0).requests[0].items[0].fps == 24.0


@pytest.mark.parametrize(
    "workload",
    [
        build_workload(
            WorkloadSpec(
                num_prompts=30,
                random_mm_num_mm_items_range_ratio=1.0,
                random_mm_base_items_per_request=2,
                random_mm_bucket_config={(8, 16, 1): 0.6, (24, 32, 4): 0.4},
            )
        ),
        build_workload(WorkloadSpec(dataset_name="trace", num_prompts=50)),
        Workload("w", (Request(0, (MediaItem(5, 6, 7), MediaItem(5, 6, 7, 29.97))), Request(1, (MediaItem(1, 2),)))),
    ],
    ids=["random-mm", "trace", "mixed-rates"],
)
def test_saved_trace_reads_back_identically(tmp_path: Path, workload: Workload) -> None:
    path = save_trace(workload, tmp_path / "saved.csv")
    again = read(str(path))
    assert again.fingerprint() == workload.fingerprint()
    keys = [[(i.width, i.height, i.frames, i.fps) for i in request.items] for request in again.requests]
    assert keys == [[(i.width, i.height, i.frames, i.fps) for i in request.items] for request in workload.requests]


def test_saved_trace_text(tmp_path: Path) -> None:
    workload = Workload("w", (Request(0, (MediaItem(5, 6), MediaItem(7, 8, 9, 30.0))), Request(1, ())))
    path = save_trace(workload, tmp_path / "saved.csv")
    assert path.read_bytes() == b"width,height,frames,request,fps\n5,6,1,0,\n7,8,9,0,30.0\n,,,1,\n"


def test_saving_never_replaces_a_file_unasked(tmp_path: Path) -> None:
    workload = Workload("w", (Request(0, (MediaItem(5, 6),)),))
    path = write(tmp_path, "precious")
    with pytest.raises(UsageError, match=r"t\.csv exists; name another file"):
        save_trace(workload, path)
    assert Path(path).read_text() == "precious"
    save_trace(workload, path, overwrite=True)
    assert sizes(read(path)) == [[(5, 6, 1)]]


def test_saving_below_a_file_or_nothing_at_all_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, "precious")
    with pytest.raises(RecordFileError, match=r"cannot write .*Not saved: the trace"):
        save_trace(Workload("w", (Request(0, (MediaItem(5, 6),)),)), Path(file) / "t.csv")
    with pytest.raises(UsageError, match=r"workload 'none' has no items to write"):
        save_trace(Workload("none", (Request(0, ()),)), tmp_path / "t.csv")
