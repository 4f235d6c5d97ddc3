"""When a profile's predictions are acted on, and which signs of an unsteady host are told."""

from __future__ import annotations

import pytest

from vitgraph.predict.cost_model import CostModel
from vitgraph.predict.doubt import host_doubts, profile_doubts
from vitgraph.predict.find_profile import shipped_profiles
from vitgraph.predict.holdout import model_error
from vitgraph.predict.profile import load_profile


@pytest.mark.parametrize("name", sorted(shipped_profiles()))
def test_shipped_profiles_are_ones_to_act_on(name: str) -> None:
    profile = load_profile(shipped_profiles()[name])
    assert profile_doubts(profile, model_error(CostModel(profile))) == []


def test_a_profile_without_held_out_calls_is_doubted() -> None:
    profile = load_profile(next(iter(shipped_profiles().values())))
    profile.holdout = []
    assert "no calls to check" in profile_doubts(profile, model_error(CostModel(profile)))[0]


def test_a_host_that_moves_is_told_and_a_calm_one_is_not() -> None:
    calm = [10.0, 11.0, 12.0, 13.0]
    assert host_doubts(calm, [value * 1.05 for value in calm]) == []
    assert "11.5 ms at one time and 23.0 ms at another" in host_doubts(calm, [value * 2 for value in calm])[0]
    assert host_doubts(calm, [value / 2 for value in calm])
    assert host_doubts([10.0, 20.0], [20.0, 40.0]) == [], "two calls say little"


def test_a_busy_host_is_told() -> None:
    assert "load average is 15.0 on 16 cores" in host_doubts([], [], load=15.0, cores=16)[0]
    assert host_doubts([], [], load=2.0, cores=16) == []
