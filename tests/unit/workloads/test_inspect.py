"""What a workload is made of: percentiles, common sizes, histograms, and tokens by model."""

from __future__ import annotations

import pytest

from vitgraph.models.registry import resolve_model
from vitgraph.specs.parts import WorkloadSpec
from vitgraph.workloads.base import MediaItem, Workload, number_requests
from vitgraph.workloads.inspect import common_values, describe_numbers, histogram, inspect_workload
from vitgraph.workloads.registry import build_workload

QWEN, GEMMA = "qwen3-vl-30b-a3b", "gemma-3-4b"
RULES = {name: (resolve_model(name).row.name, resolve_model(name).rule()) for name in (QWEN, GEMMA)}


@pytest.fixture
def workload() -> Workload:
    image, video = MediaItem(336, 336), MediaItem(640, 480, 240, fps=30.0)
    return Workload("few", number_requests([(image, image), (MediaItem(1280, 720), video), (), (video,)]))


def test_sizes_and_requests_are_counted(workload: Workload) -> None:
    facts = inspect_workload(workload, {}).facts
    assert (facts["requests"], facts["items"], facts["images"], facts["videos"]) == (4, 5, 3, 2)
    assert facts["fingerprint"] == workload.fingerprint()
    assert facts["distinct_sizes"] == 3
    assert facts["common_sizes"][0] == {"width": 336, "height": 336, "frames": 1, "items": 2, "share": 0.4}
    assert facts["items_per_request"]["max"] == 2
    assert facts["items_per_request"]["min"] == 0
    assert facts["width"]["p50"] == 640
    assert facts["aspect_ratio"]["max"] == pytest.approx(16 / 9)
    assert facts["frames_per_video"] == {**dict.fromkeys(facts["frames_per_video"], 240.0), "n": 2}
    assert facts["models"] == []


def test_tokens_are_those_of_each_models_own_rule(workload: Workload) -> None:
    found = inspect_workload(workload, RULES)
    rule = RULES[QWEN][1]
    # 8 s of video at 2 frames a second are 8 temporal steps of 15 x 20 tokens.
    video = rule.item_spec(rule.geometry(640, 480, 240, 30.0)).output_tokens
    assert video == 2400
    assert found.tokens == {QWEN: [100, 100, 880, video, video], GEMMA: [256, 256, 256]}
    qwen, gemma = found.facts["models"]
    assert qwen["tokens_per_item"] == describe_numbers(found.tokens[QWEN])
    assert qwen["tokens_per_request"] == describe_numbers([200, 880 + video, video])
    assert qwen["segments_per_item"] == describe_numbers([1, 1, 1, 8, 8])
    assert qwen["refused"] == {}
    assert list(gemma["refused"].values()) == [2]
    assert "images only" in next(iter(gemma["refused"]))
    assert (qwen["model"], qwen["row"], qwen["distinct_tokens"]) == (QWEN, "qwen3_vl", 3)
    assert qwen["common_tokens"][0] == {"tokens": 100, "items": 2, "share": 0.4}


def test_the_shipped_trace_counts_as_the_bench_does() -> None:
    workload = build_workload(WorkloadSpec("trace", dataset_path="mixed-chat", num_prompts=50, num_warmups=0))
    rule = RULES[QWEN][1]
    items = [item for request in workload.requests for item in request.items]
    assert inspect_workload(workload, {QWEN: RULES[QWEN]}).tokens[QWEN] == [
        rule.item_spec(rule.geometry(item.width, item.height)).output_tokens for item in items
    ]


def test_numbers_are_described_without_inventing_any() -> None:
    assert describe_numbers([]) == dict.fromkeys(describe_numbers([1]), None) | {"n": 0}
    facts = describe_numbers(range(101))
    assert (facts["n"], facts["min"], facts["p5"], facts["p50"], facts["p99"], facts["max"]) == (101, 0, 5, 50, 99, 100)
    assert facts["mean"] == 50


def test_common_values_are_ordered_by_count_then_value() -> None:
    assert [entry["tokens"] for entry in common_values([5, 3, 3, 5, 9])] == [3, 5, 9]
    assert len(common_values(range(100))) == 10


@pytest.mark.parametrize(
    ("values", "bins", "expected"),
    [
        ([], 4, []),
        ([7, 7], 4, [(7, 7, 2)]),
        ([1, 2, 2, 900], 4, [(1, 1, 1), (2, 2, 2), (900, 900, 1)]),
        ([10, 11, 12, 13, 14, 15, 16, 17], 4, [(10, 11, 2), (12, 13, 2), (14, 15, 2), (16, 17, 2)]),
        ([1, 3, 9, 27, 81, 4], 4, [(1, 2, 1), (3, 8, 2), (9, 26, 1), (27, 81, 2)]),
        ([0, 1, 2, 3, 100], 4, [(0, 25, 4), (26, 50, 0), (51, 75, 0), (76, 100, 1)]),
    ],
)
def test_histograms_hold_every_value_once(values: list[int], bins: int, expected: list[tuple[int, int, int]]) -> None:
    found = [(entry["low"], entry["high"], entry["items"]) for entry in histogram(values, bins)]
    assert found == expected
