"""Budgets and limits: the upstream cases first, then what must be refused before any device is touched."""

from __future__ import annotations

import pytest

from vitgraph.errors import BudgetError
from vitgraph.planning.budgets import (
    CaptureAxis,
    generate_budgets,
    plan_budgets,
    resolve_budget_settings,
    segment_slot_tiers,
    select_budget,
    validate_budgets,
)


@pytest.mark.parametrize(
    ("low", "high", "budgets"),
    [
        (64, 1024, [64, 128, 256, 512, 1024]),
        (64, 800, [64, 128, 256, 512, 800]),
        (64, 64, [64]),
        (64, 8192, [64, 128, 256, 512, 1024, 2048, 4096, 8192]),
        (49, 4096, [49, 98, 196, 392, 784, 1568, 3136, 4096]),
        (64, 4096, [64, 128, 256, 512, 1024, 2048, 4096]),
    ],
)
def test_budgets_double_from_the_minimum_and_end_with_the_maximum(low: int, high: int, budgets: list[int]) -> None:
    assert generate_budgets(low, high) == budgets


@pytest.mark.parametrize(("low", "high", "named"), [(200, 100, "100"), (0, 128, "0"), (-1, 64, "-1")])
def test_impossible_ranges_are_refused(low: int, high: int, named: str) -> None:
    with pytest.raises(BudgetError, match=named):
        generate_budgets(low, high)


@pytest.mark.parametrize(
    ("tokens", "budget"), [(0, 2048), (100, 2048), (2048, 2048), (2049, 4096), (4097, 8192), (9000, None)]
)
def test_the_smallest_fitting_budget_is_selected(tokens: int, budget: int | None) -> None:
    assert select_budget([2048, 4096, 8192], tokens) == budget


@pytest.mark.parametrize(("given", "named"), [([0, 128], "0"), ([-1, 64], "-1"), ([], "empty")])
def test_bad_budget_lists_are_refused(given: list[int], named: str) -> None:
    with pytest.raises(BudgetError, match=named):
        validate_budgets(given)


def test_unsorted_budgets_are_sorted_and_repeats_dropped() -> None:
    assert validate_budgets([8192, 2048, 4096, 2048]) == [2048, 4096, 8192]


def test_automatic_items_never_exceed_the_smallest_budget() -> None:
    settings = resolve_budget_settings((64, 16384))
    assert settings.token_budgets == (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    assert settings.max_items == 64


def test_more_items_than_the_smallest_budget_has_tokens_is_refused_with_both_numbers() -> None:
    with pytest.raises(BudgetError, match=r"256.*64"):
        resolve_budget_settings((64, 16384), [64], 256)


def test_one_given_setting_adjusts_the_other() -> None:
    assert resolve_budget_settings((64, 16384), [64, 128], 64).max_items == 64
    raised = resolve_budget_settings((64, 16384), [], 128)
    assert raised.token_budgets[0] == 128
    assert "128" in raised.notes[0]
    assert resolve_budget_settings((64, 16384), [32, 64]).max_items == 32


def test_an_unset_frame_limit_is_automatic_and_zero_means_image_only() -> None:
    def frames(given: int | None, limit: int = 1) -> int:
        settings = resolve_budget_settings(
            (64, 1024), [], 4, given, video_limit_per_prompt=limit, max_frames_per_video=10
        )
        return settings.max_frames

    assert (frames(None), frames(0), frames(7), frames(None, limit=0), frames(7, limit=0)) == (40, 0, 7, 0, 0)


@pytest.mark.parametrize(("items", "frames"), [(-1, None), (0, -1)])
def test_negative_limits_are_refused(items: int, frames: int | None) -> None:
    with pytest.raises(BudgetError, match="-1"):
        resolve_budget_settings((64, 1024), [], items, frames)


def test_a_fixed_size_model_gets_one_budget_and_one_item() -> None:
    settings = resolve_budget_settings((256, 256))
    assert (settings.token_budgets, settings.max_items) == ((256,), 1)


@pytest.mark.parametrize(
    ("most", "items", "tiers"),
    [(8, 8, (1, 8)), (1, 1, (1,)), (4, 8, (1, 4)), (200, 8, (1, 8, 32, 128, 200)), (64, 4, (1, 4, 16, 64))],
)
def test_slot_tiers_start_at_one_and_grow_fourfold(most: int, items: int, tiers: tuple[int, ...]) -> None:
    assert segment_slot_tiers(most, items) == tiers


def test_images_do_not_pay_for_the_frames_of_videos() -> None:
    settings = resolve_budget_settings((64, 1024), [64, 1024], 8, 500)
    plan = plan_budgets(settings)
    assert plan.select_slots("default", 1024, 1) == 1
    assert plan.select_slots("default", 1024, 5) == 8
    assert plan.select_slots("default", 1024, 300) == 500
    # A budget of 64 tokens cannot have more than 64 segments.
    assert plan.slot_tiers["default", 64][-1] == 64


def test_graphs_are_captured_largest_first_and_multiplied_by_axis_keys() -> None:
    axis = CaptureAxis("patch_grid", ((32, 32), (70, 70)))
    plan = plan_budgets(resolve_budget_settings((64, 128), [], 1), axes=(axis,))
    keys = plan.graph_keys()
    assert len(keys) == 2 * 2
    assert [key.token_budget for key in keys] == [128, 128, 64, 64]
    assert keys[0].axis_key == (70, 70)


def test_an_axis_takes_the_cheapest_key_that_covers_every_item() -> None:
    axis = CaptureAxis("patch_grid", ((32, 32), (32, 64), (64, 32), (70, 70)))
    assert axis.covering_key([(20, 30)]) == (32, 32)
    assert axis.covering_key([(20, 60), (30, 10)]) == (32, 64)
    assert axis.covering_key([(20, 60), (60, 10)]) == (70, 70)
    assert axis.covering_key([(71, 1)]) is None


def test_axes_and_paths_do_not_combine() -> None:
    with pytest.raises(BudgetError, match="cannot be combined"):
        plan_budgets(
            resolve_budget_settings((100, 1000)),
            path_minimums={"global": 272, "local": 100},
            axes=(CaptureAxis("width", ((1,),)),),
        )


def test_every_path_doubles_from_its_own_minimum_to_the_common_maximum() -> None:
    plan = plan_budgets(resolve_budget_settings((100, 13824)), path_minimums={"global": 272, "local": 100})
    assert plan.path_budgets["global"] == (272, 544, 1088, 2176, 4352, 8704, 13824)
    assert plan.path_budgets["local"] == (100, 200, 400, 800, 1600, 3200, 6400, 12800, 13824)
