"""DeepSeek-VL2: tiles, the published unfolding, final rows, padding, loading and operations."""

from pathlib import Path

import encoder_checks as checks
import numpy as np
import pytest
import torch
from PIL import Image

from vitgraph.errors import InputError
from vitgraph.models.encoder import VisionEncoder
from vitgraph.models.families.deepseek_vl2 import ViewsGeometry
from vitgraph.models.geometry import TileGeometry
from vitgraph.models.registry import row_of_config
from vitgraph.planning.budgets import IMAGE, GraphKey
from vitgraph.verify.probes import encode_eagerly

ITEMS = [ViewsGeometry(IMAGE, 2, 1, 1), ViewsGeometry(IMAGE, 7, 3, 2), ViewsGeometry(IMAGE, 3, 1, 2)]


@pytest.fixture(scope="module")
def encoder() -> VisionEncoder:
    return checks.build(checks.preset_source("deepseek-vl2-debug"))


@pytest.mark.parametrize(
    ("size", "grid"),
    [((384, 384), (1, 1)), ((100, 100), (1, 1)), ((1000, 400), (3, 2)), ((1600, 900), (4, 2)), ((300, 4000), (1, 9))],
)
def test_the_resolution_that_keeps_most_pixels_is_taken(size: tuple[int, int], grid: tuple[int, int]) -> None:
    rule = checks.preset_source("deepseek-vl2").rule()
    item = rule.geometry(*size)
    assert (item.columns, item.rows) == grid  # type: ignore[attr-defined]
    columns, rows = grid
    assert rule.item_spec(item).output_tokens == 196 * (1 + columns * rows)
    assert rule.final_tokens(item) == 14 * 15 + 1 + rows * 14 * (columns * 14 + 1)
    assert rule.graph_config().paths["default"].min_token_budget == 392


def test_tiles_without_their_grid_are_refused() -> None:
    rule = checks.preset_source("deepseek-vl2-debug").rule()
    for item in (TileGeometry(IMAGE, 3), ViewsGeometry(IMAGE, 3, 2, 2)):
        with pytest.raises(InputError, match="grid of tiles"):
            rule.item_spec(item)


@torch.inference_mode()
def test_embeddings_are_those_of_the_published_code(encoder: VisionEncoder) -> None:
    inputs = checks.inputs_of(encoder, ITEMS)
    stock = encoder.stock_forward(inputs)
    assert len(stock) == sum(map(encoder.rule.final_tokens, ITEMS))
    assert checks.relative_error(torch.cat(encode_eagerly(encoder, inputs)), stock) <= 1e-6


@torch.inference_mode()
def test_lines_end_with_newlines_and_views_are_apart(encoder: VisionEncoder) -> None:
    (rows,) = encode_eagerly(encoder, checks.inputs_of(encoder, ITEMS[1:2]))
    tokens = encoder.modules["tokens"]
    whole, separator, local = rows[: 3 * 4], rows[12], rows[13:].unflatten(0, (6, 10))
    assert torch.equal(whole.unflatten(0, (3, 4))[:, 3], tokens.image_newline.expand(3, -1))
    assert torch.equal(separator, tokens.view_separator)
    assert torch.equal(local[:, 9], tokens.image_newline.expand(6, -1))
    packed = encoder.encoder_eager_forward(checks.inputs_of(encoder, ITEMS[1:2])).unflatten(0, (7, 3, 3))
    assert torch.equal(local[3:, 3:6], packed[1 + 4])


def test_padding_does_not_reach_a_tile(encoder: VisionEncoder) -> None:
    checks.assert_padded_equals_eager(encoder, ITEMS, GraphKey("default", 15 * 9, 1))


def test_operations_are_counted(encoder: VisionEncoder) -> None:
    checks.assert_flops_are_counted(encoder, ITEMS)


@torch.inference_mode()
def test_real_images_become_the_rules_tiles(encoder: VisionEncoder) -> None:
    random = np.random.default_rng(0)
    images = [Image.fromarray(random.integers(0, 256, (h, w, 3), dtype=np.uint8)) for w, h in ((200, 90), (40, 40))]
    items, pixels = encoder.preprocess(images)
    assert bool(torch.isfinite(encoder.encoder_eager_forward(encoder.make_inputs(items, pixels))).all())


def test_published_names_load(tmp_path: Path, encoder: VisionEncoder) -> None:
    source = checks.preset_source("deepseek-vl2-debug")
    state, published = checks.stock_state(encoder), {}
    for name, tensor in state.items():
        key = name.replace("visual.encoder.layers.", "vision.blocks.").replace(".layer_norm", ".norm")
        key = key.replace(".self_attn.out_proj.", ".attn.proj.").replace("visual.post_layernorm.", "vision.norm.")
        key = key.replace("visual.embeddings.patch_embedding.", "vision.patch_embed.proj.").replace("tokens.", "")
        key = key.replace("visual.embeddings.position_embedding.weight", "vision.pos_embed")
        key = key.replace("view_separator", "view_seperator").replace("projector.", "projector.layers.")
        if ".self_attn." in key:
            layer, kind = name.split(".self_attn.")[0], name.rsplit(".", 1)[1]
            parts = [state[f"{layer}.self_attn.{part}_proj.{kind}"] for part in "qkv"]
            published[key.split(".self_attn.")[0] + f".attn.qkv.{kind}"] = torch.cat(parts)
        else:
            published[key] = tensor[None] if key == "vision.pos_embed" else tensor
    config = {
        "model_type": "deepseek_vl_v2",
        "vision_config": {"width": 48, "layers": 3, "heads": 4, "mlp_ratio": 2, "image_size": 72, "patch_size": 14},
        "projector_config": {"model_type": "mlp_projector", "n_embed": 64, "depth": 2, "downsample_ratio": 2},
    }
    checks.write_checkpoint(tmp_path, config, published)
    checks.assert_same_weights(checks.load_folder(tmp_path, source), encoder)
    assert source.row.encoder_class().read_model_config(config) == (dict(source.vision_config), dict(source.extra))
    assert row_of_config(config) == source.row
