"""Qwen2.5-VL against transformers: windows and their bound, sizes, values, padding, loading."""

from itertools import product
from pathlib import Path

import grid_checks as checks
import numpy as np
import pytest
import torch

from vitgraph.models.families.qwen2_vl import most_windows, window_order
from vitgraph.models.geometry import GridGeometry
from vitgraph.models.registry import resolve_model
from vitgraph.planning.budgets import IMAGE, VIDEO, GraphKey

DEBUG = "qwen2.5-vl-debug"


def test_windows_are_those_of_transformers() -> None:
    from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

    encoder = checks.build(DEBUG)
    grids = [*checks.MIXED, GridGeometry(IMAGE, 1, 92, 52), GridGeometry(VIDEO, 3, 8, 10)]
    metadata = encoder.compute_metadata(grids)
    grid_thw = torch.tensor([[grid.t, grid.h, grid.w] for grid in grids])
    index, offsets = get_vision_window_index(grid_thw, 2, 112, 14)
    assert metadata["window_index"].tolist() == index.tolist()
    assert metadata["inverse_index"].tolist() == torch.argsort(index).tolist()
    assert metadata["cu_window_seqlens"].tolist() == offsets.tolist()
    positions = get_vision_position_ids(grid_thw, 2).view(-1, 4, 2)[index].view(-1, 2)
    assert np.array_equal(metadata["position_ids"], positions.numpy())


def test_window_counts_and_slots_of_known_grids() -> None:
    assert len(window_order(46, 26, 4)[1]) == 84
    assert len(window_order(2048, 1, 4)[1]) == 512
    assert most_windows(2048, 8, 4) == 518
    assert most_windows(2048, 1, 4) == 512
    encoder = checks.build(DEBUG)
    fields = encoder.metadata_fields(GraphKey("default", 2048, 8))
    assert fields["cu_window_seqlens"].shape == (519,)


@pytest.mark.parametrize("side", [2, 4])
def test_the_window_bound_is_reached_and_never_passed(side: int) -> None:
    """Every way to cut a few tokens into frames of every shape, by exhaustion."""
    limit = 18
    single = [0] * (limit + 1)
    for rows, cols in product(range(1, limit + 1), repeat=2):
        if rows * cols <= limit:
            single[rows * cols] = max(single[rows * cols], len(window_order(rows, cols, side)[1]))
    most = [[0] * (limit + 1) for _ in range(limit + 1)]
    for segments in range(1, limit + 1):
        for tokens in range(1, limit + 1):
            most[segments][tokens] = max(
                most[segments - 1][tokens - last] + single[last] for last in range(1, tokens + 1)
            )
            reachable = max(most[used][have] for used in range(segments + 1) for have in range(tokens + 1))
            assert most_windows(tokens, segments, side) == reachable, (tokens, segments)


def test_frozen_lengths_bound_every_window_and_segment() -> None:
    encoder = checks.build(DEBUG)
    scalars = encoder.capture_scalars(GraphKey("default", 64, 4))
    assert scalars == {"max_seqlen": 256, "max_window_seqlen": 64}
    assert encoder.capture_scalars(GraphKey("default", 4, 1)) == {"max_seqlen": 16, "max_window_seqlen": 16}
    metadata = encoder.compute_metadata([GridGeometry(IMAGE, 1, 16, 16)])
    assert encoder.compute_scalars(metadata) == {"max_seqlen": 256, "max_window_seqlen": 64}


def test_sizes_are_those_of_qwen2_vl() -> None:
    rule, older = checks.rule_of("qwen2.5-vl-7b"), checks.rule_of("qwen2-vl-7b")
    for (width, height), frames in product(checks.SIZES, (1, 2, 31)):
        assert rule.geometry(width, height, frames) == older.geometry(width, height, frames)
    assert rule.item_spec(rule.geometry(1280, 720)).output_tokens == 1196
    assert rule.output_width == 3584


def test_image_patches_are_the_processors() -> None:
    rule = checks.rule_of("qwen2.5-vl-7b")
    processor = checks.image_processor("qwen2.5-vl-7b", rule.processor["size"])
    for width, height in checks.SIZES:
        patches = processor.get_number_of_image_patches(height, width, {})
        assert rule.item_spec(rule.geometry(width, height)).input_size == patches, (width, height)


def test_refusals_name_value_and_rule() -> None:
    checks.check_refusals(checks.rule_of(DEBUG))


def test_row_counts_from_sizes() -> None:
    rule = checks.rule_of(DEBUG, size={"shortest_edge": 3136, "longest_edge": 28 * 28 * 40})
    items = [rule.geometry(width, height) for width, height in checks.SIZES]
    checks.check_eager_equals_stock(checks.build(DEBUG), items)


def test_real_images(monkeypatch: pytest.MonkeyPatch) -> None:
    checks.check_preprocess(DEBUG, monkeypatch)


@pytest.mark.parametrize("prefix", ["visual.", "model.visual."])
def test_published_checkpoint_loads(tmp_path: Path, prefix: str) -> None:
    vision_config = dict(resolve_model(DEBUG).vision_config)
    vision_config.pop("in_channels")
    vision_config.update({"in_chans": 3, "spatial_patch_size": 14, "model_type": "qwen2_5_vl"})
    preprocessor = {"min_pixels": 3136, "max_pixels": 401408, "image_processor_type": "Qwen2VLImageProcessor"}
    state = checks.write_checkpoint(tmp_path, DEBUG, prefix, vision_config, preprocessor)
    source, encoder = checks.load_folder(tmp_path)
    checks.check_loaded(encoder, state)
    assert source.processor["size"] == {"shortest_edge": 3136, "longest_edge": 401408}
    assert source.vision_config["fullatt_block_indexes"] == [1, 3]
