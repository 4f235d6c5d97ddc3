"""When a profile's predictions are acted on."""

from __future__ import annotations

import pytest

from vitgraph.predict.cost_model import CostModel
from vitgraph.predict.doubt import profile_doubts
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
