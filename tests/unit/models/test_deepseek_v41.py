"""DeepSeek-V4.1-Flash: sizes, the published unfolding, spans, padding, loading and operations."""

from pathlib import Path

import encoder_checks as checks
import numpy as np
import pytest
import torch
from PIL import Image

from vitgraph.errors import InputError
from vitgraph.models.encoder import VisionEncoder
from vitgraph.models.families.deepseek_v41 import merge_squares
from vitgraph.models.geometry import GridGeometry
from vitgraph.planning.budgets import IMAGE, VIDEO, GraphKey
from vitgraph.verify.probes import encode_eagerly

ITEMS = [GridGeometry(IMAGE, 1, 7, 5), GridGeometry(IMAGE, 1, 3, 3), GridGeometry(IMAGE, 1, 1, 10)]


@pytest.fixture(scope="module")
def encoder() -> VisionEncoder:
    return checks.build(checks.preset_source("deepseek-v4.1-debug"))


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        # Enlarged to 544 x 544 pixels; rounded up to patches; shrunk to 1,024 tokens; a single row or column.
        ((224, 224), (39, 39)),
        ((700, 601), (43, 50)),
        ((4000, 3000), (81, 108)),
        ((100000, 10), (3, 3063)),
        ((10, 100000), (1533, 3)),
    ],
)
def test_sizes_are_those_of_the_published_rule(size: tuple[int, int], grid: tuple[int, int]) -> None:
    rule = checks.preset_source("deepseek-v4.1-flash").rule()
    item = rule.geometry(*size)
    assert item == GridGeometry(IMAGE, 1, *grid)
    rows, columns = (-(-side // 3) for side in grid)
    assert rule.item_spec(item).output_tokens == rows * columns
    assert rule.final_tokens(item) == rows * (columns + 1) + 2 <= 1024


def test_other_geometries_are_refused() -> None:
    rule = checks.preset_source("deepseek-v4.1-debug").rule()
    for item in (GridGeometry(VIDEO, 2, 3, 3), GridGeometry(IMAGE, 1, 0, 3)):
        with pytest.raises(InputError, match="one image"):
            rule.item_spec(item)


def test_patches_outside_the_grid_count_nothing() -> None:
    patches, is_there = merge_squares(4, 2, 3)
    assert patches[0].tolist() == [0, 1, 1, 2, 3, 3, 4, 5, 5]
    assert is_there.tolist() == [[1, 1, 0] * 3, [1, 1, 0, 0, 0, 0, 0, 0, 0]]


@torch.inference_mode()
def test_embeddings_are_those_of_the_published_code(encoder: VisionEncoder) -> None:
    inputs = checks.inputs_of(encoder, ITEMS)
    found, stock = encode_eagerly(encoder, inputs), encoder.stock_forward(inputs)
    assert [len(rows) for rows in found] == [encoder.rule.final_tokens(item) for item in ITEMS]
    assert checks.relative_error(torch.cat(found), stock) <= 1e-6
    tokens = encoder.modules["tokens"]
    lines = found[0][1:-1].unflatten(0, (3, 3))
    assert torch.equal(found[0][0], tokens["start"]) and torch.equal(found[0][-1], tokens["end"])
    assert torch.equal(lines[:, 2], tokens["newline"].expand(3, -1))


def test_padding_does_not_reach_a_token(encoder: VisionEncoder) -> None:
    checks.assert_padded_equals_eager(encoder, ITEMS, GraphKey("default", 16, 5))


def test_operations_are_counted(encoder: VisionEncoder) -> None:
    checks.assert_flops_are_counted(encoder, ITEMS)


@torch.inference_mode()
def test_real_images_become_the_rules_grids(encoder: VisionEncoder) -> None:
    random = np.random.default_rng(0)
    images = [Image.fromarray(random.integers(0, 256, (h, w, 3), dtype=np.uint8)) for w, h in ((200, 90), (40, 40))]
    items, pixels = encoder.preprocess(images)
    assert items == [encoder.rule.geometry(*image.size) for image in images]
    assert bool(torch.isfinite(encoder.encoder_eager_forward(encoder.make_inputs(items, pixels))).all())


def test_published_names_load(tmp_path: Path, encoder: VisionEncoder) -> None:
    source = checks.preset_source("deepseek-v4.1-debug")
    state, published = checks.stock_state(encoder), {}
    for name, tensor in state.items():
        key = name.replace("visual.patch_embed.", "vision.patch_embed.proj.").replace("visual.", "vision.")
        key = key.replace(".attn.qkv.", ".attn.wqkv.").replace(".attn.proj.", ".attn.wo.")
        key = key.replace(".mlp.down_proj.", ".mlp.w2.").replace("tokens.", "image_")
        if ".up_proj." in key:
            gate = state[name.replace(".up_proj.", ".gate_proj.")]
            published[key.replace(".up_proj.", ".w1.")] = torch.cat([gate, tensor])
        elif ".gate_proj." not in key:
            published[key] = tensor
    config = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "vision_config": {**source.vision_config, "model_type": "deepseek_v41_vision"},
        "text_config": {"hidden_size": 64},
    }
    checks.write_checkpoint(tmp_path, config, published)
    checks.assert_same_weights(checks.load_folder(tmp_path, source), encoder)
    assert source.row.encoder_class().read_model_config(config) == (dict(source.vision_config), dict(source.extra))
