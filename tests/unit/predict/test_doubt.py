"""When a profile's predictions are acted on."""

from __future__ import annotations

import pytest

from vitgraph.predict.cost_model import CostModel
from vitgraph.predict.doubt import host_factor, model_error, profile_doubts
from vitgraph.predict.profile import load_profile, shipped_profiles
from vitgraph.records.calibrate_result import HostCheck


@pytest.mark.parametrize("name", sorted(shipped_profiles()))
def test_shipped_profiles_are_ones_to_act_on(name: str) -> None:
    profile = load_profile(shipped_profiles()[name])
    assert profile_doubts(profile, model_error(CostModel(profile))) == []


@pytest.mark.parametrize(
    ("here_us", "factor", "says"), [(72, 1.0, "as measured there"), (140, 2.0, "2.00 times as long")]
)
def test_a_slower_host_scales_eager_and_not_replays(here_us: float, factor: float, says: str) -> None:
    profile = load_profile(shipped_profiles()["h200-qwen3-vl-30b-a3b"])
    there = HostCheck(reference_launch_us=45.0, looks=10, layer_us=70.0)
    found, text = host_factor(there, here_us)
    assert found == factor and says in text
    calls = [point.items for point in profile.eager]
    shortest, longest = (order(calls, key=lambda call: sum(s.output_tokens for s in call)) for order in (min, max))
    base, here = CostModel(profile), CostModel(profile, found)
    assert here.eager_ms(shortest) == pytest.approx(factor * base.eager_ms(shortest), rel=0.02)
    assert here.eager_ms(longest) == pytest.approx(base.eager_ms(longest), rel=0.02)


def test_a_profile_that_does_not_say_how_fast_its_host_was_is_not_scaled() -> None:
    factor, text = host_factor(None, 100.0)
    assert factor == 1.0 and "does not say how fast its host was" in text


def test_a_profile_without_held_out_calls_is_doubted() -> None:
    profile = load_profile(next(iter(shipped_profiles().values())))
    profile.holdout = []
    assert "no calls to check" in profile_doubts(profile, model_error(CostModel(profile)))[0]
