"""What is derived from the samples of a comparison: gains, verdicts against the best, and how sure the advice is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from made_up_comparison import MEANS, made_up_result, make_result, make_samples

from vitgraph.errors import BackendError, IncorrectOutputError, NothingReplayedError
from vitgraph.records.candidates import before_its_turn, contrast, failure, fastest_shares
from vitgraph.records.sample_table import Samples
from vitgraph.records.stats import compare_bench

TWO: dict[str, tuple[float | None, float | None]] = {"A": (5.0, 4.0), "B": (5.0, 4.001)}


def test_a_gain_is_that_of_a_bench_run_over_the_same_requests() -> None:
    samples = [
        replace(sample, series=sample.series.removeprefix("FLASHINFER/"))
        for sample in make_samples()
        if sample.series.startswith("FLASHINFER/") and not sample.series.endswith("_repeat")
    ]
    expected = compare_bench(Samples.of(samples)).pairs[0]
    gain = made_up_result().candidates[1].gain
    assert gain is not None and gain.slower is not None and expected.slower is not None
    assert gain.mean.improvement_pct == expected.mean.improvement_pct == pytest.approx(19.6, abs=0.1)
    assert gain.mean.ci95 == pytest.approx(expected.mean.ci95)
    assert gain.mean.verdict == "faster"
    assert gain.slower.over_2pct_count == expected.slower.over_2pct_count == 0


def test_the_best_is_clear_where_all_others_are_slower_beyond_the_noise() -> None:
    result = made_up_result()
    advice = result.recommendation
    assert (advice.name, advice.mode, advice.sure, advice.fastest_in_share) == ("FLASHINFER", "graph", "clear", 1.0)
    assert "the nearest is TRITON_ATTN graph (-" in advice.text
    standings = [(entry.name, entry.mode, entry.verdict) for entry in result.comparison.standings]
    assert standings[:3] == [
        ("FLASHINFER", "graph", "best"),
        ("TRITON_ATTN", "graph", "slower"),
        ("FLASH_ATTN", "graph", "slower"),
    ]
    assert len(standings) == 7


def test_two_that_differ_by_less_than_the_noise_are_undecided() -> None:
    advice = make_result(TWO, make_samples(TWO, noise=0.02)).recommendation
    assert (advice.sure, advice.mode) == ("undecided", "graph")
    assert "graph" in advice.text.split("undecided:")[1]
    assert advice.fastest_in_share is not None and 0.3 < advice.fastest_in_share < 0.99


def test_the_margin_of_same_is_asked_for() -> None:
    verdicts = []
    for margin in (0.001, 50.0):
        found = make_result(TWO, make_samples(TWO, noise=0.02), margin_pct=margin).comparison.standings
        near = min(found[1:], key=lambda entry: abs(entry.against_best.improvement_pct))
        verdicts.append(near.against_best.verdict)
    assert verdicts == ["undecided", "same"]


def test_too_few_calls_measured_twice_leave_the_noise_unknown_and_nothing_is_clear() -> None:
    result = make_result(samples=[sample for sample in make_samples() if not sample.series.endswith("_repeat")])
    assert result.comparison.noise_floor["graph"].mean is None
    assert result.recommendation.sure == "undecided"
    assert result.candidates[0].gain is not None and result.candidates[0].gain.mean.verdict == "undecided"


def test_a_disturbed_run_gives_no_advice_and_only_invalid_verdicts() -> None:
    result = make_result(invalid_reasons=("the GPU was throttled (hw_slowdown)",))
    assert result.recommendation.name is None
    assert result.recommendation.text == "No recommendation: the GPU was throttled (hw_slowdown)."
    assert {entry.verdict for entry in result.comparison.standings[1:]} == {"invalid"}


def test_the_only_one_that_ran_is_no_choice() -> None:
    alone: dict[str, tuple[float | None, float | None]] = {"TORCH_SDPA": (9.1, None)}
    advice = make_result(alone, make_samples(alone)).recommendation
    assert (advice.name, advice.mode, advice.sure) == ("TORCH_SDPA", "eager", "undecided")
    assert "nothing else could be measured" in advice.text


def test_another_backend_with_the_lowest_p99_is_named() -> None:
    samples = [
        replace(sample, wall_ms=30.0) if sample.series == "FLASHINFER/graph" and sample.call < 5 else sample
        for sample in make_samples({**MEANS, "FLASHINFER": (5.4, 3.9)})
    ]
    advice = make_result(samples=samples).recommendation
    assert advice.name == "FLASHINFER"
    assert "P99 is lowest with TRITON_ATTN in graph mode" in advice.text


def test_only_calls_that_every_series_has_are_compared() -> None:
    samples = [one for one in make_samples() if not (one.series.startswith("TRITON_ATTN") and one.call >= 350)]
    result = make_result(samples=samples)
    assert {row.eager.latency.calls for row in result.candidates if row.eager.latency} == {350}
    assert result.comparison.unpaired_samples == 50 * 5


@pytest.mark.slow
def test_of_several_processes_the_noisiest_gives_the_floor() -> None:
    quiet = make_samples({"A": (5.0, 4.0)}, noise=0.001)
    loud = make_samples({"B": (5.0, 4.0)}, noise=0.05)
    apart = make_result(TWO, [*quiet, *loud], isolated=True).comparison.noise_floor
    alone = make_result({"B": (5.0, 4.0)}, loud).comparison.noise_floor
    assert apart == alone
    together = make_result(TWO, [*quiet, *loud]).comparison.noise_floor
    assert together["graph"].mean < alone["graph"].mean  # type: ignore[operator]


def test_the_share_of_resamples_counts_who_is_fastest() -> None:
    ones = np.ones(20, dtype=np.int64)
    assert fastest_shares([np.full(20, 2.0), np.full(20, 1.0)], ones, seed=0) == [0.0, 1.0]
    even, odd = np.tile([1.0, 2.0], 50), np.tile([2.0, 1.0], 50)
    assert fastest_shares([even, odd], np.ones(100, dtype=np.int64), seed=0)[0] == pytest.approx(0.5, abs=0.1)
    # Calls of three requests decide where they are faster.
    assert fastest_shares([even, odd], np.tile([3, 1], 50), seed=0)[0] == 1.0


@pytest.mark.slow
def test_contrasts_are_of_series_that_were_measured() -> None:
    pairs = [("A/eager", "B/graph"), ("A/graph", "B/graph"), ("A/eager", "C/graph")]
    samples, result = Samples.of(make_samples(TWO)), make_result(TWO)
    found = contrast(result, samples, pairs, seed=0)
    assert [(pair.base, pair.series, pair.mean.verdict) for pair in found] == [
        ("A/eager", "B/graph", "faster"),
        ("A/graph", "B/graph", "same"),
    ]
    disturbed = make_result(TWO, invalid_reasons=("x",))
    assert {pair.mean.verdict for pair in contrast(disturbed, samples, pairs, 0)} == {"invalid"}
    assert contrast(result, Samples.of([]), pairs, seed=0) == ()


def test_a_comparison_that_proved_nothing_is_a_failure() -> None:
    assert failure(made_up_result()) is None
    eager = make_result({"TORCH_SDPA": (9.1, None)})
    waiting = before_its_turn("A")
    wrong = waiting.but(status="incorrect", reason="off")
    for rows, kind in (
        (eager.candidates, NothingReplayedError),
        ((wrong,), IncorrectOutputError),
        ((waiting,), BackendError),
    ):
        assert isinstance(failure(eager.but(candidates=rows)), kind)
