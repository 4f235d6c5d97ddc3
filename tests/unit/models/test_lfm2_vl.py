"""LFM2-VL against transformers: parts of an image, values, padding, operations, loading."""

from pathlib import Path
from typing import Any

import encoder_checks as checks
import pytest
import torch

from vitgraph.errors import InputError
from vitgraph.models.encoder import VisionEncoder
from vitgraph.models.families.minicpmv_slices import SliceGeometry
from vitgraph.models.geometry import GridGeometry
from vitgraph.models.processor_classes import transformers_class
from vitgraph.planning.budgets import IMAGE, GraphKey

ITEMS = [
    SliceGeometry(IMAGE, ((4, 6),)),
    SliceGeometry(IMAGE, ((8, 8), (8, 8), (10, 4))),
    SliceGeometry(IMAGE, ((2, 20),)),
]


@pytest.fixture(scope="module")
def encoder() -> VisionEncoder:
    return checks.build(checks.preset_source("lfm2-vl-debug"))


@pytest.mark.parametrize("changes", [{}, {"use_thumbnail": False, "max_tiles": 6}, {"do_image_splitting": False}])
def test_parts_are_those_of_the_processor(changes: dict[str, Any]) -> None:
    rule = checks.preset_source("lfm2-vl-450m", processor=changes).rule()
    settings = rule.processor
    processor = transformers_class("lfm2_vl.image_processing_lfm2_vl:Lfm2VlImageProcessor")(**changes)
    tokens = {name: settings[name] for name in ("min_image_tokens", "max_image_tokens")}
    patches = {"encoder_patch_size": 16, "downsample_factor": 2}
    for width, height in (*checks.SIZES, *checks.random_sizes(300, 4000)):
        new_width, new_height = processor.smart_resize(height, width, **tokens, **patches)
        is_large = processor._is_image_too_large(
            height, width, max_image_tokens=256, max_pixels_tolerance=2.0, **patches
        )
        grids = [(new_height // 16, new_width // 16)]
        if is_large and settings["do_image_splitting"]:
            columns, rows, *_ = processor._get_grid_layout(height, width, 2, settings["max_tiles"], 512)
            grids = [(32, 32)] * (columns * rows) + (grids if settings["use_thumbnail"] else [])
        assert rule.image_geometry(width, height) == SliceGeometry(IMAGE, tuple(grids)), (width, height)
        spec = rule.item_spec(rule.image_geometry(width, height))
        assert spec.output_tokens >= spec.segments * rule.graph_config().min_tokens_per_segment
        assert spec.segments <= rule.graph_config().max_frames_per_video


def test_other_geometries_are_refused() -> None:
    rule = checks.preset_source("lfm2-vl-debug").rule()
    with pytest.raises(InputError, match="at least one part"):
        rule.item_spec(GridGeometry(IMAGE, 1, 4, 4))
    with pytest.raises(InputError, match=r"\[1, 3, 4\].*merge 2"):
        rule.item_spec(SliceGeometry(IMAGE, ((3, 4),)))


def test_a_strip_whose_whole_view_is_above_the_processors_padding_is_refused(encoder: VisionEncoder) -> None:
    with pytest.raises(InputError, match="5000x1 is cut, and whole it has 1600 patches, above the 128"):
        encoder.rule.geometry(5000, 1)


def test_eager_equals_stock(encoder: VisionEncoder) -> None:
    checks.assert_eager_equals_stock(encoder, ITEMS)


def test_padding_and_graphs_equal_eager(encoder: VisionEncoder) -> None:
    checks.assert_padded_equals_eager(encoder, ITEMS, GraphKey("default", 80, 8))
    checks.assert_manager_equals_eager(encoder, ITEMS, [8, 48, 80], max_items=3)


def test_operations_are_counted(encoder: VisionEncoder) -> None:
    checks.assert_flops_are_counted(encoder, ITEMS)


def test_published_checkpoint_loads(tmp_path: Path, encoder: VisionEncoder) -> None:
    source = checks.preset_source("lfm2-vl-debug")
    state = checks.stock_state(encoder)
    names = {name: "model." + name.replace("visual.", "vision_tower.vision_model.", 1) for name in state}
    published = {names[name].replace("projector.", "multi_modal_projector."): state[name] for name in state}
    checks.write_checkpoint(tmp_path, {"architectures": ["Lfm2VlForConditionalGeneration"]}, published)
    checks.assert_same_weights(checks.load_folder(tmp_path, source), encoder)
    config = {"vision_config": dict(source.vision_config), "text_config": {"hidden_size": 64}, **source.extra}
    assert source.row.encoder_class().read_model_config(config) == (dict(source.vision_config), dict(source.extra))


@torch.inference_mode()
def test_a_table_of_the_patches_own_size_is_taken_as_it_is(encoder: VisionEncoder) -> None:
    weights = encoder.compute_metadata([SliceGeometry(IMAGE, ((8, 8),))])
    assert ((weights["row_weights"] == 1).sum(1) == 1).all()
