"""Comparing two saved runs: what may differ, how deltas and noise floors come about, and when nothing is claimed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from saved_run_folders import EXAMPLE, scale, set_field, write_run

from vitgraph.errors import UsageError
from vitgraph.records.stats import P99_MIN_SAMPLES
from vitgraph.records.two_runs import RunComparison, compare_sides, open_runs

DEFER = set_field("resolved", "packing", value="greedy-defer")


def compare(first: Path, second: Path, *across: str) -> RunComparison:
    return compare_all([first], [second], *across)


def test_a_run_and_its_copy_are_the_same(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "copy")
    comparison = compare(EXAMPLE, tmp_path / "copy")
    assert comparison.differing == ()
    assert comparison.requests == 320
    assert {row.found.improvement_pct for row in comparison.rows} == {0.0}
    assert comparison.verdict == "same"
    assert "lies wholly within ±2%" in comparison.verdict_reason


def test_the_margin_of_same_is_asked_for(tmp_path: Path) -> None:
    """Three percent, known to be three: no sameness within 2 %, and sameness within 4 %."""
    second = write_run(tmp_path / "second", DEFER, scale(eager=1.04, graph=1.03))
    runs = open_runs([EXAMPLE, second])
    assert compare_sides(runs[:1], runs[1:]).verdict == "undecided"
    wide = compare_sides(runs[:1], runs[1:], margin_pct=4.0)
    assert (wide.verdict, "±4%" in wide.verdict_reason) == ("same", True)
    several = compare_sides(runs[:1] * 2, runs[:1] * 2, margin_pct=4.0)
    assert (several.verdict, "±4%" in several.verdict_reason) == ("same", True)


def test_a_factor_on_every_request_is_found_as_it_is(tmp_path: Path) -> None:
    second = write_run(tmp_path / "second", DEFER, scale(graph=0.9))
    comparison = compare(EXAMPLE, second)
    assert [str(difference) for difference in comparison.differing] == ["packing (greedy against greedy-defer)"]
    row = comparison.row("graph", "mean")
    assert row.found.improvement_pct == pytest.approx(10.0, abs=1e-4)
    assert row.found.ci95 == pytest.approx((10.0, 10.0), abs=1e-4)
    assert (row.first_ms, row.second_ms) == pytest.approx((6.162866, 5.546580), abs=1e-5)
    assert comparison.row("graph", "p99").found.improvement_pct == pytest.approx(10.0, abs=1e-4)
    assert comparison.verdict == "faster"


def test_eager_that_changed_between_the_runs_is_noise_where_eager_should_not_change(tmp_path: Path) -> None:
    drifted = write_run(tmp_path / "drifted", DEFER, scale(eager=1.05, graph=1.03))
    comparison = compare(EXAMPLE, drifted)
    control = comparison.row("eager", "mean")
    assert control.is_control
    assert control.found.improvement_pct == pytest.approx(-5.0, abs=1e-4)
    graph = comparison.row("graph", "mean")
    assert graph.found.noise_floor_pct == pytest.approx(5.0, abs=1e-3)
    assert graph.found.verdict == "undecided"
    assert "between the two runs" in comparison.noise_source


def test_across_backends_eager_is_compared_too_and_its_noise_is_said_to_be_unknown(tmp_path: Path) -> None:
    other = write_run(
        tmp_path / "other",
        set_field("environment", "encoder", "attn_backend", value="FLASHINFER"),
        scale(eager=1.05, graph=1.03),
    )
    comparison = compare(EXAMPLE, other)
    assert [difference.name for difference in comparison.differing] == ["backend"]
    assert not any(row.is_control for row in comparison.rows)
    assert comparison.row("eager", "mean").found.verdict == "slower"
    assert comparison.verdict == "slower"
    assert comparison.row("graph", "mean").found.noise_floor_pct == pytest.approx(0.286, abs=0.02)
    assert "was not measured" in comparison.noise_source


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (set_field("environment", "device", value="Other GPU"), "device (Synthetic GPU against Other GPU)"),
        (
            set_field("workload", "fingerprint", value="0123456789abcdef"),
            "workload fingerprint (synthetic-320 against 0123456789abcdef)",
        ),
        (set_field("result", "graph", "mode", value="cpu-replay"), "graph mode (cuda against cpu-replay)"),
        (
            set_field("workload", "skipped", value=[{"source": "a.png", "reason": "broken"}]),
            "measured items (skipped 0 against skipped 1)",
        ),
        (
            set_field("resolved", "requests_per_call", value=4),
            "requests per call (1 against 4)",
        ),
    ],
)
def test_unlike_runs_are_refused_with_the_difference_named(
    change: Callable[[dict[str, Any]], None], named: str, tmp_path: Path
) -> None:
    other = write_run(tmp_path / "other", change)
    with pytest.raises(UsageError) as raised:
        compare(EXAMPLE, other, "backend")
    assert f"bench-run and other are not comparable: they differ in {named}." in str(raised.value)


def two_changes(record: dict[str, Any]) -> None:
    record["environment"]["encoder"]["attn_backend"] = "FLASHINFER"
    record["environment"]["libraries"]["torch"] = "2.13.0"


def test_two_differences_have_to_be_named(tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", two_changes)
    both = "backend (FLASH_ATTN against FLASHINFER), software (torch 2.11.0 against torch 2.13.0)"
    for across in ((), ("backend",)):
        with pytest.raises(UsageError) as raised:
            compare(EXAMPLE, other, *across)
        assert f"bench-run and other differ in {both}, so" in str(raised.value)
        assert str(raised.value).endswith("--across backend,software")
    assert [difference.name for difference in compare(EXAMPLE, other, "backend", "software").differing] == [
        "backend",
        "software",
    ]


def test_across_refuses_what_is_unknown_and_what_does_not_differ(tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", DEFER)
    with pytest.raises(UsageError, match=r"--across has 'colour'; two runs can be compared across model, weights"):
        compare(EXAMPLE, other, "colour")
    with pytest.raises(
        UsageError, match=r"'backend', but bench-run and other have the same backend; they differ in pack"
    ):
        compare(EXAMPLE, other, "backend")


def test_budgets_are_compared_as_they_were_resolved(tmp_path: Path) -> None:
    resolved = set_field("resolved", "token_budgets", value={"default": [512, 4864]})
    other = write_run(tmp_path / "other", resolved)
    assert [str(difference) for difference in compare(EXAMPLE, other).differing] == [
        "budgets (token budgets 512 1024 1536 2048 2560 3072 3584 4096 4864 against token budgets 512 4864)"
    ]


def test_a_run_that_is_not_valid_makes_the_verdict_invalid(tmp_path: Path) -> None:
    def throttle(record: dict[str, Any]) -> None:
        DEFER(record)
        record["result"]["comparison"] |= {"verdict": "invalid", "verdict_reason": "the GPU was throttled"}

    comparison = compare(EXAMPLE, write_run(tmp_path / "hot", throttle, scale(graph=0.5)))
    assert {row.found.verdict for row in comparison.rows} == {"invalid"}
    assert comparison.verdict_reason == "hot: the GPU was throttled"


def test_few_requests_leave_the_verdict_open(tmp_path: Path) -> None:
    second = write_run(tmp_path / "second", DEFER, scale(graph=0.9), requests=9)
    comparison = compare(EXAMPLE, second)
    assert comparison.requests == 9
    assert comparison.verdict == "undecided"
    assert comparison.verdict_reason == "9 calls are too few for an interval of the mean; it takes 10"
    assert comparison.row("graph", "p99").n < P99_MIN_SAMPLES


def test_runs_without_a_common_request_are_refused(tmp_path: Path) -> None:
    second = write_run(tmp_path / "second", DEFER)
    lines = (second / "samples.csv").read_text(encoding="utf-8").splitlines()
    (second / "samples.csv").write_text(f"{lines[0]}\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"no request that both measured .* \(320 in bench-run and 0 in second\)"):
        compare(EXAMPLE, second)


def repeated(folder: Path, name: str, *factors: float, **changes: Any) -> list[Path]:
    """Runs of one setting, each process slower or faster as a whole by a factor."""
    runs = []
    for number, factor in enumerate(factors):
        runs.append(write_run(folder / f"{name}{number}", DEFER if name == "new" else lambda record: None,
                              scale(eager=factor, graph=factor), **changes))  # fmt: skip
    return runs


def compare_all(firsts: list[Path], seconds: list[Path], *across: str) -> RunComparison:
    runs = open_runs([*firsts, *seconds])
    return compare_sides(runs[: len(firsts)], runs[len(firsts) :], across)


@pytest.mark.slow
def test_noise_between_processes_is_measured_where_either_side_has_several_runs(tmp_path: Path) -> None:
    base = repeated(tmp_path, "base", 1.0, 1.03, 0.98)
    noisy = compare_all(base, repeated(tmp_path, "new", 1.02, 0.99, 1.04))
    row = noisy.row("graph", "mean")
    assert row.found.ci95 is not None and row.found.ci95[0] < 0.0 < row.found.ci95[1]
    assert row.found.noise_floor_pct == pytest.approx(2.5, abs=0.3)
    assert noisy.verdict == "undecided"
    assert "the spread of the runs of one side, 3 and 3" in noisy.noise_source
    # The same shift of all runs by a fifth is beyond what processes differ by.
    shifted = compare_all(base, repeated(tmp_path / "b", "new", 1.22, 1.19, 1.24))
    assert shifted.verdict == "slower"
    assert shifted.row("graph", "mean").found.improvement_pct == pytest.approx(-21.2, abs=0.3)


@pytest.mark.slow
def test_a_side_with_one_run_takes_the_noise_of_the_other(tmp_path: Path) -> None:
    found = compare_all(repeated(tmp_path, "base", 1.0), repeated(tmp_path, "new", 1.02, 0.99, 1.04))
    row = found.row("graph", "mean")
    assert row.found.ci95 is not None and row.found.ci95[1] - row.found.ci95[0] > 5.0
    assert found.verdict == "undecided"


def test_one_run_a_side_says_that_noise_between_processes_is_unknown(tmp_path: Path) -> None:
    second = write_run(tmp_path / "second", DEFER, scale(graph=1.05))
    assert "noise between processes is unknown" in compare(EXAMPLE, second).noise_source


def test_runs_of_one_side_are_one_setting(tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", DEFER)
    with pytest.raises(UsageError, match=r"given as runs of one side, but differ in packing"):
        compare_all([EXAMPLE, other], [write_run(tmp_path / "third", DEFER)])
