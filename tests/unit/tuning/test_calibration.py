"""Calibrating a small tower on the CPU: everything that a GPU run measures, labelled as what it is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from vitgraph.errors import UsageError
from vitgraph.measure.series import CallTime
from vitgraph.measure.setup import load, resolve_source
from vitgraph.models.encoder import VisionEncoder
from vitgraph.models.registry import all_presets
from vitgraph.planning.budgets import DEFAULT_PATH
from vitgraph.predict.cost_model import CostModel
from vitgraph.predict.doubt import describe_profile
from vitgraph.predict.profile import CalibrationProfile, load_profile
from vitgraph.predict.targets import encoder_facts
from vitgraph.records.store import read_record
from vitgraph.report.to_terminal import render
from vitgraph.report.views.parts import calibrate_document
from vitgraph.specs.parts import ModelSpec
from vitgraph.tuning import device_timing
from vitgraph.tuning.calibration import FEWEST_BUDGETS, FEWEST_EAGER, calibrate
from vitgraph.tuning.calibration_items import CalibrationPlan, ItemCatalogue
from vitgraph.tuning.device_timing import DeviceTiming


class Steps:
    """Collects what calibration tells."""

    def __init__(self) -> None:
        self.phases: list[str] = []

    def phase(self, name: str, total: int | None = None) -> None:
        self.phases.append(name)

    def step(self) -> None:
        pass

    def note(self, text: str) -> None:
        pass


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    """A quarter of a second a point is for measuring, not for testing."""
    patch = pytest.MonkeyPatch()
    patch.setattr(device_timing, "SECONDS_A_POINT", 0.0)
    patch.setattr(device_timing, "FEWEST_REPEATS", 1)
    yield
    patch.undo()


MODEL = {"name": "qwen3-vl-debug", "row": "qwen3_vl"}
NO_HURRY = {"time_limit_s": math.inf}


@pytest.fixture(scope="module")
def profile(tower: VisionEncoder) -> CalibrationProfile:
    return calibrate(
        tower, max_tokens=300, model=MODEL, budgets=(64, 128, 256), slots=(2, 4), holdout_calls=5, **NO_HURRY
    )


@pytest.mark.slow
def test_profile_holds_every_kind_of_measurement(profile: CalibrationProfile) -> None:
    budgets = {point.token_budget for point in profile.replays}
    assert budgets == {64, 126, 256}
    assert {point.segment_slots for point in profile.replays} == {1, 2, 4}
    assert any(len(point.items) > 1 for point in profile.replays)
    assert any(sum(s.output_tokens for s in point.items) < point.token_budget for point in profile.replays)
    assert len(profile.eager) >= 3
    assert {(point.replays, point.misses > 0) for point in profile.calls} >= {(1, False), (2, False), (0, True)}
    assert {point.tokens for point in profile.copies} == {256, 300}
    assert {(point.token_budget, point.segment_slots) for point in profile.captures} == {
        (point.token_budget, point.segment_slots) for point in profile.replays
    }
    assert profile.memory[0].buffer_bytes > 0
    assert len(profile.holdout) == 5


@pytest.mark.slow
def test_profile_says_that_a_cpu_replays_nothing(profile: CalibrationProfile) -> None:
    assert profile.is_cpu
    assert "CPU" in profile.label
    assert profile.environment.device == "CPU"


@pytest.mark.slow
def test_held_out_calls_carry_their_predictions(profile: CalibrationProfile) -> None:
    for point in profile.holdout:
        assert point.predicted_graph_ms is not None and point.predicted_graph_ms > 0
        assert point.predicted_eager_ms is not None and point.predicted_eager_ms > 0


@pytest.mark.slow
def test_graphs_that_only_one_number_of_segments_fits_are_also_replayed_in_part() -> None:
    spec = ModelSpec("minicpm-v-2.6-debug", load_format="dummy", device="cpu")
    sliced, _ = load(resolve_source(spec), spec, device=torch.device("cpu"), dtype=torch.float32)
    found = calibrate(sliced, max_tokens=300, model=MODEL, slots=(2, 4), holdout_calls=0, **NO_HURRY)
    tokens = [(point.token_budget, sum(item.output_tokens for item in point.items)) for point in found.replays]
    assert [filled for budget, filled in tokens if 2 * filled <= budget]


@pytest.mark.slow
def test_the_curve_stays_within_what_was_measured(profile: CalibrationProfile) -> None:
    # Single repeats on a busy CPU say nothing of the order of budgets, only of the range.
    curve = CostModel(profile).replay[DEFAULT_PATH].curve(())
    measured = [point.time.ms for point in profile.replays]
    for budget in (64, 126, 256):
        assert 0 < float(curve(budget)) <= 1.01 * max(measured)


@pytest.mark.slow
def test_profile_is_saved_loaded_and_described(profile: CalibrationProfile, tmp_path: Path) -> None:
    profile.save(tmp_path / "profile.json")
    summary = describe_profile(load_profile(tmp_path / "profile.json"))
    assert [row["token_budget"] for row in summary["curve"]] == [64, 126, 256]
    assert summary["error"]["graph"]["n"] == 5
    console = Console(width=110, record=True, file=(tmp_path / "out.txt").open("w"))
    render(calibrate_document(summary), console)
    text = console.export_text()
    assert "model error on 5 calls it has not seen" in text
    assert "replays stood in for on a CPU" in text


@pytest.mark.slow
def test_lack_of_time_is_noted_and_still_gives_a_profile(tower: VisionEncoder) -> None:
    steps = Steps()
    profile = calibrate(
        tower,
        max_tokens=200,
        model=MODEL,
        budgets=(64, 100),
        slots=(),
        holdout_calls=9,
        time_limit_s=0.0,
        progress=steps,
    )
    assert any("eager calls were left out" in note for note in profile.notes) or len(profile.eager) <= 8
    assert len(profile.holdout) == 6
    assert steps.phases[0] == "capturing budgets up to 100"
    assert CostModel(profile).launch_ms > 0


def test_calls_too_small_for_the_model_are_refused(tower: VisionEncoder) -> None:
    with pytest.raises(UsageError, match="no image of this model has 10 tokens"):
        calibrate(tower, max_tokens=10, model=MODEL)


@pytest.mark.parametrize("preset", sorted(all_presets()))
def test_catalogue_fills_budgets_of_every_family(preset: str) -> None:
    rule = resolve_source(ModelSpec(preset)).rule()
    catalogue, facts = ItemCatalogue(rule, 4096), encoder_facts(rule)
    for path in facts.path_minimums:
        smallest = min(item.spec.tokens_on(path) for item in catalogue.images if item.spec.tokens_on(path))
        for budget in (max(512, smallest), 1500, 4000):
            batch = catalogue.fill(path, budget)
            if not batch:
                assert catalogue.min_tokens > budget
                continue
            tokens = sum(item.spec.tokens_on(path) for item in batch)
            assert 0.45 * budget < tokens <= budget
            assert all(rule.item_spec(item.geometry) == item.spec for item in batch)
        pair = catalogue.fill(path, max(1500, 2 * smallest), items=2)
        assert len(pair) == 2


def test_catalogue_finds_videos_by_segments() -> None:
    catalogue = ItemCatalogue(resolve_source(ModelSpec("qwen3-vl-30b-a3b")).rule(), 4096)
    clip = catalogue.video(2000, 8)
    assert clip is not None
    assert clip.spec.segments == 8
    assert clip.spec.output_tokens <= 2000
    assert catalogue.video(2000, 5) is None


def test_grid_is_denser_where_launches_bind() -> None:
    rule = resolve_source(ModelSpec("qwen3-vl-30b-a3b")).rule()
    grid = CalibrationPlan.of(ItemCatalogue(rule, 16384), encoder_facts(rule), None, ()).budgets[DEFAULT_PATH]
    ratios = [larger / smaller for smaller, larger in pairwise(grid)]
    assert (grid[0], grid[-1]) == (64, 16384)
    assert all(ratio < 1.3 for ratio, budget in zip(ratios, grid, strict=False) if budget < 3000)
    assert max(ratios) < 2.0
    assert min(ratios) > 1.09


def test_a_first_run_that_builds_a_kernel_is_not_a_long_call(
    tower: VisionEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    times_ms = iter([1e3 * device_timing.LONG_S + 1])
    timing = device_timing.DeviceTiming(tower, 0)
    monkeypatch.setattr(timing, "_timer", SimpleNamespace(time=lambda call: CallTime(next(times_ms, 1.0), None)))
    timed = timing.repeat(lambda: None)[0]
    assert timed.repeats >= device_timing.FEWEST_REPEATS
    assert timed.high_ms == 1.0


def stop_at(number: int, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Stops in the n-th timing of a kind, as a user does."""
    real, seen = getattr(DeviceTiming, method), []

    def time_or_stop(self: DeviceTiming, *arguments: Any, **options: Any) -> Any:
        seen.append(arguments)
        if len(seen) == number:
            raise KeyboardInterrupt
        return real(self, *arguments, **options)

    monkeypatch.setattr(DeviceTiming, method, time_or_stop)


@pytest.mark.slow
def test_a_stop_keeps_the_points_until_then_and_says_so(
    tower: VisionEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One call is timed beside its misses before those that the fit does not see.
    stop_at(4, monkeypatch, "beside_eager")
    found = calibrate(tower, max_tokens=300, model=MODEL, budgets=(64, 128), slots=(2,), holdout_calls=5, **NO_HURRY)
    assert found.stopped is not None and "stopped by the user" in found.stopped
    assert (len(found.holdout), len(found.holdout_plans)) == (2, 1)
    found.save(tmp_path / "profile.json")
    assert read_record(tmp_path / "profile.json").status == "interrupted"
    assert load_profile(tmp_path / "profile.json").stopped == found.stopped
    assert found.stopped in describe_profile(found)["notes"]


def test_a_stop_before_there_is_enough_for_a_model_leaves_nothing(
    tower: VisionEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_at(2, monkeypatch, "replay")
    with pytest.raises(KeyboardInterrupt):
        calibrate(tower, max_tokens=300, model=MODEL, budgets=(64, 128), slots=(2,), holdout_calls=5, **NO_HURRY)


@pytest.mark.slow
def test_a_time_that_is_up_leaves_what_a_model_needs(tower: VisionEncoder) -> None:
    budgets = (64, 80, 100, 128, 160, 200, 256)
    found = calibrate(tower, max_tokens=300, model=MODEL, budgets=budgets, slots=(2,), time_limit_s=1e-9)
    assert len({point.token_budget for point in found.replays}) == FEWEST_BUDGETS
    assert len(found.eager) <= FEWEST_EAGER + 1
    assert any("the time was up" in note for note in found.notes)
    assert CostModel(found).launch_ms > 0
