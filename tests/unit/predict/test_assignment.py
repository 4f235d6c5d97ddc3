"""Who encodes what: by size as upstream's recorded decisions, by predicted cost, with fewer items than ranks."""

from __future__ import annotations

from functools import partial

import pytest
from synthetic import Machine, image, synthetic_profile, video

from vitgraph.measure.setup import resolve_source
from vitgraph.planning.accounting import count_calls
from vitgraph.planning.budgets import IMAGE, EncoderItemSpec, plan_budgets, resolve_budget_settings
from vitgraph.planning.packing import pack_items
from vitgraph.predict.assignment import (
    assignment_effect,
    imbalance_of,
    predicted_item_ms,
    predicted_rank_ms,
    share_by_cost,
    share_by_size,
)
from vitgraph.predict.cost_model import CostModel
from vitgraph.specs.parts import ModelSpec

NINE = (512, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 4864)


def sized(*sizes: int) -> list[EncoderItemSpec]:
    return [EncoderItemSpec(IMAGE, size, max(1, size // 4)) for size in sizes]


@pytest.mark.parametrize(
    ("sizes", "ranks", "shares"),
    [
        ((4, 8, 6), 2, ((1,), (0, 2))),
        ((7, 7, 7, 7, 7), 2, ((0, 2, 4), (1, 3))),
        ((1, 2, 3, 4, 5, 6), 3, ((0, 5), (1, 4), (2, 3))),
        ((9,), 4, ((0,), (), (), ())),
        ((), 3, ((), (), ())),
        ((5, 5, 5), 4, ((0,), (1,), (2,), ())),
    ],
)
def test_the_largest_goes_to_the_rank_with_the_least(
    sizes: tuple[int, ...], ranks: int, shares: tuple[tuple[int, ...], ...]
) -> None:
    assert share_by_size(sized(*sizes), ranks) == shares


@pytest.fixture(scope="module")
def model() -> CostModel:
    return CostModel(synthetic_profile())


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 40])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_item_is_in_one_share(count: int, ranks: int, model: CostModel) -> None:
    specs = [image(64 * (1 + index * 7 % 5)) if index % 3 else video(4, 64) for index in range(count)]
    for assign in (share_by_size, partial(share_by_cost, model)):
        shares = assign(specs, ranks)
        assert len(shares) == ranks
        assert sorted(index for share in shares for index in share) == list(range(count))
        assert all(list(share) == sorted(share) for share in shares)


def test_attention_makes_one_large_image_dearer_than_a_long_video_of_equal_size() -> None:
    """The pixel rows are the same; only the cost model knows that the frames of a video do not see each other."""
    model = CostModel(synthetic_profile(Machine(per_pair=4e-5)))
    large, long = image(4096), video(64, 64)
    assert large.input_size == long.input_size
    costs = predicted_item_ms(model, [large, long], 2)
    assert costs[0] > 1.5 * costs[1]


def test_cost_moves_what_size_would_balance_wrongly() -> None:
    model = CostModel(synthetic_profile(Machine(per_pair=4e-5)))
    call = [image(4096), video(64, 64), image(1024), image(1024)]
    by_size, by_cost = share_by_size(call, 2), share_by_cost(model, call, 2)
    assert by_size == ((0, 2), (1, 3))
    assert by_cost == ((0,), (1, 2, 3))
    slowest = [max(predicted_rank_ms(model, call, shares)) for shares in (by_size, by_cost)]
    assert slowest[1] < slowest[0]
    effect = assignment_effect([call, [image(256)] * 4], 2, model)
    assert effect is not None
    assert (effect["calls"], effect["changed_calls"]) == (2, 1)
    for figure in ("predicted_slowest_ms", "predicted_imbalance"):
        assert effect[figure]["cost"] < effect[figure]["size"]


def test_equal_items_cost_the_same_and_are_shared_as_by_size(model: CostModel) -> None:
    call = [image(100)] * 20
    assert len(set(predicted_item_ms(model, call, 4))) == 1
    assert share_by_cost(model, call, 4) == share_by_size(call, 4)


def test_the_prices_of_even_shares_add_up_to_a_rank() -> None:
    """A price that left out what a launch costs, or counted it once an item, would not."""
    model = CostModel(synthetic_profile())
    call = [image(256)] * 16
    prices = predicted_item_ms(model, call, 4)
    of_rank = predicted_rank_ms(model, call, share_by_size(call, 4))
    assert sum(prices[:4]) == pytest.approx(of_rank[0], rel=1e-6)


def test_imbalance() -> None:
    assert imbalance_of([2.0, 2.0]) == 1.0
    assert imbalance_of([3.0, 1.0]) == 1.5
    assert imbalance_of([4.0, 0.0, 0.0, 0.0]) == 4.0
    assert imbalance_of([0.0, 0.0]) == 1.0


def test_the_published_call_takes_one_replay_a_rank_on_four() -> None:
    """20 images of 336x336, 100 tokens each: three replays on one rank; on four one each, 500 of its 512 rows used."""
    rule = resolve_source(ModelSpec("Qwen/Qwen3-VL-32B-Instruct")).rule()
    specs = [rule.item_spec(rule.geometry(336, 336))] * 20
    plan = plan_budgets(resolve_budget_settings((64, 4864), NINE, 8, None))
    alone = count_calls([pack_items(specs, plan)])
    assert sorted((key.token_budget, use.replays) for key, use in alone.use.items()) == [(512, 1), (1024, 2)]
    assert (alone.hits, alone.misses) == (20, 0)
    shares = share_by_size(specs, 4)
    assert [len(share) for share in shares] == [5, 5, 5, 5]
    for share in shares:
        of_rank = count_calls([pack_items([specs[index] for index in share], plan)])
        assert [(key.token_budget, use.replays, use.tokens) for key, use in of_rank.use.items()] == [(512, 1, 500)]
        assert (of_rank.hits, of_rank.misses) == (5, 0)
        assert of_rank.waste == pytest.approx(12 / 512)


def test_a_rank_without_items_has_no_hits() -> None:
    plan = plan_budgets(resolve_budget_settings((64, 4864), NINE, 8, None))
    specs = sized(400)
    counted = [
        count_calls([pack_items([specs[i] for i in share], plan)] if share else []) for share in share_by_size(specs, 4)
    ]
    assert [(counters.hits, counters.items) for counters in counted] == [(1, 1), (0, 0), (0, 0), (0, 0)]
