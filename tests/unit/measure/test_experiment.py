"""The measuring loop: order, control, what is handed out when, and what a stop leaves."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import pytest
import torch

from vitgraph.measure.calls import EncoderCall, make_calls
from vitgraph.measure.experiment import Control, Experiment, TimedCall, rounds_over, turn_order
from vitgraph.measure.series import CallTime, CallTimer, Series
from vitgraph.measure.setup import resolve_source
from vitgraph.specs.parts import ModelSpec
from vitgraph.workloads.base import MediaItem, Request

CPU = torch.device("cpu")


def no_inputs(call: EncoderCall) -> Any:
    return call


def nothing(inputs: Any) -> list[torch.Tensor]:
    return []


def series_named(*names: str) -> list[Series]:
    return [Series(name, nothing) for name in names]


def some_calls(count: int, requests_per_call: int = 1) -> list[EncoderCall]:
    requests = [Request(number, (MediaItem(64, 64),)) for number in range(count)]
    return make_calls(requests, resolve_source(ModelSpec("qwen3-vl-debug")).rule(), requests_per_call)[0]


def measured(series: list[Series], calls: int = 6, rounds: int = 2, **options: Any) -> list[TimedCall]:
    found: list[TimedCall] = []
    made = some_calls(calls)
    experiment = Experiment(series, no_inputs, CallTimer(CPU), CPU)
    experiment.measure(rounds_over(made, rounds), calls * rounds, found.append, **options)
    return found


@pytest.mark.parametrize("count", [2, 3, 4, 6])
def test_every_series_is_first_last_and_everywhere_equally_often(count: int) -> None:
    series = series_named(*"abcdef"[:count])
    orders = [[one.name for one, _ in turn_order(step, series)] for step in range(2 * count)]
    for place in range(count):
        assert set(Counter(order[place] for order in orders).values()) == {2}
    assert orders[0] == list(reversed(orders[1]))


@pytest.mark.parametrize("names", [["a", "b"], ["a", "b", "c"], ["a", "b", "c", "d"]])
def test_the_control_is_as_far_from_the_first_time_as_the_others(names: list[str]) -> None:
    series = series_named(*names)
    for step in range(24):
        turns = turn_order(step, series, Control(["a"], 1))
        first, second = (place for place, (one, _) in enumerate(turns) if one.name == "a")
        assert second - first > 1
        assert {turns[first][1], turns[second][1]} == {False, True}
        assert {first, second} & {0, len(turns) - 1}


def test_those_that_are_repeated_take_turns() -> None:
    series, control = series_named("a", "b", "c"), Control(["a", "b", "c"], 4)
    repeated = Counter(
        one.name for step in range(48) for one, is_repeat in turn_order(step, series, control) if is_repeat
    )
    assert repeated == {"a": 4, "b": 4, "c": 4}


def test_there_are_enough_repeats_to_know_the_noise() -> None:
    for calls, rounds, kinds, least in ((10, 1, 1, 10), (200, 1, 1, 40), (1000, 2, 1, 300), (1000, 1, 2, 600)):
        control = Control.of(["a"], calls, rounds, kinds)
        places = ((call, number) for number in range(rounds) for call in range(calls))
        repeated = {call for call, number in places if not (call + number) % control.every}
        assert len(repeated) >= least


def test_each_call_is_handed_out_once_in_every_series_and_round() -> None:
    found = measured(series_named("a", "b", "c"), control=Control(["a"], 2))
    seen = Counter((one.call.index, one.round, one.series.name, one.is_repeat) for one in found)
    assert set(seen.values()) == {1}
    assert {(call, number, name, False) for call in range(6) for number in range(2) for name in "abc"} <= set(seen)
    assert sum(one.is_repeat for one in found) == 6
    assert all(one.time.gpu_ms is None and one.time.wall_ms >= 0 for one in found)


def test_a_stop_keeps_what_was_handed_out_and_collects_garbage_again() -> None:
    times = 0

    def stop_at_the_eighth(inputs: Any) -> list[torch.Tensor]:
        nonlocal times
        times += 1
        assert not gc.isenabled()
        if times == 8:
            raise KeyboardInterrupt
        return []

    found: list[TimedCall] = []
    experiment = Experiment([Series(name, stop_at_the_eighth) for name in "ab"], no_inputs, CallTimer(CPU), CPU)
    experiment.measure(rounds_over(some_calls(6), 1), 6, found.append)
    assert experiment.is_interrupted and gc.isenabled()
    assert len(found) == 7


class Failing(Series):
    """Fails on its second call, and is not measured from then on."""

    calls = 0

    @property
    def is_live(self) -> bool:
        return self.calls < 2

    def time(self, timer: CallTimer, inputs: Any) -> CallTime | None:
        self.calls += 1
        return super().time(timer, inputs) if self.is_live else None


def test_a_series_that_fails_ends_alone() -> None:
    found = measured([*series_named("a"), Failing("b", nothing)], calls=4, rounds=1)
    assert Counter(one.series.name for one in found) == {"a": 4, "b": 1}
    assert measured([Failing("b", nothing)], calls=4, rounds=1)[-1].call.index == 0


def test_a_call_names_its_requests_by_their_places_in_the_workload() -> None:
    """A request that the model refuses, or that has no items, shifts none of the others."""
    sizes = [(64, 64), (64, 64), (2, 5000), (64, 128), None, (64, 64)]
    requests = [
        Request(place, (MediaItem(*size),) * (1 + place % 2) if size else ()) for place, size in enumerate(sizes)
    ]
    calls, skipped = make_calls(requests, resolve_source(ModelSpec("qwen3-vl-debug")).rule(), 2)
    assert [call.requests for call in calls] == [(0, 1), (3, 5)]
    assert [call.items_per_request for call in calls] == [(1, 2), (2, 2)]
    assert [sum(call.tokens_per_request) for call in calls] == [call.tokens for call in calls]
    assert len(skipped) == 1
