"""The search against trying everything, and on machines whose right answer is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from synthetic import Machine, image, synthetic_profile, video

from vitgraph.errors import UsageError
from vitgraph.planning.budgets import BudgetSettings, EncoderItemSpec
from vitgraph.predict.cost_model import CostModel
from vitgraph.predict.targets import TARGETS, VITGRAPH, VLLM, TargetCost, make_plan
from vitgraph.predict.workload_cost import Traffic, eager_calls, predict_calls
from vitgraph.tuning.budget_lists import MOST_GRAPHS
from vitgraph.tuning.explain import break_even_tokens
from vitgraph.tuning.objective import Limits, Objective
from vitgraph.tuning.search import Search, SearchResult

Call = tuple[EncoderItemSpec, ...]
FAST_LAUNCH = CostModel(synthetic_profile(Machine(launch=6.0)))


def search_of(
    calls: Sequence[Call],
    *,
    model: CostModel = FAST_LAUNCH,
    target: str = VITGRAPH,
    objective: str = "mean",
    limits: Limits | None = None,
    parsimony: float = 0.0,
) -> Search:
    return Search(
        Traffic(calls),
        TargetCost(model, TARGETS[target]),
        model.profile.encoder,
        Objective.parse(objective),
        limits or Limits(),
        16384,
        parsimony=parsimony,
    )


def best_score(result: SearchResult) -> float:
    assert result.best is not None
    return result.best.score


def random_calls(seed: int, most_items: int, sizes: int) -> list[Call]:
    rng = np.random.default_rng(seed)
    known = rng.integers(64, 900, size=sizes)
    counts = rng.integers(1, most_items + 1, size=8)
    return [tuple(image(int(tokens)) for tokens in rng.choice(known, size=count)) for count in counts]


@pytest.mark.parametrize("target", [VITGRAPH, VLLM])
@pytest.mark.parametrize("objective", ["mean", "mean=0.5,p99=0.5"])
@pytest.mark.parametrize(
    ("most_items", "sizes"), [(2, 3), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 6), (3, 2)))]
)
def test_guided_search_equals_trying_everything(most_items: int, sizes: int, objective: str, target: str) -> None:
    calls = random_calls(0, most_items, sizes)
    guided = search_of(calls, target=target, objective=objective).guided()
    search = search_of(calls, target=target, objective=objective)
    exhaustive = search.exhaustive(search.all_candidates(6))
    assert best_score(guided) <= best_score(exhaustive) * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "limits",
    [
        Limits(max_graphs=1),
        Limits(max_graphs=4),
        Limits(max_memory_bytes=30e6),
        Limits(max_capture_s=0.2),
        Limits(max_graphs=5, max_memory_bytes=40e6, max_capture_s=0.3),
    ],
)
@pytest.mark.parametrize(("target", "most_items"), [(VITGRAPH, 2), pytest.param(VLLM, 1, marks=pytest.mark.slow)])
def test_limits_are_respected_and_used(limits: Limits, target: str, most_items: int) -> None:
    calls = random_calls(5, most_items, 5 if most_items == 1 else 3)
    guided = search_of(calls, target=target, limits=limits).guided()
    best = guided.best
    assert best is not None
    assert limits.allow(best.graphs, best.memory_bytes, best.capture_s)
    search = search_of(calls, target=target, limits=limits)
    assert best.score <= best_score(search.exhaustive(search.all_candidates(7))) * (1 + 1e-9)


def test_impossible_limits_find_nothing() -> None:
    assert search_of([(image(64),)], limits=Limits(max_memory_bytes=1.0)).run().best is None


def test_small_spaces_are_tried_in_full() -> None:
    assert search_of([(image(64),), (image(880),)]).run().is_exhaustive


def test_padding_far_beyond_the_input_goes_eager() -> None:
    """64 tokens in a graph of 4,096 are many times slower than eager; nothing that pads so may win."""
    machine = Machine(launch=6.0)
    search = search_of([(image(64),)] * 50 + [(image(4096),)], model=CostModel(synthetic_profile(machine)))
    padded = search.evaluate(BudgetSettings((4096,), 1, 0, "greedy"))
    best = search.run().best
    assert padded is not None and best is not None
    assert padded.latency.mean_ms > 6 * float(search.eager_ms.mean())
    assert 64 in best.settings.token_budgets
    assert best.score < 0.6


def test_break_even_fill_is_found() -> None:
    """176 tokens fill 69 % of 256; 64 fill 1.6 % of 4,096, where eager is faster up to its own device time."""
    cost = TargetCost(CostModel(synthetic_profile(Machine(launch=6.0))), TARGETS[VITGRAPH])
    assert break_even_tokens(cost, "default", 256, 1) == 1
    far = break_even_tokens(cost, "default", 4096, 1)
    assert far is None or far > 3800


CHUNKS = (1, 3, 5, 9, 17)
EAGER_MS = dict(zip(CHUNKS, (5.35, 11.00, 17.03, 29.45, 53.96), strict=True))


def test_compute_bound_encoder_gets_its_exact_sizes_or_eager() -> None:
    """Doubling hits everything and is up to 85 % slower; the measured figures are those of an audio encoder."""
    machine = Machine(launch=5.3, padded=lambda budget: 1.2 + 3.1 * budget / 100, per_pair=0.0, call=0.01)
    machine = replace(machine, replay_overhead=0.0)
    budgets = (100, 200, 300, 400, 500, 800, 900, 1600, 1700, 3200)
    model = CostModel(synthetic_profile(machine, budgets=budgets))
    for chunks, measured in EAGER_MS.items():
        assert machine.eager([image(100 * chunks)]) == pytest.approx(measured, rel=0.08)
    search = search_of([(image(100 * chunks),) for chunks in CHUNKS], model=model)
    doubling = search.evaluate(BudgetSettings((100, 200, 400, 800, 1600, 3200), 1, 0, "greedy"))
    result = search.run()
    assert doubling is not None and result.best is not None
    assert doubling.score > 1.5
    assert result.best.score < 1.0
    plan = make_plan(search.target, search.facts, result.best.settings)
    times = predict_calls(search.traffic, search.cost, plan, result.best.settings.packing)
    eager = eager_calls(search.traffic, search.cost, plan)
    assert (times <= eager * 1.005).all()
    assert set(result.best.settings.token_budgets) <= {100 * chunks for chunks in CHUNKS}


def test_tuned_calls_with_several_images_do_not_lose() -> None:
    """Packed optimally, a call is at most the manager's own time slower than eager, whatever its sizes."""
    rng = np.random.default_rng(2)
    calls = [tuple(image(int(t)) for t in rng.integers(64, 3000, size=4)) for _ in range(60)]
    search = search_of(calls)
    best = search.run().best
    assert best is not None
    plan = make_plan(search.target, search.facts, best.settings)
    times = predict_calls(search.traffic, search.cost, plan, best.settings.packing)
    eager = eager_calls(search.traffic, search.cost, plan)
    assert (times - eager).max() < 0.3


def test_single_images_do_not_pay_for_slots() -> None:
    """With one item a call, one item a replay: vLLM's graphs have as many slots as items."""
    best = search_of(random_calls(0, 1, 6), target=VLLM).guided().best
    assert best is not None
    assert best.settings.max_items == 1


def test_frames_are_chosen_for_videos() -> None:
    calls = [(video(frames, 20),) for frames in (4, 8, 16) for _ in range(3)]
    best = search_of(calls, model=CostModel(synthetic_profile(Machine(launch=40.0)))).run().best
    assert best is not None
    assert best.settings.max_frames == 16
    assert best.score < 0.5


def test_fewer_graphs_are_preferred_where_they_lose_next_to_nothing() -> None:
    calls = [(image(tokens),) for tokens in range(300, 340)]
    least, frugal = (search_of(calls, parsimony=share).guided().best for share in (0.0, 0.002))
    assert least is not None and frugal is not None
    assert frugal.graphs < least.graphs
    assert frugal.score <= least.score * 1.002


def test_a_dense_list_of_many_slot_counts_is_not_captured_for_minutes() -> None:
    """Each budget has a graph for every number of slots; more of them would be a little faster."""
    rng = np.random.default_rng(1)
    calls = [tuple(video(4, int(t)) for t in rng.integers(16, 200, size=2)) for _ in range(60)]
    best = search_of(calls, model=CostModel(synthetic_profile())).guided().best
    assert best is not None
    assert best.graphs > 2 * len(best.settings.token_budgets)
    assert best.graphs <= MOST_GRAPHS


def test_more_graphs_are_searched_where_a_limit_allows_them() -> None:
    rng = np.random.default_rng(1)
    calls = [tuple(video(4, int(t)) for t in rng.integers(16, 200, size=2)) for _ in range(60)]
    search = search_of(calls, model=CostModel(synthetic_profile()), limits=Limits(max_graphs=1000))
    best = search.guided().best
    assert best is not None
    assert best.graphs > MOST_GRAPHS


def test_list_denser_than_the_traffic_needs_is_pruned() -> None:
    rng = np.random.default_rng(4)
    calls = [tuple(image(int(t)) for t in rng.integers(64, 400, size=3)) for _ in range(40)]
    search = search_of(calls, model=CostModel(synthetic_profile()), parsimony=0.002)
    best = search.run().best
    assert best is not None
    assert best.score < 0.7
    groups = search._groups(best.settings)
    assert groups is not None
    used = np.searchsorted(best.settings.token_budgets, groups.tokens)
    assert set(used.tolist()) == set(range(len(best.settings.token_budgets)))


def test_calls_beyond_what_a_call_may_hold_are_refused() -> None:
    with pytest.raises(UsageError, match="smallest item of the workload has 900"):
        Search(
            Traffic([(image(900),)]),
            TargetCost(FAST_LAUNCH, TARGETS[VITGRAPH]),
            FAST_LAUNCH.profile.encoder,
            Objective(),
            Limits(),
            512,
        )


@pytest.mark.parametrize(
    ("text", "weights"),
    [("mean", {"mean": 1.0}), ("p99", {"p99": 1.0}), ("mean=3,p99=1", {"mean": 0.75, "p99": 0.25})],
)
def test_objective_is_read_and_normalised(text: str, weights: dict[str, float]) -> None:
    assert Objective.parse(text).weights == weights


@pytest.mark.parametrize("text", ["median", "mean=x", "mean=-1", "mean=0", "", "p99=inf"])
def test_bad_objective_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--objective"):
        Objective.parse(text)


def test_objective_weighs_mean_and_tail_against_eager() -> None:
    eager, graph = np.full(100, 10.0), np.concatenate([np.full(90, 5.0), np.full(10, 20.0)])
    assert Objective.parse("mean").score(graph, eager) == pytest.approx(0.65)
    assert Objective.parse("mean=0.5,p99=0.5").score(graph, eager) == pytest.approx(0.5 * 0.65 + 0.5 * 2.0)
    assert Objective.parse("p99").score(graph, eager) == pytest.approx(0.95 * 2.0 + 0.05 * 0.65)
