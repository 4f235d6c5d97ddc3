"""Outputs on 3 and 4 ranks against those of one process: images, videos, two paths, capture axes, empty ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from rank_processes import run_ranks, values

from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.measure.correctness import relative_l2
from vitgraph.measure.setup import load, plan_graphs, resolve_source
from vitgraph.models.base import EncoderInputs
from vitgraph.models.encoder import VisionEncoder
from vitgraph.models.two_path import MonolithicEncoder
from vitgraph.planning.accounting import count_calls
from vitgraph.predict.assignment import share_by_size
from vitgraph.ranks.group import ParallelGroup
from vitgraph.ranks.sharing import CallSharing
from vitgraph.specs.parts import GraphSpec, ModelSpec
from vitgraph.verify.probes import encode_eagerly

TOLERANCE = 1e-5
RANKS = (3, 4)
COUNTS = (0, 1, 3, 20)
Size = tuple[int, int, int]
IMAGES: tuple[Size, ...] = ((96, 64, 1), (64, 64, 1), (160, 96, 1), (64, 128, 1), (224, 160, 1))
MIXED: tuple[Size, ...] = (*IMAGES[:2], (64, 64, 4), IMAGES[2], (96, 64, 2))
CASES: dict[str, tuple[str, tuple[Size, ...], tuple[int, ...]]] = {
    "images": ("qwen3-vl-debug", IMAGES, (8, 16)),
    "images and videos": ("qwen3-vl-debug", MIXED, (8, 14)),
    "two paths as one": ("deepseek-ocr-debug", ((64, 64, 1), (900, 300, 1), (300, 900, 1)), (128,)),
    "two paths": ("deepseek-ocr-debug", ((64, 64, 1), (900, 300, 1), (300, 900, 1), (1000, 640, 1)), (20,)),
    "capture axis, slices": ("minicpm-v-2.6-debug", ((64, 64, 1), (200, 120, 1), (120, 300, 1)), (8, 14)),
    "capture axis, frames": ("ernie4.5-vl-debug", MIXED, (8, 14)),
}
"""Preset, sizes that the items take in turn, and budgets. Some items are above every budget and run eagerly."""


def encoder_for(case: str) -> VisionEncoder:
    encoder = encoder_of(CASES[case][0])
    return MonolithicEncoder(encoder, max_crops=3) if case == "two paths as one" else encoder


@cache
def encoder_of(preset: str) -> VisionEncoder:
    spec = ModelSpec(preset, load_format="dummy", device="cpu")
    processor = {"min_pixels": 1024} if preset.startswith("qwen") else {}
    source = resolve_source(ModelSpec(preset, load_format="dummy", device="cpu", mm_processor_kwargs=processor))
    encoder, _ = load(source, spec, device=torch.device("cpu"), dtype=torch.float32)
    return encoder


@cache
def manager_of(case: str) -> EncoderCudaGraphManager:
    _, sizes, budgets = CASES[case]
    encoder = encoder_for(case)
    specs = [encoder.rule.item_spec(encoder.rule.geometry(*size)) for size in sizes]
    manager = EncoderCudaGraphManager(encoder, plan_graphs(encoder.rule, GraphSpec(budgets, 4), specs))
    manager.capture()
    return manager


def call_of(case: str, count: int) -> EncoderInputs:
    _, sizes, _ = CASES[case]
    encoder = encoder_for(case)
    items = [encoder.rule.geometry(*sizes[index % len(sizes)]) for index in range(count)]
    rows: dict[str, int] = {}
    for item in items:
        for name, more in encoder.rule.pixel_rows(item).items():
            rows[name] = rows.get(name, 0) + more
    return encoder.make_inputs(items, encoder.random_pixels(rows, seed=count) if rows else {})


Outputs = list[torch.Tensor]


@cache
@torch.inference_mode()
def alone(case: str, count: int) -> Outputs:
    return encode_eagerly(encoder_for(case), call_of(case, count)) if count else []


def assert_same(found: Outputs, expected: Outputs) -> None:
    assert [tuple(item.shape) for item in found] == [tuple(item.shape) for item in expected]
    for item, reference in zip(found, expected, strict=True):
        assert relative_l2(item, reference) <= TOLERANCE


def on_ranks(ranks: int, work: Callable[[ParallelGroup], Any]) -> list[Any]:
    for case in CASES:
        manager_of(case)
    return values(run_ranks(ranks, work))


@pytest.fixture(scope="module", params=RANKS)
def outputs(request: pytest.FixtureRequest) -> list[dict[tuple[str, str, int], Outputs]]:
    """By rank: what every case gives in graph and in eager mode, for every number of items."""

    def encode_all(group: ParallelGroup) -> dict[tuple[str, str, int], Outputs]:
        found = {}
        for case in CASES:
            encoder, manager = encoder_for(case), manager_of(case)
            ways = {"graph": manager.execute, "eager": lambda call, encoder=encoder: encode_eagerly(encoder, call)}
            for mode, encode in ways.items():
                sharing = CallSharing(group, encoder, share_by_size)
                for count in COUNTS:
                    found[case, mode, count] = [rows.clone() for rows in sharing.encode(encode, call_of(case, count))]
        return found

    return on_ranks(request.param, encode_all)


@pytest.mark.slow
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("case", CASES)
def test_every_rank_gets_what_one_process_gets(
    case: str, count: int, outputs: list[dict[tuple[str, str, int], Outputs]]
) -> None:
    expected = alone(case, count)
    assert len(expected) == count
    for of_rank in outputs:
        for mode in ("graph", "eager"):
            assert_same(of_rank[case, mode, count], expected)


@pytest.mark.parametrize("case", CASES)
def test_the_cases_replay_some_items_and_run_others_eagerly(case: str) -> None:
    counters = count_calls([manager_of(case).plan_call(call_of(case, 20)).batches])
    assert counters.hits > 0
    assert counters.misses > 0 or case == "two paths as one"
    assert len({key.axis_key for key in counters.use}) == (2 if case.startswith("capture axis") else 1)
    assert len({key.path for key in counters.use}) == (2 if case == "two paths" else 1)
