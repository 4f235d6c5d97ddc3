"""The calls that an engine makes of arrivals: order, budgets, modalities, and that every item is encoded once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from synthetic import image, video

from vitgraph.models.registry import resolve_model
from vitgraph.planning.budgets import EncoderItemSpec
from vitgraph.predict.engine_calls import replay_arrivals, replay_workload
from vitgraph.specs.parts import TrafficSpec, WorkloadSpec
from vitgraph.workloads.registry import build_workload

ENGINE = TrafficSpec(lm_step_ms=10.0, lm_us_per_token=0.0, text_tokens=0, answer_tokens=1)


def ten_ms(_: Sequence[EncoderItemSpec]) -> float:
    return 10.0


def calls_of(
    requests: list[list[EncoderItemSpec]], arrivals: list[float], engine: TrafficSpec = ENGINE, step_tokens: int = 1000
) -> list:
    return replay_arrivals(requests, arrivals, ten_ms, engine, step_tokens)


def test_low_load_is_a_request_a_call_and_high_load_is_what_a_step_holds() -> None:
    requests = [[image(100)] for _ in range(30)]
    assert calls_of(requests, [float(i) for i in range(30)]) == [[(i, 0)] for i in range(30)]
    assert [len(call) for call in calls_of(requests, [0.0] * 30)] == [10, 10, 10]


def test_what_arrives_during_a_step_is_the_next_steps() -> None:
    requests = [[image(100)] for _ in range(4)]
    assert calls_of(requests, [0.0, 0.001, 0.019, 0.021]) == [[(0, 0)], [(1, 0), (2, 0)], [(3, 0)]]


def test_images_of_one_prompt_are_one_call_and_a_video_ends_it() -> None:
    assert calls_of([[image(100), image(200)]], [0.0]) == [[(0, 0), (0, 1)]]
    assert calls_of([[image(100), video(4, 25), image(100)]], [0.0]) == [[(0, 0)], [(0, 1)], [(0, 2)]]


def test_tokens_are_cut_before_an_item_that_the_budget_does_not_hold() -> None:
    assert calls_of([[image(600), image(600)]], [0.0]) == [[(0, 0)], [(0, 1)]]
    # The second image is touched by the last 400 tokens of the first step, and encoded there, since it fits.
    assert calls_of([[image(600)], [image(400)]], [0.0, 0.0]) == [[(0, 0), (1, 0)]]


def test_an_item_larger_than_a_step_is_encoded_once() -> None:
    assert calls_of([[image(2500)], [image(100)]], [0.0, 0.0]) == [[(0, 0)], [(1, 0)]]


@pytest.mark.parametrize("seed", range(4))
def test_every_item_is_encoded_once_in_an_order_of_its_request(seed: int) -> None:
    rng = np.random.default_rng(seed)
    requests = [
        [image(int(t)) if rng.random() < 0.8 else video(4, int(t) // 4 + 1) for t in rng.integers(1, 1500, size=n)]
        for n in rng.integers(0, 4, size=80)
    ]
    arrivals = rng.exponential(0.01, size=80).cumsum().tolist()
    engine = TrafficSpec(lm_step_ms=5.0, answer_tokens=int(rng.integers(1, 20)))
    found = [pair for call in calls_of(requests, arrivals, engine, 2000) for pair in call]
    assert sorted(found) == [(i, place) for i, items in enumerate(requests) for place in range(len(items))]
    for index in range(80):
        places = [place for request, place in found if request == index]
        assert places == sorted(places)


def test_a_workload_keeps_its_items_and_says_what_was_assumed() -> None:
    workload = build_workload(WorkloadSpec(dataset_name="trace", dataset_path="mixed-chat", num_prompts=60))
    rule = resolve_model("qwen3-vl-30b-a3b").rule()
    replayed = replay_workload(workload, rule, ten_ms, TrafficSpec(request_rate="50"), 16384, 0)
    before = sorted((item.width, item.height) for request in workload.requests for item in request.items)
    after = sorted((item.width, item.height) for request in replayed.requests for item in request.items)
    assert before == after
    assert list(dict.fromkeys(request.call for request in replayed.requests)) == [
        str(number) for number in range(int(replayed.requests[-1].call or 0) + 1)
    ]
    assert "assumed, not measured" in str(replayed.provenance["engine"])
