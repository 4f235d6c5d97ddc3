"""What only a GPU can show: captured replays equal eager, poisoned memory leaks nowhere, memory returns."""

from __future__ import annotations

import pytest
import torch

from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.measure.correctness import relative_l2
from vitgraph.measure.setup import load, resolve_source
from vitgraph.models.encoder import VisionEncoder
from vitgraph.planning.budgets import plan_budgets, resolve_budget_settings
from vitgraph.specs.parts import ModelSpec
from vitgraph.verify.drills import poison_memory, pool_segments

pytestmark = pytest.mark.requires_cuda

TOLERANCE = 2e-2


def make_encoder(preset: str, backend: str = "FLASH_ATTN") -> VisionEncoder:
    spec = ModelSpec(preset, load_format="dummy", attn_backend=backend)
    device = torch.device("cuda", 0)
    encoder, _ = load(resolve_source(spec), spec, device=device, dtype=torch.bfloat16)
    return encoder


@pytest.fixture(scope="module", params=["qwen3-vl-debug", "qwen2.5-vl-debug"])
def encoder(request: pytest.FixtureRequest) -> VisionEncoder:
    return make_encoder(request.param)


def make_manager(encoder: VisionEncoder, budgets: list[int], items: int, frames: int = 0) -> EncoderCudaGraphManager:
    settings = resolve_budget_settings((1, max(budgets)), budgets, items, frames)
    manager = EncoderCudaGraphManager(encoder, plan_budgets(settings))
    manager.capture()
    return manager


def execute(
    encoder: VisionEncoder, manager: EncoderCudaGraphManager, sizes: list[tuple[int, ...]], seed: int = 0
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Items of a graph call, and the eager rows of the same call."""
    items = [encoder.rule.geometry(*size) for size in sizes]
    rows: dict[str, int] = {}
    for item in items:
        for name, count in encoder.rule.pixel_rows(item).items():
            rows[name] = rows.get(name, 0) + count
    mm_kwargs = encoder.make_inputs(items, encoder.random_pixels(rows, seed))
    with torch.inference_mode():
        return manager.execute(mm_kwargs), encoder.encoder_eager_forward(mm_kwargs)


def test_small_large_small_through_all_budgets_in_a_poisoned_pool(encoder: VisionEncoder) -> None:
    manager = make_manager(encoder, [64, 128, 256, 512, 1024, 2048, 4096], 8)
    poison_memory(pool_segments(manager.graphs.values(), encoder.device), encoder.device)
    first, _ = execute(encoder, manager, [(224, 224)], seed=1)
    for size in [(672, 672), (1280, 720), (896, 896), (1120, 1120), (1500, 1500)]:
        poison_memory(pool_segments(manager.graphs.values(), encoder.device), encoder.device)
        replayed, eager = execute(encoder, manager, [size])
        assert torch.isfinite(replayed[0]).all(), size
        assert relative_l2(torch.cat(replayed), eager) <= TOLERANCE
        again, _ = execute(encoder, manager, [(224, 224)], seed=1)
        assert torch.equal(again[0], first[0])
    manager.clear()


def test_images_and_videos_mixed_come_back_in_order(encoder: VisionEncoder) -> None:
    manager = make_manager(encoder, [64, 256, 1024], 8, 64)
    sizes: list[tuple[int, ...]] = [(640, 480), (160, 120, 12), (300, 200), (64, 64, 4), (3000, 3000), (90, 500)]
    replayed, eager = execute(encoder, manager, sizes)
    assert relative_l2(torch.cat(replayed), eager) <= TOLERANCE
    counts = [encoder.rule.item_spec(encoder.rule.geometry(*size)).output_tokens for size in sizes]
    assert [len(item) for item in replayed] == counts
    manager.clear()


def test_memory_returns_after_clear_and_capturing_again_works(encoder: VisionEncoder) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    manager = make_manager(encoder, [64, 1024], 8)
    assert manager.pool_bytes > 0
    manager.clear()
    assert manager.graphs == {}
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before <= 32 << 20
    manager.capture()
    execute(encoder, manager, [(224, 224)])
    manager.clear()


def test_graphs_outlive_another_managers_clear(encoder: VisionEncoder) -> None:
    manager = make_manager(encoder, [64, 1024], 8)
    other = make_manager(make_encoder("qwen3-vl-debug", "TRITON_ATTN"), [64, 1024], 8)
    before, _ = execute(encoder, manager, [(224, 224)])
    other.clear()
    # Whatever the clear gave back that a graph still uses is now a NaN, or somebody else's.
    free = torch.cuda.memory_reserved() + (512 << 20)
    taken = torch.full((free // 4,), float("nan"), device=encoder.device)
    after, eager = execute(encoder, manager, [(224, 224)])
    assert torch.equal(after[0], before[0])
    assert relative_l2(after[0], eager) <= TOLERANCE
    assert torch.isnan(taken).all()
    manager.clear()


def test_a_dense_list_costs_no_memory_beyond_its_largest_budget(encoder: VisionEncoder) -> None:
    one = make_manager(encoder, [1024], 8)
    one_bytes = one.pool_bytes + one.buffer_bytes
    one.clear()
    many = make_manager(encoder, list(range(64, 1025, 64)), 8)
    assert many.pool_bytes + many.buffer_bytes <= 1.3 * one_bytes + (64 << 20)
    many.clear()
