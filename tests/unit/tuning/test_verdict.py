"""Never slower than eager: what is predicted, and then measured, decides the headline and what is pasted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from synthetic import Machine, image, synthetic_profile

from vitgraph.measure.calls import make_calls
from vitgraph.measure.setup import resolve_source
from vitgraph.predict.cost_model import CostModel
from vitgraph.predict.profile import CalibrationProfile, find_profile
from vitgraph.predict.targets import TARGETS, VLLM, TargetCost
from vitgraph.predict.workload_cost import Traffic
from vitgraph.records.sections import Compiled
from vitgraph.records.series import Improvement, Pair, SlowerRequests
from vitgraph.records.stats import summarize
from vitgraph.records.tune_result import Closed, Measured, PredictionError, Strategy
from vitgraph.specs.parts import ModelSpec
from vitgraph.tuning.advice import Advice, tune_budgets
from vitgraph.tuning.objective import Kept, Limits, Objective, ScoredSettings, measured_verdict
from vitgraph.tuning.search import Search
from vitgraph.workloads.base import MediaItem, Request

SOURCE = resolve_source(ModelSpec("qwen3-vl-30b-a3b"))


def best_of(most_slower: float, small: int, large: int) -> ScoredSettings:
    """The best single graph for images of 300 and of 1,000 tokens.

    Eager takes 14 ms for either, a graph of 1,000 tokens 13.6. One of 300 tokens halves the small images' times and
    makes each large one, which the manager then runs eagerly, 0.3 ms slower: 2.1 %.
    """
    model = CostModel(synthetic_profile(Machine(launch=14.0, per_pair=0.0)))
    cost = TargetCost(model, TARGETS[VLLM], doubt=0.01)
    # The longest calls are eager's in any case, and make the tail.
    calls = [(image(300),)] * small + [(image(1000),)] * large + [(image(4000),)] * 4
    limits = Limits(max_graphs=1, most_slower=most_slower)
    best = Search(Traffic(calls), cost, model.profile.encoder, Objective(), limits, 4096).run().best
    assert best is not None
    return best


def test_a_list_that_makes_few_requests_slower_is_preferred_to_a_faster_one() -> None:
    free, strict = best_of(1.0, 90, 10), best_of(0.02, 90, 10)
    assert free.settings.token_budgets == (300,)
    assert strict.settings.token_budgets == (1000,)
    assert free.score < strict.score < 1.0 and strict.excess == 0.0
    assert best_of(0.02, 99, 1).settings.token_budgets == (300,)


@pytest.mark.parametrize(("slower", "tail", "is_kept"), [(1, 1.0, True), (8, 1.0, False), (0, 1.1, False)])
def test_few_requests_and_not_the_tail_may_become_slower(slower: int, tail: float, is_kept: bool) -> None:
    eager = np.full(100, 10.0)
    eager[-2:] = 100.0
    graph = 0.8 * eager
    graph[:slower] = 10.5
    graph[-2:] = 100.0 * tail
    kept = Kept.of(graph, eager)
    assert (kept.excess(0.02) == 0.0) == is_kept
    assert bool(kept.broken(0.02)) == (not is_kept)


def made_up(mean: str, gain: float, slower: float = 0.0, p99: str = "same", requests: int = 200) -> Measured:
    """A measurement of the tuned list with a given outcome."""
    ends = {"faster": (gain - 1, gain + 1), "slower": (gain - 1, gain + 1)}.get(mean, (gain - 9, gain + 9))
    pair = Pair(
        base="eager",
        series="tuned",
        mean=Improvement(improvement_pct=gain, ci95=ends, noise_floor_pct=0.5, verdict=mean),
        p99=Improvement(improvement_pct=0.0, verdict=p99),
        slower=SlowerRequests(
            requests=requests,
            threshold_pct=1.5,
            count=round(slower * requests),
            share=slower,
            over_2pct_count=round(slower * requests),
            over_2pct_share=slower,
        ),
    )
    times = summarize(np.full(requests, 5.0), np.ones(requests, dtype=np.int64))
    return Measured(
        mode="cuda",
        manager="vitgraph's",
        calls=requests,
        calls_left_out=0,
        calls_of_workload=requests,
        choice="made up",
        is_interrupted=False,
        strategies={"tuned": Strategy(latency=times, against_eager=pair, prediction_error=PredictionError(n=0))},
        closed=Closed(),
        problems=("throttled",) if mean == "invalid" else (),
        elapsed_s=1.0,
    )


@pytest.mark.parametrize(
    ("measured", "verdict", "says"),
    [
        (made_up("faster", 21.0, 0.01), "use_graphs", "measured +21.0% (95% CI +20.0% to +22.0%)"),
        (made_up("faster", 21.0, 0.10), "no_graphs", "10.0% of the requests slower"),
        (made_up("faster", 21.0, 0.03), "use_graphs", "3.0% of the requests slower"),
        (made_up("faster", 21.0, p99="slower"), "no_graphs", "P99 slower"),
        (made_up("same", 0.4), "no_graphs", "leave graphs off"),
        (made_up("slower", -4.0), "no_graphs", "measured -4.0%"),
        (made_up("undecided", 3.0), "measure_first", "--verify-calls"),
        (made_up("invalid", 3.0), "measure_first", "throttled"),
    ],
)
def test_what_was_measured_decides(measured: Measured, verdict: str, says: str) -> None:
    found = measured_verdict(measured, 0.02)
    assert found is not None
    assert found[0] == verdict
    assert says in found[1]


def advised(**options: Any) -> Advice:
    requests = [Request(number, (MediaItem(224 + 32 * (number % 4), 448),)) for number in range(24)]
    calls = make_calls(requests, SOURCE.rule(), 1)[0]
    profile = synthetic_profile(Machine(launch=18.0))
    return tune_budgets(calls, SOURCE, profile, max_call_tokens=4096, share=1.0, **options)


@pytest.mark.parametrize("target", ["vitgraph", "vllm"])
def test_headline_and_what_is_pasted_follow_the_measurement(target: str) -> None:
    advice = advised(target=target)
    assert advice.result.verdict == "use_graphs"
    assert advice.result.serve_line is not None
    advice.take(made_up("undecided", 2.0))
    advice.take(made_up("same", 0.2))
    result = advice.result
    assert (result.verdict, result.serve_line, result.compilation_config) == ("no_graphs", None, None)
    assert result.verdict_text.startswith("leave graphs off: measured +0.2%")
    assert result.verdict_text.count("Predicted: use graphs: predicted") == 1
    advice.take(made_up("faster", 30.0))
    assert advice.result.verdict == "use_graphs"
    assert advice.result.serve_line is not None


def test_a_measurement_that_compared_nothing_leaves_the_prediction() -> None:
    advice = advised()
    advice.take(made_up("faster", 3.0).model_copy(update={"strategies": {}}))
    assert advice.result.verdict_text.startswith("use graphs: predicted")
    assert advice.result.measured is not None


def with_blocks_compiled(profile: CalibrationProfile) -> CalibrationProfile:
    assert profile.ran is not None
    encoder = profile.ran.model_copy(update={"compiled": Compiled(blocks=27)})
    return profile.but(environment=profile.environment.but(encoder=encoder))


@pytest.mark.parametrize(
    ("asked", "option"),
    [
        ({"dtype": "float16"}, "--dtype float16"),
        ({"attn_backend": "TORCH_SDPA"}, "--mm-encoder-attn-backend TORCH_SDPA"),
    ],
)
def test_a_profile_of_another_dtype_or_backend_is_not_acted_on(asked: dict[str, str], option: str) -> None:
    profile = find_profile(None, SOURCE)
    assert profile.doubts(ModelSpec(dtype="bfloat16", attn_backend="FLASH_ATTN")) == []
    (doubt,) = profile.doubts(ModelSpec(**asked))  # type: ignore[arg-type]
    assert f"vitgraph calibrate {option}" in doubt


def test_a_compiled_profile_is_found_only_for_a_compiled_tower_and_its_line_compiles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    plain = find_profile(None, SOURCE)
    compiled = with_blocks_compiled(find_profile(None, SOURCE))
    for name, profile in (("a-compiled", compiled), ("b-plain", plain)):
        profile.save(tmp_path / f"{name}.json")
    shipped = {path.stem: path for path in sorted(tmp_path.glob("*.json"))}
    monkeypatch.setattr("vitgraph.predict.profile.shipped_profiles", lambda: shipped)
    assert not find_profile(None, SOURCE).is_compiled
    assert find_profile(None, SOURCE, {"compile": True}).is_compiled
    assert compiled.doubts(ModelSpec(compile=True)) == []
    assert "--compile" in str(compiled.doubts(ModelSpec()))
    assert "vitgraph calibrate --compile" in str(plain.doubts(ModelSpec(compile=True)))
    doubted = advised(doubts=plain.doubts(ModelSpec(compile=True))).result
    assert doubted.verdict == "measure_first" and "not compiled" in doubted.verdict_text
    compiled_profile = with_blocks_compiled(synthetic_profile(Machine(launch=18.0)))
    calls = make_calls([Request(0, (MediaItem(224, 448),))] * 8, SOURCE.rule(), 1)[0]
    line = tune_budgets(calls, SOURCE, compiled_profile, max_call_tokens=4096).result.serve_line
    assert line is not None and '"compile_mm_encoder": true' in line
