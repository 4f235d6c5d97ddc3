"""Requests with real images: hub data sets, local parquet files, and the sizes of a folder of image files."""

from __future__ import annotations

import glob
import logging
import re
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitgraph.errors import HubUnreachableError, InputError, UsageError, first_line
from vitgraph.reading import is_file, is_folder
from vitgraph.specs.parts import WorkloadSpec
from vitgraph.workloads.base import (
    MediaItem,
    Provenance,
    SkippedItem,
    Workload,
    choose_warmups,
    number_requests,
    shrink_size,
)
from vitgraph.workloads.encoded_image import (
    EncodedImage,
    UnreadableImageError,
    decode_image,
    encode_pixels,
    image_files,
)
from vitgraph.workloads.hub_sets import cached_folder, hub_rows, parquet_files

VISION_ARENA_IDS = ("lmarena-ai/VisionArena-Chat", "lmarena-ai/vision-arena-bench-v0.1")

_IMAGE_COLUMNS = ("images", "image")
_LONGEST_SHOWN = 200
_SHUFFLE_BUFFER_ROWS = 1000
# Row groups of image files can be gigabytes, and an empty one is no batch size at all.
_PARQUET_BATCH_ROWS = 64
# A column that holds no images would otherwise be read to its end, which for a hub data set can be 80 GB.
_MAX_ROWS_WITHOUT_IMAGE = 1000
_WAYS_OUT = (
    "use a local copy (--dataset-path FOLDER with its parquet or image files), real sizes without pixels "
    "(--dataset-name trace), or random sizes (--dataset-name random-mm)"
)


@dataclass(frozen=True)
class _Source:
    """Where rows come from.

    Attributes:
        label: The name for messages.
        subset: Configuration, which upstream discards for the VisionArena sets; of local files a folder of that name.
        folder: What paths inside local rows are relative to; None on the hub.
        files: Parquet files that are there,
        images: or names of image files.
    """

    label: str
    subset: str | None = None
    folder: Path | None = None
    files: tuple[Path, ...] = ()
    images: tuple[str, ...] = ()


def build_hf(spec: WorkloadSpec) -> Workload:
    """Reads images from a hub data set, from local parquet files with the same columns, or from image files.

    A row is one request, of all images of its `images` list (upstream takes the first one, as `first_image_only` does)
    or of its `image`. Rows are shuffled with the seed unless `disable_shuffle`. A stream is shuffled within a buffer of
    1,000 rows, so the two ways of reading give different requests, as another version of `datasets` may. Every image is
    decoded once here and kept as an `EncodedImage`: one that is missing or broken is left out and named in `skipped`,
    and a row without a good one makes place for the next. Warm-ups are the rows after the measured ones. If there are
    too few rows, they are repeated by a seeded choice unless `no_oversample`.

    Raises:
        UsageError: If no data set is named.
        InputError: If the data set cannot be reached or read, or holds no usable image.
    """
    source = _find_source(spec)
    is_subset_ignored = spec.hf_subset is not None and source.subset is None
    if is_subset_ignored:
        logging.getLogger("vitgraph").warning(
            "--hf-subset %s is not used: %s has no such folder or subset and is read whole",
            spec.hf_subset,
            source.label,
        )
    rows = _open_rows(spec, source)
    pool, skipped, rows_read = _collect_rows(spec, source, rows)
    if not pool:
        reasons = "; ".join(f"{item.source}: {item.reason}" for item in skipped[:3]) or "there are no rows"
        raise InputError(
            f"data set {source.label!r} gave no usable image in {rows_read} rows ({reasons}); a row needs an encoded "
            f"image in column 'images' (a list) or 'image'; {_WAYS_OUT}"
        )
    measured = pool[: spec.num_prompts]
    num_repeated = 0 if spec.no_oversample else spec.num_prompts - len(measured)
    if num_repeated:
        drawn = np.random.default_rng(spec.seed).integers(len(pool), size=num_repeated)
        measured += [pool[int(index)] for index in drawn]
    warmups, warmup_source = choose_warmups(pool, spec.num_prompts, spec.num_warmups, spec.seed)
    provenance: Provenance = {
        "dataset": "hf",
        "path": source.label,
        "hf_name": spec.hf_name,
        "subset": source.subset,
        "subset_ignored": is_subset_ignored,
        "split": spec.hf_split or "train",
        "streamed": spec.stream,
        "shuffled": not spec.disable_shuffle,
        "shuffle_buffer_rows": _SHUFFLE_BUFFER_ROWS if spec.stream and not spec.disable_shuffle else None,
        "seed": spec.seed,
        "datasets_version": version("datasets"),
        "max_pixels_per_item": spec.max_pixels_per_item,
        "exif_orientation": "applied",
        "rows_read": rows_read,
        "rows_skipped": rows_read - len(pool),
        "images_skipped": len(skipped),
        "requests_wanted": spec.num_prompts,
        "requests_taken": len(measured),
        "requests_repeated": num_repeated,
        "fewer_than_wanted": len(measured) < spec.num_prompts,
        "warmups": warmup_source,
    }
    name = Path(spec.hf_name or source.label).name
    return Workload(name, number_requests(measured), warmups, tuple(skipped), provenance)


def _find_source(spec: WorkloadSpec) -> _Source:
    given = spec.dataset_path or spec.hf_name
    if not given:
        raise UsageError(
            "--dataset-name hf needs --dataset-path, which is not given; name a hub data set or a local folder of "
            f"parquet files, for example {VISION_ARENA_IDS[0]}"
        )
    path = Path(given).expanduser()
    if is_file(path):
        if path.suffix != ".parquet":
            raise InputError(
                f"--dataset-path {given} is not a parquet file; name a .parquet file, a folder of them or a hub data "
                "set, or use --dataset-name trace for a CSV of sizes, which `vitgraph workload convert` makes of a log"
            )
        return _Source(given, None, path.parent, (path,))
    if is_folder(path):
        subset = spec.hf_subset if spec.hf_subset and is_folder(path / spec.hf_subset) else None
        path = path / subset if subset else path
        images = () if parquet_files(path) else image_files(path)
        return _Source(given, subset, path, () if images else _find_parquet_files(path, spec.hf_split), images)
    is_hub_id = given.count("/") <= 1 and not given.startswith((".", "/", "~")) and path.suffix != ".parquet"
    if not is_hub_id:
        raise InputError(
            f"--dataset-path {given} does not exist; name a .parquet file, a folder of them, or a hub data set as "
            f"owner/name, for example {VISION_ARENA_IDS[0]}"
        )
    subset = None if {spec.dataset_path, spec.hf_name} & {*VISION_ARENA_IDS} else spec.hf_subset
    cached = cached_folder(given, subset)
    return _Source(given, subset, cached, _find_parquet_files(cached, spec.hf_split) if cached else ())


def _find_parquet_files(folder: Path, split: str | None) -> tuple[Path, ...]:
    """Files of the split: those named for it, or all where the files name no split and `train` is meant."""
    files = parquet_files(folder)
    if not files:
        raise InputError(
            f"folder {folder} holds no .parquet file; --dataset-path takes a folder of parquet files with a column "
            "'images' or 'image', or one of image files"
        )
    wanted = split or "train"
    named = [file for file in files if wanted in _split_names(folder, file)]
    if named or wanted == "train":
        return tuple(named or files)
    raise InputError(
        f"folder {folder} holds no file of split {wanted!r} (files: {', '.join(file.name for file in files[:5])}); a "
        "split's files are named like test-00000-of-00001.parquet or lie in a folder of its name"
    )


def _split_names(folder: Path, file: Path) -> tuple[str, str]:
    """What a file is named for: its folder, which may be a configuration's too, and what its name begins with."""
    return file.relative_to(folder).parent.name, re.split(r"-|[._]?\d", file.stem, maxsplit=1)[0]


def _open_rows(spec: WorkloadSpec, source: _Source) -> Iterable[Mapping[str, Any]]:
    import datasets  # takes most of a second, and only this kind of workload needs it
    from datasets.io.parquet import ParquetDatasetReader

    if source.images:
        names = list(source.images)
        if not spec.disable_shuffle:
            np.random.default_rng(spec.seed).shuffle(names)
        return [{"image": name} for name in names]
    try:
        if source.folder is None:
            rows = hub_rows(source.label, source.subset, spec.hf_split or "train", streams=spec.stream)
            column = _image_column(source, rows.column_names) if rows.column_names else None
        else:
            files, column = _inspect_files(source)
            if not files:
                return ()
            # `load_dataset` would report the use to the hub, which local files have nothing to do with.
            rows = ParquetDatasetReader(
                {"train": [glob.escape(str(file.resolve())) for file in files]},
                split=datasets.Split.TRAIN,
                streaming=spec.stream,
                columns=[column],
                batch_size=_PARQUET_BATCH_ROWS,
            ).read()
        if column is not None:
            rows = _leave_encoded(rows.select_columns([column]), column)
        if not spec.disable_shuffle:
            buffer = {"buffer_size": _SHUFFLE_BUFFER_ROWS} if spec.stream else {}
            rows = rows.shuffle(seed=spec.seed, **buffer)
    except HubUnreachableError as error:
        raise HubUnreachableError(f"{error}; {_WAYS_OUT}") from None
    except InputError:
        raise
    except Exception as error:
        raise _source_error(source, error) from error
    return rows


def _inspect_files(source: _Source) -> tuple[list[Path], str | None]:
    """The local files that have rows (`datasets` fails on some that have none), and their column of images."""
    import pyarrow.parquet  # as above

    files: list[Path] = []
    column = None
    for file in source.files:
        try:
            num_rows = pyarrow.parquet.read_metadata(file).num_rows
            names = pyarrow.parquet.read_schema(file).names
        except (OSError, ValueError) as error:
            raise InputError(
                f"file {file} cannot be read as parquet ({first_line(error)}); fetch it again, or leave it out of the "
                f"folder; or {_WAYS_OUT}"
            ) from error
        if num_rows:
            files.append(file)
            column = column or _image_column(source, names)
    return files, column


def _image_column(source: _Source, names: Iterable[str]) -> str:
    column = next((name for name in _IMAGE_COLUMNS if name in names), None)
    if column is None:
        raise InputError(
            f"data set {source.label!r} has the columns {', '.join(names)}; one named 'images' (a list of encoded "
            f"images) or 'image' is needed: name it so; or {_WAYS_OUT}"
        )
    return column


def _leave_encoded(rows: Any, column: str) -> Any:
    """Stops `datasets` from decoding: one broken image would otherwise end the reading of all."""
    import datasets

    feature = (rows.features or {}).get(column)
    if isinstance(feature, datasets.Image):
        return rows.cast_column(column, datasets.Image(decode=False))
    if isinstance(feature, datasets.List | datasets.LargeList) and isinstance(feature.feature, datasets.Image):
        return rows.cast_column(column, replace(feature, feature=datasets.Image(decode=False)))
    return rows


def _source_error(source: _Source, error: Exception) -> InputError:
    if source.folder is not None:
        return InputError(f"the parquet files of {source.label!r} cannot be read ({first_line(error)}); {_WAYS_OUT}")
    is_network = isinstance(error, ConnectionError | TimeoutError) or type(error).__module__.startswith("httpx")
    what = "could not be reached" if is_network else "could not be loaded"
    return InputError(
        f"data set {source.label!r} {what} on the hub, and there is no local file or folder of that name "
        f"({first_line(error)}); {_WAYS_OUT}"
    )


def _collect_rows(
    spec: WorkloadSpec, source: _Source, rows: Iterable[Mapping[str, Any]]
) -> tuple[list[tuple[MediaItem, ...]], list[SkippedItem], int]:
    """Takes rows until enough have a good image; returns their images, the images left out, and the rows read."""
    wanted = spec.num_prompts + spec.num_warmups
    pool: list[tuple[MediaItem, ...]] = []
    skipped: list[SkippedItem] = []
    rows_read = 0
    iterator = iter(rows)
    try:
        while len(pool) < wanted and (pool or rows_read < _MAX_ROWS_WITHOUT_IMAGE):
            try:
                row = next(iterator, None)
            except Exception as error:
                raise _source_error(source, error) from error
            if row is None:
                break
            rows_read += 1
            items, without = _read_items(spec, source, row, f"{Path(source.label).name}#{rows_read}")
            skipped += without
            if items:
                pool.append(items)
    finally:
        # `datasets` joins threads and waits seconds when its reader goes, which must happen here and not whenever
        # memory is collected, perhaps while something is measured.
        if isinstance(iterator, Generator):
            iterator.close()
    return pool, skipped, rows_read


def _read_items(
    spec: WorkloadSpec, source: _Source, row: Mapping[str, Any], name: str
) -> tuple[tuple[MediaItem, ...], list[SkippedItem]]:
    """The usable images of a row, and those that are not."""
    value = row.get("images", row.get("image"))
    values = list(value) if isinstance(value, list | tuple) else [value]
    if spec.first_image_only:
        values = values[:1]
    items, skipped = [], []
    for index, each in enumerate(values or [None]):
        place = name if len(values) < 2 else f"{name}, image {index + 1}"
        try:
            image = EncodedImage(_encoded_bytes(source, each), spec.max_pixels_per_item)
            width, height = shrink_size(*decode_image(image.data).size, spec.max_pixels_per_item)
            items.append(MediaItem(width, height, source=place, image=image))
        except UnreadableImageError as error:
            skipped.append(SkippedItem(place, str(error)))
    return tuple(items), skipped


def _encoded_bytes(source: _Source, value: object) -> bytes:
    if value is None:
        raise UnreadableImageError("the row has no image")
    if isinstance(value, Image.Image):
        return encode_pixels(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    path: object = value
    if isinstance(value, Mapping):
        if value.get("bytes") is not None:
            return bytes(value["bytes"])
        path = value.get("path")
        if path is None:
            raise UnreadableImageError("the row has neither bytes nor a path of an image")
    if not isinstance(path, str):
        raise UnreadableImageError(f"the row holds a {type(path).__name__}; encoded bytes or a path are needed")
    shown = path if len(path) <= _LONGEST_SHOWN else f"{path[:_LONGEST_SHOWN]}…"
    if source.folder is None or "://" in path:
        raise UnreadableImageError(f"the row names the file {shown} and holds no bytes; nothing is fetched")
    file = source.folder / path
    if not is_file(file):
        raise UnreadableImageError(f"the image file {shown} is not there or no regular file")
    try:
        return file.read_bytes()
    except OSError as error:
        raise UnreadableImageError(f"the image file {shown} cannot be read ({error.strerror})") from error
