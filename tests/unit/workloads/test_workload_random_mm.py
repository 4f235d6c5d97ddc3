"""random-mm against the documented meaning of every upstream option."""

from __future__ import annotations

from collections import Counter

import pytest

from vitgraph.errors import InputError, UsageError
from vitgraph.specs.parts import WorkloadSpec
from vitgraph.specs.values import parse_buckets, parse_limits
from vitgraph.workloads.random_mm import resolve_draw_rule
from vitgraph.workloads.registry import build_workload

IMAGE_BUCKET = {(8, 16, 1): 1.0}
MIXED_BUCKETS = {(8, 16, 1): 0.5, (8, 16, 4): 0.5}


@pytest.mark.parametrize(
    "text",
    [
        "{(336, 672, 1): 0.25, (720, 1280, 16): 0.75}",
        " { (336,672,1) : .25 , (720,1280,16) : 75e-2 } ",
        '{"(336, 672, 1)": 0.25, "(720, 1280, 16)": 0.75}',
        '{"336x672x1": 0.25, "720x1280x16": 0.75}',
        "{'336, 672, 1': 0.25, (720, 1280, 16): 0.75}",
    ],
)
def test_bucket_spellings(text: str) -> None:
    """Keys are height, width, frames in every spelling."""
    assert parse_buckets(text) == {(336, 672, 1): 0.25, (720, 1280, 16): 0.75}


def test_bucket_config_takes_a_mapping_as_yaml_gives_it() -> None:
    assert parse_buckets({"336x672x1": 1}) == {(336, 672, 1): 1.0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"--random-mm-bucket-config is ''; it must be a non-empty mapping, for example"),
        ("{}", r"is '\{\}'; it must be a non-empty mapping"),
        ("[1]", r"is '\[1\]'; it must be a non-empty mapping"),
        ("{(336,336,1)}", r"must be a non-empty mapping"),
        ("{(336,336,1): 1.0", r"must be a non-empty mapping"),
        ("{336x336x1: 1.0}", r"must be a non-empty mapping"),
        ("{**{}}", r"size None must be three positive integers"),
        ("{(336,336,1): open('x')}", r"must be a non-empty mapping"),
        ("{(336,336): 1.0}", r"size \(336, 336\) must be three positive integers, height, width and frames"),
        ("{(336,336,0): 1.0}", r"size \(336, 336, 0\) must be three positive integers"),
        ("{(336,-336,1): 1.0}", r"size \(336, -336, 1\) must be three positive integers"),
        ("{(336,336.0,1): 1.0}", r"size \(336, 336.0, 1\) must be three positive integers"),
        ('{"336x336": 1.0}', r"size '336x336' must be three positive integers"),
        ('{"0x336x1": 1.0}', r"size '0x336x1' must be three positive integers"),
        ("{(336,336,1): -0.5}", r"probability of \(336, 336, 1\) is -0.5; it must be a finite number of at least 0"),
        ("{(336,336,1): 1e999}", r"probability of \(336, 336, 1\) is inf; it must be a finite number"),
        ("{(336,336,1): True}", r"probability of \(336, 336, 1\) is True; it must be a finite number"),
        ("{(336,336,1): 'a'}", r"probability of \(336, 336, 1\) is 'a'; it must be a finite number"),
        ("{(336,336,1): 0, (8,8,1): 0.0}", r"all probabilities of .* are 0; at least one must be above 0"),
        ("{(8,8,1): 1, '8x8x1': 1}", r"size \(8, 8, 1\) is given twice; name each .* once"),
    ],
)
def test_bad_buckets_name_value_rule_and_example(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse_buckets(text)
    assert "--random-mm-bucket-config" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"image": 3, "video": 0}', {"image": 3, "video": 0}),
        ("{'image': 3}", {"image": 3}),
        ('{"image": 3, "video": 1, "audio": 0}', {"image": 3, "video": 1, "audio": 0}),
    ],
)
def test_limits(text: str, expected: dict[str, int]) -> None:
    assert parse_limits(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3", r"is '3'; it must be a non-empty mapping"),
        ('{"images": 3}', r"unknown modality 'images'; known are image, video, audio"),
        ('{"image": -1}', r"limit of 'image' is -1; it must be an integer of at least 0"),
        ('{"image": 1.5}', r"limit of 'image' is 1.5; it must be an integer of at least 0"),
        ('{"image": 1, "image": 2}', r"'image' is given twice"),
    ],
)
def test_bad_limits_name_value_and_rule(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse_limits(text)
    assert "--random-mm-limit-mm-per-prompt" in str(caught.value)


def spec_of(base: int, ratio: float, limits: dict | None = None, buckets: dict | None = None, **kw) -> WorkloadSpec:
    return WorkloadSpec(
        random_mm_base_items_per_request=base,
        random_mm_num_mm_items_range_ratio=ratio,
        random_mm_limit_mm_per_prompt=limits or {"image": 255, "video": 1},
        random_mm_bucket_config=buckets or IMAGE_BUCKET,
        **kw,
    )


@pytest.mark.parametrize(
    ("base", "ratio", "limits", "buckets", "expected"),
    [
        (1, 0.0, None, None, (1, 1)),
        (2, 0.5, None, None, (1, 3)),
        (3, 0.3, None, None, (2, 4)),
        (2, 1, None, None, (0, 4)),
        (100, 0.1, None, None, (90, 111)),  # 100 * 1.1 is just above 110, and upstream rounds that up as well
        (3, 0.5, {"image": 3}, None, (1, 3)),
        (3, 0.5, {"image": 3, "video": 9}, None, (1, 3)),  # no video can be drawn, so its limit does not count
        (3, 0.5, {"image": 3, "video": 1}, MIXED_BUCKETS, (1, 4)),
        (1, 0.0, {"image": 0, "video": 1}, MIXED_BUCKETS, (1, 1)),
    ],
)
def test_item_count_range(base, ratio, limits, buckets, expected) -> None:
    rule = resolve_draw_rule(spec_of(base, ratio, limits, buckets))
    assert (rule.min_items, rule.max_items) == expected
    workload = build_workload(spec_of(base, ratio, limits, buckets, num_prompts=600))
    assert {len(request.items) for request in workload.requests} == set(range(expected[0], expected[1] + 1))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (spec_of(20, 0.0, {"image": 3}), r"at least 20 items a request .* limits \{'image': 3\} allow 3; raise"),
        (spec_of(1, 0.0, {"image": 0}), r"at least 1 items a request .* allow 0"),
        (spec_of(1, 0.0, {"image": 3}, {(8, 8, 1): 1.0, (8, 8, 2): 0.0}), r"bucket \(8, 8, 2\) is of modality 'video'"),
        (spec_of(4000, 0.0, {"image": 5000}, num_prompts=10**6), r"--num-prompts is 1000000 with up to 4000 items a r"),
        (spec_of(1, 1.1), r"--random-mm-num-mm-items-range-ratio is 1.1; it must be a number from 0 to 1"),
        (spec_of(1, -0.1), r"--random-mm-num-mm-items-range-ratio is -0.1; it must be a number from 0 to 1"),
        (spec_of(1, float("nan")), r"--random-mm-num-mm-items-range-ratio is nan; it must be a number from 0 to 1"),
        (spec_of(1, 0.0, None, {(8, 8, 1): -1.0}), r"probability of \(8, 8, 1\) is -1.0"),
        (spec_of(1, 0.0, None, {(8, 8, 1): 0.0}), r"all probabilities of \[\(8, 8, 1\)\] are 0"),
    ],
)
def test_contradictory_options_name_value_and_rule(spec: WorkloadSpec, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_workload(spec)


def test_limits_without_video_fail_with_the_default_buckets() -> None:
    """The zero-probability video bucket needs a limit too, as upstream; the message shows what to write."""
    with pytest.raises(UsageError, match=r'bucket \(720, 1280, 16\).*also one of probability 0.*"video": 0'):
        build_workload(WorkloadSpec(random_mm_limit_mm_per_prompt={"image": 3}))


def test_modality_at_its_cap_drops_out_of_that_request_only() -> None:
    buckets = {(8, 16, 1): 0.05, (8, 24, 1): 0.05, (8, 16, 4): 0.9}
    workload = build_workload(spec_of(4, 0.0, {"image": 255, "video": 1}, buckets, num_prompts=400))
    videos = Counter(sum(item.frames > 1 for item in request.items) for request in workload.requests)
    assert max(videos) == 1
    assert videos[1] > 390
    widths = Counter(item.width for request in workload.requests for item in request.items if item.frames == 1)
    assert 0.4 < widths[16] / sum(widths.values()) < 0.6


def test_sizes_follow_the_scaled_probabilities_height_first() -> None:
    workload = build_workload(spec_of(1, 0.0, None, {(8, 16, 1): 3, (24, 32, 1): 1, (40, 40, 1): 0}, num_prompts=4000))
    sizes = Counter((item.width, item.height) for request in workload.requests for item in request.items)
    assert set(sizes) == {(16, 8), (32, 24)}
    assert 0.72 < sizes[16, 8] / 4000 < 0.78


def test_huge_and_tiny_probabilities_scale() -> None:
    workload = build_workload(spec_of(1, 0.0, None, {(8, 16, 1): 1e308, (24, 32, 1): 1e308}, num_prompts=50))
    assert {item.width for request in workload.requests for item in request.items} == {16, 32}


def test_videos_are_files_of_thirty_frames_a_second() -> None:
    workload = build_workload(spec_of(1, 0.0, None, {(8, 16, 240): 1.0}, num_prompts=2))
    item = workload.requests[0].items[0]
    assert (item.width, item.height, item.frames, item.fps, item.modality) == (16, 8, 240, 30.0, "video")
    assert workload.has_videos
    assert workload.provenance["video_fps"] == 30.0


def test_seed_repeats_and_warmups_are_drawn_with_the_next_one() -> None:
    spec = spec_of(2, 0.5, None, {(8, 16, 1): 0.5, (24, 32, 1): 0.5}, num_prompts=40, num_warmups=40, seed=5)
    first, second = build_workload(spec), build_workload(spec)
    assert first == second
    sizes = [[(item.width, item.height) for item in request.items] for request in first.warmups]
    following = build_workload(spec_of(2, 0.5, None, spec.random_mm_bucket_config, num_prompts=40, seed=6))
    assert sizes == [[(item.width, item.height) for item in request.items] for request in following.requests]
    assert first.fingerprint() != following.fingerprint()


def test_changed_sizes_leave_every_other_draw_as_it_was() -> None:
    small = build_workload(spec_of(2, 0.5, None, {(8, 8, 1): 0.5, (16, 16, 1): 0.5}, num_prompts=50))
    large = build_workload(spec_of(2, 0.5, None, {(80, 80, 1): 0.5, (160, 160, 1): 0.5}, num_prompts=50))
    assert [[10 * item.width for item in request.items] for request in small.requests] == [
        [item.width for item in request.items] for request in large.requests
    ]


def test_requests_without_items_occur_and_are_kept() -> None:
    workload = build_workload(spec_of(1, 1.0, num_prompts=60))
    assert {len(request.items) for request in workload.requests} == {0, 1, 2}
    assert [request.index for request in workload.requests] == list(range(60))


def test_workload_without_any_item_is_refused() -> None:
    seed = next(seed for seed in range(100) if not has_items(spec_of(1, 1.0, num_prompts=1, seed=seed)))
    with pytest.raises(InputError, match=r"none of the 1 requests drew an item \(0 to 2 items a request\); raise"):
        build_workload(spec_of(1, 1.0, num_prompts=1, seed=seed))


def has_items(spec: WorkloadSpec) -> bool:
    try:
        return build_workload(spec).num_items > 0
    except InputError:
        return False


def test_default_workload_is_pinned() -> None:
    """Figures made with the defaults stay comparable between releases."""
    workload = build_workload(WorkloadSpec())
    assert (len(workload.requests), len(workload.warmups), workload.num_items) == (1000, 1, 1000)
    assert workload.fingerprint() == "9370d65066c37a66"
