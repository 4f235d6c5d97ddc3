"""Items, requests, fingerprints and the checks that every kind of workload shares."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vitgraph.errors import InputError, UsageError
from vitgraph.specs.parts import WorkloadSpec
from vitgraph.workloads.base import MediaItem, Request, Workload, choose_warmups, number_requests, shrink_size
from vitgraph.workloads.registry import build_workload


def make_workload() -> Workload:
    return Workload(
        "tiny",
        (
            Request(0, (MediaItem(640, 480), MediaItem(336, 336))),
            Request(1, ()),
            Request(2, (MediaItem(320, 240, 16, 30.0), MediaItem(320, 240, 8))),
        ),
        warmups=(Request(0, (MediaItem(64, 64),)),),
    )


def test_fingerprint_is_pinned() -> None:
    """Saved results compare by it, so it must not drift between releases."""
    assert make_workload().fingerprint() == "3484db130558ffe0"


@pytest.mark.parametrize(
    "changed",
    [
        (Request(0, (MediaItem(480, 640),)),),
        (Request(0, (MediaItem(640, 480, 2),)),),
        (Request(0, (MediaItem(640, 480, 2, 30.0),)),),
        (Request(0, (MediaItem(640, 480),)), Request(1, (MediaItem(640, 480),))),
        (Request(0, (MediaItem(640, 480), MediaItem(640, 480))),),
        (Request(0, (MediaItem(640, 480),)), Request(1, ())),
        (),
    ],
)
def test_fingerprint_tells_sizes_order_and_grouping_apart(changed: tuple[Request, ...]) -> None:
    base = Workload("w", (Request(0, (MediaItem(640, 480),)),))
    assert Workload("w", changed).fingerprint() != base.fingerprint()


def test_pixels_and_names_do_not_change_the_fingerprint() -> None:
    plain = Workload("a", number_requests([(MediaItem(640, 480),)]))
    other = Workload("b", number_requests([(MediaItem(640, 480, source="x.csv:2", image=object()),)]))
    assert plain.fingerprint() == other.fingerprint()


def test_image_is_outside_equality_and_repr() -> None:
    assert MediaItem(2, 3, image=object()) == MediaItem(2, 3)
    assert "image" not in repr(MediaItem(2, 3, image=object()))


def test_counts_and_modalities() -> None:
    workload = make_workload()
    assert workload.num_items == 4
    assert workload.has_videos
    assert [item.modality for item in workload.requests[2].items] == ["video", "video"]
    assert workload.requests[0].items[0].modality == "image"
    assert not Workload("w", number_requests([(MediaItem(1, 1),)])).has_videos


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"width": 0, "height": 4}, r"here: width is 0; it must be a positive integer"),
        ({"width": 4, "height": -1}, r"here: height is -1; it must be a positive integer"),
        ({"width": 4, "height": 4.5}, r"here: height is 4.5; it must be a positive integer"),
        ({"width": 4, "height": 4, "frames": True}, r"here: frames is True; it must be a positive integer"),
        (
            {"width": 4, "height": 4, "frames": 2, "fps": float("nan")},
            r"here: fps is nan; it must be a positive number",
        ),
    ],
)
def test_impossible_items_are_refused(fields: dict, text: str) -> None:
    with pytest.raises(InputError, match=text):
        MediaItem(**fields, source="here")


@pytest.mark.parametrize(
    ("size", "bound", "expected"),
    [
        ((4000, 3000), None, (4000, 3000)),
        ((4000, 3000), 12_000_000, (4000, 3000)),
        ((4000, 3000), 3_000_000, (2000, 1500)),
        ((4001, 3001), 3_000_000, (1999, 1500)),
        ((1_000_000, 1), 100, (100, 1)),
        ((1, 1_000_000), 100, (1, 100)),
        ((5, 7), 1, (1, 1)),
    ],
)
def test_shrink_size(size: tuple[int, int], bound: int | None, expected: tuple[int, int]) -> None:
    assert shrink_size(*size, bound) == expected


def test_shrinking_never_exceeds_the_bound() -> None:
    for width in (1, 7, 333, 5000, 100_000):
        for height in (1, 2, 999, 40_000):
            for bound in (1, 2, 97, 65_536, 2_000_000):
                new = shrink_size(width, height, bound)
                assert min(new) >= 1
                assert new[0] * new[1] <= max(bound, 0)


def test_warmups_are_other_requests_where_enough_are_left() -> None:
    groups = [(MediaItem(size, size),) for size in range(1, 6)]
    warmups, statement = choose_warmups(groups, 3, 2, seed=0)
    assert [request.items[0].width for request in warmups] == [4, 5]
    assert [request.index for request in warmups] == [0, 1]
    assert statement == "the requests after the measured ones"

    drawn, statement = choose_warmups(groups, 4, 2, seed=7)
    assert len(drawn) == 2
    assert statement.startswith("drawn among all requests with seed 8")
    assert drawn == choose_warmups(groups, 4, 2, seed=7)[0]
    assert choose_warmups(groups, 4, 0, seed=7) == ((), "none")


def test_requests_are_numbered_from_zero() -> None:
    requests = number_requests([(MediaItem(1, 1),), ()])
    assert [(request.index, len(request.items)) for request in requests] == [(0, 1), (1, 0)]


def test_defaults_are_those_of_the_upstream_benchmark() -> None:
    spec = WorkloadSpec()
    assert (spec.num_prompts, spec.num_warmups, spec.seed, spec.stream) == (1000, 1, 0, True)
    assert spec.random_mm_limit_mm_per_prompt == {"image": 255, "video": 1}
    assert spec.random_mm_bucket_config == {(256, 256, 1): 0.5, (720, 1280, 1): 0.5, (720, 1280, 16): 0.0}
    assert (spec.random_mm_base_items_per_request, spec.random_mm_num_mm_items_range_ratio) == (1, 0.0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dataset_name": "random_mm"}, r"--dataset-name is 'random_mm'; known are random-mm, hf, trace; did you mean"),
        ({"dataset_name": "documents"}, r"use --dataset-name trace --dataset-path documents"),
        ({"dataset_name": "lmarena-ai/X"}, r"use --dataset-name hf --dataset-path lmarena-ai/X"),
        ({"num_prompts": 0}, r"--num-prompts is 0; it must be an integer of at least 1, for example 1000"),
        ({"num_prompts": 1.5}, r"--num-prompts is 1.5; it must be an integer of at least 1"),
        ({"num_prompts": True}, r"--num-prompts is True; it must be an integer of at least 1"),
        ({"num_warmups": -1}, r"--num-warmups is -1; it must be an integer of at least 0"),
        ({"random_mm_base_items_per_request": 0}, r"--random-mm-base-items-per-request is 0; it must be an integer"),
        ({"seed": -3}, r"--seed is -3; it must be an integer of at least 0"),
        (
            {"dataset_name": "trace", "max_pixels_per_item": 0},
            r"--max-pixels-per-item is 0; it must be an integer of at least 1",
        ),
        ({"max_pixels_per_item": 9}, r"--max-pixels-per-item is 9, which random-mm does not take.*--random-mm-bucket"),
        ({"dataset_name": "trace", "video_fps": 0.0}, r"--video-fps is 0.0; it must be a number of frames a second"),
        ({"video_fps": 30.0}, r"--video-fps is 30.0, which only --dataset-name trace takes"),
        ({"shuffle_trace": True}, r"--shuffle-trace is set, which only --dataset-name trace takes"),
    ],
)
def test_unusable_options_name_value_and_rule(options: dict, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        build_workload(WorkloadSpec(**options))


def test_planning_workloads_do_not_load_torch() -> None:
    code = (
        "import sys; from vitgraph.specs.parts import WorkloadSpec\n"
        "from vitgraph.workloads.registry import build_workload\n"
        "build_workload(WorkloadSpec(num_prompts=3))\n"
        "build_workload(WorkloadSpec(dataset_name='trace', num_prompts=3))\n"
        "print([name for name in ('torch', 'datasets', 'pyarrow', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
