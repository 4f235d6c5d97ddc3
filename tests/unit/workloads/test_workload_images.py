"""Images from parquet files and the hub: what is decoded, what is left out and named, what is repeated."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import socket
import struct
import zlib
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image, PngImagePlugin, features

from vitgraph import reading
from vitgraph.errors import HubUnreachableError, InputError, UsageError
from vitgraph.specs.parts import WorkloadSpec
from vitgraph.workloads.base import MediaItem, Workload
from vitgraph.workloads.encoded_image import (
    EncodedImage,
    UnreadableImageError,
    decode_image,
    encode_pixels,
    read_folder,
    read_upright_size,
)
from vitgraph.workloads.registry import build_workload, convert_source

IMAGE_STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


# `datasets` waits this long, in seconds, after it has read several shards.
datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0


@pytest.fixture(autouse=True)
def _the_hub_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests replace the data set library; nothing is asked over a network."""
    monkeypatch.setattr("vitgraph.workloads.hub_sets.hub_problem", lambda: None)


@pytest.fixture(autouse=True)
def keep_caches_in_the_test_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def encode(width: int, height: int, fmt: str = "PNG", mode: str = "RGB", **options: Any) -> bytes:
    file = io.BytesIO()
    Image.new(mode, (width, height)).save(file, fmt, **options)
    return file.getvalue()


def encode_turned(width: int, height: int, orientation: int, fmt: str = "JPEG") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode(width, height, fmt, exif=exif.tobytes())


def write_images(path: Path, rows: list[Any]) -> Path:
    """Parquet without the metadata of any library; each row is a list of (bytes, path), or None."""
    path.parent.mkdir(parents=True, exist_ok=True)
    values = [None if row is None else [{"bytes": data, "path": name} for data, name in row] for row in rows]
    table = {
        "conversation": pa.array(["text"] * len(rows)),
        "images": pa.array(values, type=pa.list_(IMAGE_STRUCT)),
    }
    pq.write_table(pa.table(table), path)
    return path


def write_sides(path: Path, sides: range) -> Path:
    return write_images(path, [[(encode(side, 1), None)] for side in sides])


def read(path: Path | str, **options: Any) -> Workload:
    defaults = {"num_prompts": 100, "num_warmups": 0, "disable_shuffle": True, "no_oversample": True}
    return build_workload(WorkloadSpec(dataset_path=str(path), **{"dataset_name": "hf", **defaults, **options}))


def sizes(workload: Workload) -> list[tuple[int, int]]:
    return [(item.width, item.height) for request in workload.requests for item in request.items]


GOOD_IMAGES = {
    "JPEG": (encode(20, 10, "JPEG"), (20, 10)),
    "PNG": (encode(21, 10), (21, 10)),
    "RGBA": (encode(22, 10, mode="RGBA"), (22, 10)),
    "grayscale": (encode(23, 10, "JPEG", "L"), (23, 10)),
    "16 bits": (encode(24, 10, mode="I;16"), (24, 10)),
    "CMYK": (encode(25, 10, "JPEG", "CMYK"), (25, 10)),
    "palette": (encode(26, 10, mode="P", transparency=b"\x00\x80"), (26, 10)),
    "bilevel": (encode(27, 10, mode="1"), (27, 10)),
    "one pixel": (encode(1, 1), (1, 1)),
    "turned right": (encode_turned(28, 10, 6), (10, 28)),
    "turned left": (encode_turned(29, 10, 8), (10, 29)),
    "upside down": (encode_turned(30, 10, 3), (30, 10)),
    "turned PNG": (encode_turned(31, 10, 5, "PNG"), (10, 31)),
    "GIF": (encode(32, 10, "GIF"), (32, 10)),
    "animation": (
        encode(33, 10, "GIF", save_all=True, append_images=[Image.new("RGB", (33, 10), "red")]),
        (33, 10),
    ),
}
if features.check("webp"):
    GOOD_IMAGES["WEBP"] = (encode(34, 10, "WEBP"), (34, 10))


@pytest.mark.parametrize("stream", [True, False])
def test_every_format_is_read_upright_and_in_rgb(tmp_path: Path, stream: bool) -> None:
    path = write_images(tmp_path / "a.parquet", [[(data, None)] for data, _ in GOOD_IMAGES.values()])
    workload = read(path, stream=stream)
    assert sizes(workload) == [size for _, size in GOOD_IMAGES.values()]
    assert workload.skipped == ()
    for request in workload.requests:
        item = request.items[0]
        assert isinstance(item.image, EncodedImage)
        opened = item.image.open()
        assert (opened.mode, opened.size) == ("RGB", (item.width, item.height))


def test_pixels_are_kept_encoded(tmp_path: Path) -> None:
    data = encode(500, 400, "JPEG")
    item = read(write_images(tmp_path / "a.parquet", [[(data, None)]])).requests[0].items[0]
    assert isinstance(item.image, EncodedImage)
    assert item.image.data == data
    assert "data" not in repr(item.image)


def test_orientation_moves_the_pixels() -> None:
    image = Image.new("RGB", (2, 1), "black")
    image.putpixel((0, 0), (255, 255, 255))
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    image.save(file, "PNG", exif=exif.tobytes())
    upright = EncodedImage(file.getvalue()).open()
    assert upright.size == (1, 2)
    assert [upright.getpixel((0, row)) for row in (0, 1)] == [(255, 255, 255), (0, 0, 0)]


BROKEN_ROWS = {
    "junk": ([(b"not an image", None)], r"PIL cannot decode the image \(it is none of .*JPEG"),
    "truncated JPEG": ([(encode(200, 200, "JPEG", quality=95)[:600], None)], r"PIL cannot decode the image \("),
    "truncated PNG": ([(encode(20, 20)[:-20], None)], r"PIL cannot decode the image \("),
    "no bytes": ([(b"", None)], r"the image has no bytes"),
    "null": (None, r"the row has no image"),
    "empty list": ([], r"the row has no image"),
    "null inside": ([(None, None)], r"the row has neither bytes nor a path of an image"),
    "missing file": ([(None, "gone.png")], r"the image file gone.png is not there"),
}


@pytest.mark.parametrize("kind", BROKEN_ROWS)
def test_broken_image_is_skipped_named_and_replaced(tmp_path: Path, kind: str) -> None:
    row, reason = BROKEN_ROWS[kind]
    good = [(encode(8, 8), None)]
    path = write_images(tmp_path / "set" / "a.parquet", [good, row, [(encode(9, 9), None)], [(encode(7, 7), None)]])
    workload = read(path, num_prompts=2)
    assert sizes(workload) == [(8, 8), (9, 9)]
    assert [item.source for item in workload.skipped] == ["a.parquet#2"]
    assert re.match(reason, workload.skipped[0].reason)
    assert (workload.provenance["rows_skipped"], workload.provenance["rows_read"]) == (1, 3)


def test_a_row_is_a_request_of_all_its_images_or_of_the_first(tmp_path: Path) -> None:
    rows = [[(encode(8, 8), None), (encode(7, 7), None), (b"junk", None)], [(b"junk", None), (encode(9, 9), None)]]
    path = write_images(tmp_path / "a.parquet", rows)
    workload = read(path)
    assert [[(item.width, item.height) for item in request.items] for request in workload.requests] == [
        [(8, 8), (7, 7)],
        [(9, 9)],
    ]
    assert [item.source for item in workload.skipped] == ["a.parquet#1, image 3", "a.parquet#2, image 1"]
    first = read(path, first_image_only=True)
    assert sizes(first) == [(8, 8)]
    assert len(first.skipped) == 1


def test_paths_are_relative_to_the_folder(tmp_path: Path) -> None:
    write_images(tmp_path / "a.parquet", [[(None, "img/one.png")]])
    (tmp_path / "img").mkdir()
    (tmp_path / "img" / "one.png").write_bytes(encode(11, 12))
    assert sizes(read(tmp_path)) == [(11, 12)]
    assert sizes(read(tmp_path / "a.parquet")) == [(11, 12)]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("https://example.org/a.png", "nothing is fetched"),
        ("/9j/4AAQ" * 9999, "not there or no regular file"),
        ("a\0b", "not there or no regular file"),
    ],
)
def test_a_text_that_is_no_path_costs_its_row_alone(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "one.png").write_bytes(encode(11, 12))
    workload = read(write_images(tmp_path / "a.parquet", [[(None, text)], [(None, "one.png")]]))
    assert sizes(workload) == [(11, 12)]
    assert reason in workload.skipped[0].reason and len(workload.skipped[0].reason) < 300


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("image", pa.array([encode(8, 6), b"junk", None], type=pa.binary())),
        ("image", pa.array([{"bytes": encode(8, 6)}, {"bytes": b"junk"}, None], type=IMAGE_STRUCT)),
        ("images", pa.array([[encode(8, 6)], [b"junk"], []], type=pa.list_(pa.binary()))),
        ("images", pa.array([encode(8, 6), b"junk", None], type=pa.binary())),
    ],
    ids=["bytes", "struct", "list of bytes", "bytes in images"],
)
def test_column_layouts(tmp_path: Path, column: str, values: pa.Array, stream: bool) -> None:
    pq.write_table(pa.table({column: values}), tmp_path / "a.parquet")
    workload = read(tmp_path, stream=stream)
    assert sizes(workload) == [(8, 6)]
    assert len(workload.skipped) == 2


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("is_list", [True, False])
def test_declared_image_features_do_not_stop_at_a_broken_image(tmp_path: Path, stream: bool, is_list: bool) -> None:
    """`datasets` decodes declared image columns itself, and one broken image would end the whole reading."""
    cells = [{"bytes": data, "path": None} for data in (encode(8, 6), b"junk", encode(9, 6))]
    feature = datasets.List(datasets.Image()) if is_list else datasets.Image()
    column = "images" if is_list else "image"
    rows = {column: [[cell] for cell in cells] if is_list else cells}
    datasets.Dataset.from_dict(rows, features=datasets.Features({column: feature})).to_parquet(tmp_path / "a.parquet")
    workload = read(tmp_path / "a.parquet", stream=stream)
    assert sizes(workload) == [(8, 6), (9, 6)]
    assert len(workload.skipped) == 1


def test_folder_reads_the_files_of_its_split_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "set [1]" / "data"
    write_sides(folder / "train-00001-of-00002.parquet", range(3, 5))
    write_sides(folder / "train-00000-of-00002.parquet", range(1, 3))
    write_sides(folder / "test-00000-of-00001.parquet", range(9, 10))
    assert [width for width, _ in sizes(read(folder.parent))] == [1, 2, 3, 4]
    assert [width for width, _ in sizes(read(folder.parent, hf_split="test"))] == [9]
    with pytest.raises(InputError, match=r"holds no file of split 'dev' \(files: test-00000-of-00001.parquet, train"):
        read(folder.parent, hf_split="dev")


@pytest.mark.parametrize("layout", ["{}/{}-00000-of-00001", "{}/{}/0000", "{}/{}_0", "{}/{}.1"])
def test_a_split_is_found_within_configurations_which_a_subset_names(tmp_path: Path, layout: str) -> None:
    for side, names in enumerate([("a", "train"), ("a", "test"), ("b", "train")], start=1):
        write_sides(tmp_path / f"{layout.format(*names)}.parquet", range(side, side + 1))
    assert [width for width, _ in sizes(read(tmp_path))] == [1, 3]
    assert [width for width, _ in sizes(read(tmp_path, hf_split="test"))] == [2]
    subset = read(tmp_path, hf_subset="a")
    assert [width for width, _ in sizes(subset)] == [1]
    assert subset.provenance["subset"] == "a"


def test_empty_row_group_is_passed_over(tmp_path: Path) -> None:
    table = pa.table({"image": pa.array([encode(8, 6)], type=pa.binary())})
    with pq.ParquetWriter(tmp_path / "a.parquet", table.schema) as writer:
        writer.write_table(table.slice(0, 0))
        writer.write_table(table)
    assert pq.read_metadata(tmp_path / "a.parquet").num_row_groups == 2
    assert sizes(read(tmp_path)) == [(8, 6)]


@pytest.mark.parametrize("stream", [True, False])
def test_local_files_are_read_without_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *host, **options: asked.append(host) or [])
    assert sizes(read(write_sides(tmp_path / "a.parquet", range(1, 3)), stream=stream)) == [(1, 1), (2, 1)]
    assert asked == []


def test_files_without_a_split_in_their_name_are_train(tmp_path: Path) -> None:
    write_sides(tmp_path / "b.parquet", range(3, 4))
    write_sides(tmp_path / "sub" / "a.parquet", range(1, 2))
    assert sorted(sizes(read(tmp_path, hf_split="train"))) == [(1, 1), (3, 1)]


def test_warmups_are_the_rows_after_the_measured_ones(tmp_path: Path) -> None:
    workload = read(write_sides(tmp_path / "a.parquet", range(1, 9)), num_prompts=3, num_warmups=2)
    assert [width for width, _ in sizes(workload)] == [1, 2, 3]
    assert [request.items[0].width for request in workload.warmups] == [4, 5]
    assert workload.provenance["rows_read"] == 5
    assert workload.provenance["warmups"] == "the requests after the measured ones"


def test_too_few_rows_are_repeated_with_the_seed_and_counted(tmp_path: Path) -> None:
    path = write_sides(tmp_path / "a.parquet", range(1, 4))
    options = {"num_prompts": 40, "num_warmups": 2, "no_oversample": False}
    workload = read(path, **options)
    widths = [width for width, _ in sizes(workload)]
    assert widths[:3] == [1, 2, 3]
    assert set(widths[3:]) == {1, 2, 3}
    assert [request.index for request in workload.requests] == list(range(40))
    assert workload.fingerprint() == read(path, **options).fingerprint() != read(path, **options, seed=1).fingerprint()
    assert workload.provenance["requests_repeated"] == 37
    assert len(workload.warmups) == 2


def test_no_oversample_measures_what_is_there_and_says_so(tmp_path: Path) -> None:
    workload = read(write_sides(tmp_path / "a.parquet", range(1, 4)), num_prompts=40)
    assert len(workload.requests) == 3
    assert (workload.provenance["fewer_than_wanted"], workload.provenance["requests_repeated"]) == (True, 0)


@pytest.mark.parametrize("stream", [True, False])
def test_rows_are_shuffled_with_the_seed(tmp_path: Path, stream: bool) -> None:
    path = write_sides(tmp_path / "a.parquet", range(1, 30))
    order = [
        [width for width, _ in sizes(read(path, stream=stream, disable_shuffle=False, seed=seed))] for seed in (0, 0, 1)
    ]
    assert order[0] == order[1] != order[2]
    assert sorted(order[0]) == list(range(1, 30))
    assert order[0] != list(range(1, 30))


def test_pixel_bound_applies_to_the_opened_image(tmp_path: Path) -> None:
    item = read(write_images(tmp_path / "a.parquet", [[(encode(400, 300), None)]]), max_pixels_per_item=30_000)
    image = item.requests[0].items[0].image
    assert sizes(item) == [(200, 150)]
    assert isinstance(image, EncodedImage)
    assert image.open().size == (200, 150)


def test_name_and_subset_of_a_local_copy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_sides(tmp_path / "a.parquet", range(1, 3))
    workload = read(tmp_path, hf_name="lmarena-ai/VisionArena-Chat", hf_subset="x")
    assert workload.name == "VisionArena-Chat"
    assert (workload.provenance["subset"], workload.provenance["subset_ignored"]) == (None, True)
    assert re.search("--hf-subset x is not used: .* is read whole", caplog.text)
    assert workload.provenance["exif_orientation"] == "applied"


def test_set_without_a_usable_image_is_refused(tmp_path: Path) -> None:
    path = write_images(tmp_path / "a.parquet", [None, [(b"junk", None)], []])
    with pytest.raises(InputError, match=r"gave no usable image in 3 rows \(a\.parquet#1: the row has no image; .*#3"):
        read(path)


@pytest.mark.parametrize("stream", [True, False])
def test_empty_files_are_passed_over_and_an_empty_set_refused(tmp_path: Path, stream: bool) -> None:
    empty = write_images(tmp_path / "train-0.parquet", [])
    with pytest.raises(InputError, match=r"gave no usable image in 0 rows \(there are no rows\)"):
        read(empty, stream=stream)
    write_sides(tmp_path / "train-1.parquet", range(1, 3))
    assert sizes(read(tmp_path, stream=stream)) == [(1, 1), (2, 1)]


def test_set_without_images_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = write_images(tmp_path / "a.parquet", [None] * 1500)
    with pytest.raises(InputError, match=r"gave no usable image in 1000 rows"):
        read(path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.parquet", r"--dataset-path .*missing\.parquet does not exist; name a \.parquet file"),
        ("a/b/c", r"--dataset-path .*a/b/c does not exist; name a \.parquet file"),
        ("sizes.csv", r"sizes\.csv is not a parquet file; .* or use --dataset-name trace"),
        ("folder", r"holds no \.parquet file; --dataset-path takes a folder of parquet files.*or one of image files"),
        ("bad.parquet", r"file .*bad\.parquet cannot be read as parquet \(ArrowInvalid: .*use a local copy"),
        ("text.parquet", r"has the columns text; one named 'images' \(a list of encoded images\) or 'image' is needed"),
    ],
)
def test_unusable_paths_name_value_rule_and_way_out(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "sizes.csv").write_text("width,height\n")
    (tmp_path / "bad.parquet").write_bytes(b"nope")
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "text.parquet")
    with pytest.raises(InputError, match=message):
        read(tmp_path / name)


def test_data_set_must_be_named() -> None:
    with pytest.raises(UsageError, match=r"--dataset-name hf needs --dataset-path, which is not given; .*VisionArena"):
        build_workload(WorkloadSpec(dataset_name="hf"))


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitgraph.workloads.hub_sets.hub_problem", lambda: "no route")


def cache_as_the_hub_does(cache: Path, hub_id: str, files: dict[str, Path]) -> None:
    """The layout of huggingface_hub: blobs, and snapshots of links to them."""
    root = cache / f"datasets--{hub_id.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text("abc123")
    for number, (name, content) in enumerate(files.items()):
        blob = root / "blobs" / f"blob{number}"
        blob.parent.mkdir(exist_ok=True)
        blob.write_bytes(content.read_bytes())
        link = root / "snapshots" / "abc123" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("stream", [True, False])
def test_a_set_in_the_cache_of_the_hub_is_read_offline(tmp_path: Path, stream: bool) -> None:
    parts = {
        f"data/train-0000{n}-of-00002.parquet": write_sides(tmp_path / f"{n}.parquet", range(9 + n, 10 + n))
        for n in (0, 1)
    }
    test = {"data/test-00000-of-00001.parquet": write_sides(tmp_path / "test.parquet", range(5, 6))}
    cache_as_the_hub_does(tmp_path / "hub", "owner/name", {**parts, **test})
    assert sizes(read("owner/name", stream=stream)) == [(9, 1), (10, 1)]
    assert sizes(read("owner/name", stream=stream, hf_split="test")) == [(5, 1)]


@pytest.mark.usefixtures("offline")
def test_a_set_that_is_cached_in_part_is_refused_offline(tmp_path: Path) -> None:
    part = write_sides(tmp_path / "part.parquet", range(9, 10))
    cache_as_the_hub_does(tmp_path / "hub", "owner/name", {"data/train-00000-of-00003.parquet": part})
    with pytest.raises(InputError, match=r"the cache has 1 of 3 files of split 'train' of .*owner/name.*no route"):
        read("owner/name")


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("stream", [True, False])
def test_a_set_that_was_prepared_before_is_read_offline(tmp_path: Path, stream: bool) -> None:
    file = write_sides(tmp_path / "sides.parquet", range(7, 9))
    made = datasets.load_dataset("parquet", data_files={"train": str(file)}, cache_dir=str(tmp_path / "made"))
    (prepared,) = {Path(each["filename"]).parent for each in made["train"].cache_files}
    target = tmp_path / "cache" / "owner___name" / "default" / "0.0.0" / "abc"
    shutil.copytree(prepared, target)
    (target / "parquet-train.arrow").rename(target / "name-train.arrow")
    info = json.loads((target / "dataset_info.json").read_text())
    (target / "dataset_info.json").write_text(json.dumps(info | {"config_name": "default", "dataset_name": "name"}))
    assert sizes(read("owner/name", stream=stream)) == [(7, 1), (8, 1)]


@pytest.mark.parametrize("kind", ["hf", "trace"])
def test_a_folder_of_image_files_is_a_data_set(tmp_path: Path, kind: str) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "photo.JPG").write_bytes(encode_turned(30, 20, 6))
    (tmp_path / "a.png").write_bytes(encode(12, 8))
    (tmp_path / "broken.jpeg").write_bytes(b"junk")
    (tmp_path / "notes.txt").write_text("no image")
    workload = read(tmp_path, dataset_name=kind)
    assert sizes(workload) == [(12, 8), (20, 30)]
    assert [item.source for item in workload.skipped] == [f"{tmp_path.name}#2"]
    orders = {tuple(sizes(read(tmp_path, dataset_name=kind, disable_shuffle=False, seed=seed))) for seed in range(8)}
    assert len(orders) == 2


def test_linked_folders_are_read_once_and_unreadable_photos_are_named(tmp_path: Path) -> None:
    for name in ("set", "elsewhere"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.png").write_bytes(encode(len(name), 8))
    (tmp_path / "set" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "set")
    (tmp_path / "set" / "phone.HEIC").write_bytes(b"\0\0\0\x18ftypheic")
    for workload in (read(tmp_path / "set"), read_folder(tmp_path / "set")):
        assert sizes(workload) == [(3, 8), (9, 8)]
        assert "it is none of" in workload.skipped[0].reason


@pytest.mark.parametrize("look", [lambda folder: read(folder), read_folder, lambda folder: convert_source(str(folder))])
def test_a_folder_without_end_is_refused(look: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MOST_FILES", 5)
    (tmp_path / "photos").mkdir()
    (tmp_path / ".cache").mkdir()
    for name in ("photos/a.png", "photos/b.png", *(f".cache/{n}.png" for n in range(9))):
        (tmp_path / name).write_bytes(encode(12, 8))
    assert look(tmp_path)
    for number in range(3):
        (tmp_path / f"{number}.txt").touch()
    with pytest.raises(InputError, match=r"more than 5 files and folders .* looked through; name a folder of the data"):
        look(tmp_path)


@pytest.mark.usefixtures("offline")
def test_unreachable_hub_names_the_ways_out() -> None:
    with pytest.raises(HubUnreachableError) as caught:
        read("lmarena-ai/VisionArena-Chat")
    text = str(caught.value)
    assert "VisionArena-Chat is no local folder or file and not in the local cache, and the hub cannot be reac" in text
    for way_out in ("--dataset-path FOLDER", "--dataset-name trace", "--dataset-name random-mm"):
        assert way_out in text


class FakeHub:
    """Stands for `datasets.load_dataset` and records how it was called."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows
        self.calls: list[tuple[tuple, dict]] = []

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls.append((args, options))
        if isinstance(self.rows, Exception):
            raise self.rows
        return self.rows


def test_hub_set_is_asked_for_as_upstream_does(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = datasets.Dataset.from_dict({"images": [[encode(8, 6)]]}).to_iterable_dataset()
    hub = FakeHub(rows)
    monkeypatch.setattr(datasets, "load_dataset", hub)
    assert sizes(read("lmarena-ai/VisionArena-Chat", hf_subset="dropped")) == [(8, 6)]
    assert sizes(read("owner/other", hf_subset="kept", hf_split="test", stream=True)) == [(8, 6)]
    assert hub.calls == [
        (("lmarena-ai/VisionArena-Chat",), {"name": None, "split": "train", "streaming": True}),
        (("owner/other",), {"name": "kept", "split": "test", "streaming": True}),
    ]


def test_hub_rows_do_not_open_local_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(encode(3, 3))
    table = {"images": [[{"bytes": None, "path": str(tmp_path / "secret.png")}]]}
    monkeypatch.setattr(datasets, "load_dataset", FakeHub(datasets.Dataset.from_dict(table).to_iterable_dataset()))
    with pytest.raises(InputError, match=r"the row names the file .*secret\.png and holds no bytes"):
        read("owner/name")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ConnectionError("no route"), r"could not be reached on the hub.*\(ConnectionError: no route\); use a local"),
        (
            ValueError("Bad split: x\nmore"),
            r"could not be loaded on the hub.*\(ValueError: Bad split: x\); use a local",
        ),
    ],
)
def test_hub_errors_keep_their_cause(monkeypatch: pytest.MonkeyPatch, error: Exception, message: str) -> None:
    monkeypatch.setattr(datasets, "load_dataset", FakeHub(error))
    with pytest.raises(InputError, match=message) as caught:
        read("owner/name")
    assert caught.value.__cause__ is error


def test_reader_is_closed_before_the_workload_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` waits seconds when its reader goes; left to the garbage collector that falls into a measurement."""
    events = []

    def generate() -> Any:
        try:
            while True:
                yield {"images": [encode(8, 6)]}
        finally:
            events.append("closed")

    class Rows:
        column_names = None

        def __iter__(self) -> Any:
            self.reader = generate()  # a second reference, so that only closing ends it
            return self.reader

    rows = Rows()
    monkeypatch.setattr(datasets, "load_dataset", FakeHub(rows))
    assert len(read("owner/name", num_prompts=3).requests) == 3
    assert events == ["closed"]


def test_hub_lost_while_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def generate() -> Any:
        yield {"images": [encode(8, 6)]}
        raise ConnectionError("reset")

    monkeypatch.setattr(datasets, "load_dataset", FakeHub(datasets.IterableDataset.from_generator(generate)))
    with pytest.raises(InputError, match=r"data set 'owner/name' could not be reached"):
        read("owner/name")


def test_decoded_images_are_encoded_without_loss() -> None:
    image = Image.effect_noise((13, 7), 50).convert("RGB")
    again = decode_image(encode_pixels(image))
    assert (again.size, again.tobytes()) == ((13, 7), image.tobytes())
    with pytest.raises(UnreadableImageError, match=r"the image is 0x5; both sides must be positive"):
        encode_pixels(Image.new("RGB", (0, 5)))


def test_a_folder_is_read_from_the_headers_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "b" / "c").mkdir(parents=True)
    (tmp_path / "b" / "c" / "photo.jpg").write_bytes(encode_turned(30, 20, 6))
    (tmp_path / "a.png").write_bytes(encode(12, 8))
    (tmp_path / "z.png").write_bytes(encode(500, 400)[:60])  # the header is whole, the pixels are not
    (tmp_path / "broken.jpg").write_bytes(b"junk")
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / ".hidden.png").write_bytes(encode(1, 1))
    workload = read_folder(tmp_path)
    assert [request.items[0] for request in workload.requests] == [
        MediaItem(12, 8, source="a.png"),
        MediaItem(20, 30, source="b/c/photo.jpg"),
        MediaItem(500, 400, source="z.png"),
    ]
    assert [item.source for item in workload.skipped] == ["broken.jpg", "notes.txt"]
    assert "PIL cannot read the header (it is none of " in workload.skipped[0].reason


def test_folder_without_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no image that PIL can read: no files; name a folder of image files"):
        read_folder(tmp_path)
    (tmp_path / "notes.txt").write_text("no image")
    with pytest.raises(InputError, match=r"holds no image that PIL can read: 1 files, first notes\.txt \("):
        read_folder(tmp_path)
    with pytest.raises(InputError, match=r"notes\.txt is no folder; name a folder of image files"):
        read_folder(tmp_path / "notes.txt")


# -- one size of an image ------------------------------------------------------------------------------------------

XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"><rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="6"/></rdf:RDF></x:xmpmeta>'  # noqa: E501 (one packet)


def turned(format_name: str, way: str) -> bytes:
    """A 120 x 80 image that is to be shown as 80 x 120."""
    image, file, exif = Image.new("RGB", (120, 80), "red"), io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    if way == "xmp" and format_name == "PNG":
        text = PngImagePlugin.PngInfo()
        text.add_itxt("XML:com.adobe.xmp", XMP.decode())
        image.save(file, format_name, pnginfo=text)
    elif way == "xmp" and format_name == "TIFF":
        image.save(file, format_name, tiffinfo={700: XMP})
    elif way == "xmp":
        image.save(file, format_name, xmp=XMP)
    elif way == "late":
        image.save(file, format_name)
        body = b"eXIf" + exif.tobytes()[6:]
        chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
        return file.getvalue()[:-12] + chunk + file.getvalue()[-12:]
    else:
        image.save(file, format_name, exif=exif)
    return file.getvalue()


@pytest.mark.parametrize(
    ("format_name", "way"),
    [
        *((name, "exif") for name in ("JPEG", "PNG", "WEBP", "TIFF", "AVIF")),
        *((name, "xmp") for name in ("JPEG", "PNG", "WEBP", "TIFF")),
        ("PNG", "late"),
    ],
)
def test_the_header_gives_the_size_that_decoding_gives(format_name: str, way: str, tmp_path: Path) -> None:
    data = turned(format_name, way)
    (tmp_path / "image").write_bytes(data)
    assert read_upright_size(data) == read_upright_size(tmp_path / "image") == decode_image(data).size == (80, 120)


@pytest.mark.parametrize(("format_name", "mode"), [("PNG", "I;16"), ("TIFF", "I;16"), ("TIFF", "F")])
def test_images_of_more_than_8_bits_keep_their_shades(format_name: str, mode: str) -> None:
    ramp = np.linspace(0, 65535, 256).reshape(16, 16)
    image = Image.fromarray((ramp / 65535).astype(np.float32) if mode == "F" else ramp.astype(np.uint16))
    file = io.BytesIO()
    image.save(file, format_name)
    shades = np.asarray(decode_image(file.getvalue()))[..., 0]
    assert len(np.unique(shades)) > 200 and shades.max() >= 254


def test_pillow_opens_images_alone_and_keeps_quiet(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    drawing = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
    for data in (drawing, b"\x89PNG\r\n\x1a\njunk"):
        for read_it in (decode_image, read_upright_size):
            with pytest.raises(UnreadableImageError) as refused:
                read_it(data)
            assert " at 0x" not in str(refused.value) and "_io.BytesIO" not in str(refused.value)
    assert read_upright_size(encode(11000, 9000)) == (11000, 9000)  # large enough for Pillow to warn
    assert not recwarn.list
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(UnreadableImageError, match="no regular file"):
        read_upright_size(tmp_path / "pipe.png")
