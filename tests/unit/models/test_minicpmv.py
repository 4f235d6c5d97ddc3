"""MiniCPM-V: slices as published processors cut them, the packed resampler against the padded one, axes, loading."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import encoder_checks as checks
import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.idefics2.configuration_idefics2 import Idefics2VisionConfig
from transformers.models.idefics2.modeling_idefics2 import Idefics2VisionTransformer
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil
from transformers.vision_utils import get_vision_nearest_position_ids

from vitgraph.errors import InputError
from vitgraph.models.families.minicpmv import (
    TABLE_ROWS,
    MiniCPMV25Encoder,
    MiniCPMV45Encoder,
    MiniCPMVEncoder,
    build_resampler,
    nearest_positions,
    resampled,
    resampled_padded,
)
from vitgraph.models.families.minicpmv_slices import MiniCPMV25Rule, MiniCPMVRule, SliceGeometry
from vitgraph.models.geometry import ItemGeometry
from vitgraph.models.registry import ModelSource, row_presets
from vitgraph.models.replaced_modules import stock_modules
from vitgraph.planning.budgets import IMAGE, VIDEO, GraphKey, plan_budgets, resolve_budget_settings
from vitgraph.planning.packing import pack_items

ENCODERS = {
    "minicpmv_2_5": MiniCPMV25Encoder,
    "minicpmv_2_6_4_0": MiniCPMVEncoder,
    "minicpmv_4_5": MiniCPMV45Encoder,
}
DEBUG = {
    "minicpmv_2_5": "minicpm-v-2.5-debug",
    "minicpmv_2_6_4_0": "minicpm-v-2.6-debug",
    "minicpmv_4_5": "minicpm-v-4.5-debug",
}
ROWS = tuple(DEBUG)
SQUARE, LONG = (8, 8), (32, 32)
"""Keys of the debug presets' capture axis."""


class SliceProcessor(MiniCPMV4_6ImageProcessorPil):
    """transformers' processor of MiniCPM-V 4.6 without its merging, which makes sides multiples of four patches."""

    def find_best_resize(
        self,
        image_size: tuple[int, int],
        scale_resolution: int,
        patch_size: int,
        downsample_mode: str,
        allow_upscale: bool = False,
    ) -> tuple[int, int]:
        return super().find_best_resize(
            image_size, scale_resolution, patch_size // 2, downsample_mode="4x", allow_upscale=allow_upscale
        )


def source(row: str, preset: str | None = None, **changes: Any) -> ModelSource:
    return checks.preset_source(preset or DEBUG[row], **changes)


def full_rule(row: str = "minicpmv_2_6_4_0") -> MiniCPMVRule:
    preset = DEBUG[row].removesuffix("-debug")
    rule = source(row, preset).rule()
    assert isinstance(rule, MiniCPMVRule)
    return rule


def build(row: str) -> MiniCPMVEncoder:
    encoder = checks.build(source(row))
    assert isinstance(encoder, MiniCPMVEncoder)
    return encoder


@pytest.fixture(scope="module", params=ROWS)
def encoder(request: pytest.FixtureRequest) -> MiniCPMVEncoder:
    return build(request.param)


def mixed_items(rule: MiniCPMVRule) -> list[ItemGeometry]:
    items: list[ItemGeometry] = [
        rule.image_geometry(300, 200),
        rule.image_geometry(20, 21),
        rule.image_geometry(90, 700),
        rule.image_geometry(1, 300),
    ]
    if VIDEO in rule.modalities:
        items.insert(2, rule.video_geometry(320, 240, 3, None))
    return items


@pytest.mark.parametrize("row", ROWS)
def test_slices_are_those_of_the_processor(row: str) -> None:
    rule = full_rule(row)
    processor = SliceProcessor()
    queries = rule.queries
    for width, height in (*checks.SIZES, *checks.random_sizes(400, 8000)):
        cuts = processor.get_sliced_grid((height, width), 9, 448)
        sizes = [processor.find_best_resize((height, width), 448, 14, "4x", allow_upscale=cuts is None)]
        if cuts is not None:
            refined = processor.get_refine_size((height, width), cuts, 448, 14, "4x", allow_upscale=True)
            sizes += [(refined[0] // cuts[0], refined[1] // cuts[1])] * (cuts[0] * cuts[1])
        item = rule.geometry(width, height)
        assert item == SliceGeometry(IMAGE, tuple((h // 14, w // 14) for h, w in sizes)), (width, height)
        spec = rule.item_spec(item)
        assert (spec.output_tokens, spec.segments) == (queries * len(sizes), len(sizes))
        assert spec.input_size == sum(h * w for h, w in sizes) // 14**2


def test_video_frames_are_single_slices() -> None:
    rule = full_rule()
    assert rule.geometry(1920, 1080, 2) == SliceGeometry(VIDEO, ((24, 43),) * 2)
    assert rule.video_geometry(1920, 1080, 1, None) == SliceGeometry(VIDEO, ((24, 43),))
    assert rule.item_spec(rule.geometry(64, 64, 40)).output_tokens == 40 * 64
    assert len(rule.video_geometry(64, 64, 300, 30.0).grids) == 10
    assert len(rule.video_geometry(64, 64, 9000, 30.0).grids) == 16


def test_first_version_refuses_videos() -> None:
    with pytest.raises(InputError, match=r"320x240x4.*images only"):
        full_rule("minicpmv_2_5").geometry(320, 240, 4)


@pytest.mark.parametrize("grids", [(), ((0, 3),), ((40, 32),), ((32, 32), (70, 70))])
def test_slices_that_no_processor_makes_are_refused(grids: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(InputError, match="slice"):
        full_rule().item_spec(SliceGeometry(IMAGE, grids))


def test_rows_of_eager_and_stock_agree_with_the_rule(encoder: MiniCPMVEncoder) -> None:
    for width, height in checks.SIZES:
        checks.assert_eager_equals_stock(encoder, [encoder.rule.image_geometry(width, height)])


def test_eager_equals_stock_for_a_mixed_batch(encoder: MiniCPMVEncoder) -> None:
    checks.assert_eager_equals_stock(encoder, mixed_items(encoder.rule))


def test_longer_slices_than_the_table_still_equal_stock(encoder: MiniCPMVEncoder) -> None:
    item = SliceGeometry(IMAGE, ((1, TABLE_ROWS + 9), (3, 4)))
    assert encoder.compute_scalars(encoder.compute_metadata([item]))["largest_side"] == TABLE_ROWS + 9
    checks.assert_eager_equals_stock(encoder, [item])


def test_positions_equal_transformers_rounding() -> None:
    for size in range(1, 600):
        sizes = torch.tensor([[size, 3], [2, size]])
        expected = get_vision_nearest_position_ids(sizes, 70).numpy()
        actual = np.concatenate([nearest_positions(size, 3, 70), nearest_positions(2, size, 70)])
        np.testing.assert_array_equal(actual, expected, err_msg=str(size))


@torch.inference_mode()
def test_first_versions_tower_takes_a_slice_for_one_row_of_patches() -> None:
    encoder = build("minicpmv_2_5")
    item = SliceGeometry(IMAGE, ((8, 7),))
    metadata = encoder.compute_metadata([item])
    config = Idefics2VisionConfig(**{**encoder.rule.vision_config, "model_type": "idefics2_vision"})
    idefics = Idefics2VisionTransformer._from_config(config, attn_implementation="sdpa").eval()
    weights = checks.stock_state(encoder).items()
    tower = {name.removeprefix("visual."): value for name, value in weights if name.startswith("visual.")}
    idefics.load_state_dict(tower)
    call = checks.inputs_of(encoder, [item])
    rows = call.rows("pixel_values").materialize().view(-1, 3, 14, 14)
    strip = rows.permute(1, 2, 0, 3).reshape(1, 3, 14, -1)
    hidden = idefics(strip, patch_attention_mask=torch.ones(1, 1, 56, dtype=torch.bool)).last_hidden_state
    resampler: Any = encoder.modules["resampler"]
    assert metadata["position_ids"].max() == 17
    expected = resampled_padded(resampler, [hidden[0]], [(8, 7)])
    assert checks.relative_error(encoder.encoder_eager_forward(call), expected) <= 1e-6


@torch.inference_mode()
def test_resampler_adds_column_and_row_sines_to_keys_only() -> None:
    torch.manual_seed(0)
    resampler: Any = build_resampler(queries=3, width=16, heads=2, kv_width=12)
    features, (h, w) = torch.randn(10, 12), (2, 5)
    frequencies = [10000.0 ** (-index / 4) for index in range(4)]

    def axis(position: int) -> list[float]:
        angles = [position * frequency for frequency in frequencies]
        return [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]

    places = torch.tensor([axis(column) + axis(row) for row in range(h) for column in range(w)])
    values = resampler.kv_norm(resampler.kv_proj(features))
    attended, _ = resampler.attn(resampler.query_norm(resampler.query), values + places, values)
    expected = resampler.post_norm(attended) @ resampler.proj
    assert checks.relative_error(resampled_padded(resampler, [features], [(h, w)]), expected) <= 1e-6


@torch.inference_mode()
def test_empty_slices_read_no_padded_row_and_stay_finite() -> None:
    torch.manual_seed(0)
    resampler: Any = build_resampler(queries=3, width=16, heads=2, kv_width=12)
    hidden = torch.randn(20, 12)
    hidden[10:] = torch.nan
    offsets = torch.tensor([0, 4, 10, 10, 10], dtype=torch.int32)
    places = torch.zeros(20, 2, dtype=torch.int32)
    places[4:10] = torch.tensor([(column, row) for row in range(2) for column in range(3)])
    places[:4] = torch.tensor([(column, row) for row in range(4) for column in range(1)])
    output = resampled(resampler, hidden, offsets, places, 8, 5, checks.plain_backend())
    expected = resampled_padded(resampler, hidden[:10].split([4, 6]), [(4, 1), (2, 3)])
    assert checks.relative_error(output[:6], expected) <= 1e-6
    assert output.shape == (12, 16) and bool(output.isfinite().all())


@pytest.mark.parametrize("budget_slices", [30, 24])
def test_garbage_in_padding_does_not_reach_a_row(encoder: MiniCPMVEncoder, budget_slices: int) -> None:
    rule = encoder.rule
    items = [item for item in mixed_items(rule) if max(rule.item_spec(item).axis_sizes["patch_grid"]) <= LONG[0]]
    assert 8 < sum(rule.item_spec(item).segments for item in items) < budget_slices
    capacity = GraphKey("default", budget_slices * rule.queries, budget_slices, LONG)
    checks.assert_padded_equals_eager(encoder, items, capacity)


def test_one_square_slice_in_a_graph_of_many(encoder: MiniCPMVEncoder) -> None:
    item = encoder.rule.image_geometry(50, 50)
    assert item.grids == (SQUARE,)
    budget = 5 * encoder.rule.queries + 1
    checks.assert_padded_equals_eager(encoder, [item], GraphKey("default", budget, 5, SQUARE))


@pytest.mark.parametrize(("slices", "max_items"), [((1, 12), 1), ((40,), 3), ((3, 20, 64), 3)])
def test_replay_equals_eager(encoder: MiniCPMVEncoder, slices: tuple[int, ...], max_items: int) -> None:
    items = [*mixed_items(encoder.rule)[:-1], encoder.rule.image_geometry(50, 50)]
    budgets = [count * encoder.rule.queries for count in slices]
    manager = checks.assert_manager_equals_eager(encoder, items, budgets, max_items)
    used = {key.axis_key for key, graph in manager.graphs.items() if graph.replay_count}
    assert LONG in used
    assert {key.segment_slots for key in manager.graphs} == set(slices)


def test_a_slice_longer_than_every_key_is_a_counted_miss() -> None:
    encoder = build("minicpmv_2_6_4_0")
    rule = encoder.rule
    plan = plan_budgets(
        resolve_budget_settings((4, 64), max_frames_per_video=16),
        min_tokens_per_segment=rule.queries,
        axes=rule.graph_config().axes,
        segment_free_paths=frozenset({"default"}),
    )
    specs = [rule.item_spec(rule.image_geometry(*size)) for size in ((50, 50), (3, 900))]
    (run,) = pack_items(specs[1:], plan)[0].runs.values()
    assert run.miss_reason == "axis_not_captured"
    (run,) = pack_items(specs[:1], plan)[0].runs.values()
    assert run.key is not None and run.key.axis_key == SQUARE


def test_every_batch_that_packs_into_a_key_fits_its_patches() -> None:
    rule = full_rule()
    (axis,) = rule.axes
    square, long = axis.keys
    assert (square, long) == ((32, 32), (128, 128))
    assert (rule.slice_capacity(square), rule.slice_capacity(long)) == (1024, 1080)
    largest = {square: 0, long: 0}
    for width, height in checks.random_sizes(4000, 6000):
        item = rule.image_geometry(width, height)
        key = axis.covering_key([rule.item_spec(item).axis_sizes["patch_grid"]])
        if key is not None:
            largest[key] = max(largest[key], *(rows * columns for rows, columns in item.grids))
    # The bound is proven for any slice; these sizes come close to it.
    assert largest[square] == 1024
    assert 1050 <= largest[long] <= 1080
    for key in (square, long):
        rows, columns = rule.largest_grid(key)
        assert rule.slice_capacity(key) - 8 < rows * columns <= rule.slice_capacity(key)


@pytest.mark.parametrize("row", ROWS)
def test_slices_do_not_split_a_batch_that_its_tokens_fit(row: str) -> None:
    rule = full_rule(row)
    config = rule.graph_config()
    settings = resolve_budget_settings(rule.budget_range(8192), max_frames_per_video=config.max_frames_per_video)
    plan = plan_budgets(
        settings,
        min_tokens_per_segment=config.min_tokens_per_segment,
        axes=config.axes,
        segment_free_paths=frozenset({"default"}),
    )
    assert settings.token_budgets[:2] == (rule.queries, 2 * rule.queries)
    specs = [rule.item_spec(rule.image_geometry(1920, 1080))] * 8
    batches = pack_items(specs, plan)
    assert len(batches) == 1 and batches[0].is_hit
    assert all(plan.slot_tiers["default", budget] == (budget // rule.queries,) for budget in settings.token_budgets)


@torch.inference_mode()
@pytest.mark.parametrize("size", [(300, 200), (50, 50), (90, 700), (1, 1), (3, 40)])
def test_preprocess_equals_transformers_pipeline(size: tuple[int, int]) -> None:
    encoder = build("minicpmv_2_6_4_0")
    image = checks.random_image(*size)
    items, pixels = encoder.preprocess([image, image])
    batch = SliceProcessor(scale_resolution=112)([image, image], return_tensors="np")
    grids = [grid for item in items for grid in encoder.rule.checked_slices(item).grids]
    assert grids == [tuple(grid) for grid in batch["target_sizes"].tolist()]
    strips = batch["pixel_values"][0].reshape(3, 14, -1, 14).transpose(2, 0, 1, 3).reshape(-1, 588)
    np.testing.assert_allclose(pixels["pixel_values"].numpy(), strips, atol=1e-6)


def test_published_checkpoint_loads_bit_equal(encoder: MiniCPMVEncoder, tmp_path: Path) -> None:
    row = "minicpmv_2_5" if isinstance(encoder.rule, MiniCPMV25Rule) else "minicpmv_2_6_4_0"
    names = {"visual": "vpm", "query_norm": "ln_q", "kv_norm": "ln_kv", "post_norm": "ln_post"}

    def rename(name: str) -> str:
        return ".".join(names.get(part, part) for part in name.split("."))

    tensors = checks.published(checks.stock_state(encoder), rename)
    norms_published = [f"ln_{norm}.{part}" for norm in ("q", "kv", "post") for part in ("weight", "bias")]
    attention = ["attn.in_proj_weight", "attn.in_proj_bias", "attn.out_proj.weight", "attn.out_proj.bias"]
    of_resampler = {name.removeprefix("resampler.") for name in tensors if name.startswith("resampler.")}
    assert of_resampler == {"query", "kv_proj.weight", "proj", *norms_published, *attention}
    assert {"vpm.embeddings.patch_embedding.weight", "vpm.encoder.layers.2.self_attn.out_proj.bias"} < tensors.keys()
    stored = {"resampler.pos_embed": torch.zeros(4, 4, 64), "llm.model.embed_tokens.weight": torch.zeros(2, 2)}
    checks.write_checkpoint(tmp_path, {}, {**tensors, **stored})
    checks.assert_same_weights(checks.load_folder(tmp_path, source(row)), encoder)


PUBLISHED_CONFIG = {
    "architectures": ["MiniCPMV"],
    "hidden_size": 3584,
    "query_num": 64,
    "image_size": 448,
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 980,
        "intermediate_size": 4304,
        "model_type": "siglip",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
    },
}


def test_published_config_gives_the_presets_facts() -> None:
    vision_config, extra = MiniCPMVEncoder.read_model_config({**PUBLISHED_CONFIG, "version": 2.6})
    preset = row_presets("minicpmv_2_6_4_0")["minicpm-v-2.6"]
    assert (vision_config, extra) == (preset["vision_config"], preset["extra"])
    dropped = {**PUBLISHED_CONFIG, "version": 2.6, "drop_vision_last_layer": True}
    assert MiniCPMVEncoder.read_model_config(dropped)[0]["num_hidden_layers"] == 26
    old = {**PUBLISHED_CONFIG, "hidden_size": 4096, "query_num": 96}
    preset = row_presets("minicpmv_2_5")["minicpm-v-2.5"]
    assert MiniCPMV25Encoder.read_model_config(old) == (preset["vision_config"], preset["extra"])
    processor = {"max_slice_nums": 9, "scale_resolution": 448, "patch_size": 14, "image_feature_size": 64}
    assert MiniCPMVEncoder.read_processor_config(processor) == {
        "max_slice_nums": 9,
        "scale_resolution": 448,
        "patch_size": 14,
    }


@pytest.mark.parametrize(
    ("changes", "accepting"),
    [
        ({"version": 2.6}, MiniCPMVEncoder),
        ({"version": "4.0"}, MiniCPMVEncoder),
        ({}, MiniCPMV25Encoder),
        ({"version": 4.5}, MiniCPMV45Encoder),
        ({"version": 4.6}, None),
        ({"hidden_size": 2304}, None),
    ],
)
def test_versions_of_one_architecture_name_are_told_apart(
    changes: dict[str, Any], accepting: type[MiniCPMVEncoder] | None
) -> None:
    config = {**PUBLISHED_CONFIG, **changes}
    assert [encoder for encoder in ENCODERS.values() if encoder.accepts_model_config(config)] == (
        [accepting] if accepting else []
    )


@torch.inference_mode()
def test_flops_are_those_that_torch_counts(encoder: MiniCPMVEncoder) -> None:
    # Equal slices of a multiple of eight patches: the dense keys then have no padding, which the rule does not count.
    items = [SliceGeometry(IMAGE, ((8, 8), (4, 16))), SliceGeometry(IMAGE, ((16, 4),))]
    call = checks.inputs_of(encoder, items)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), stock_modules(encoder):
        encoder.encoder_eager_forward(call)
    shared_by_all_slices = 2 * encoder.rule.queries * 64 * 64
    assert sum(map(encoder.rule.flops, items)) + shared_by_all_slices == counter.get_total_flops()


@pytest.mark.parametrize(
    ("row", "preset"),
    [(row, name) for row in ROWS for name, facts in row_presets(row).items() if facts["parameters"]],
)
def test_full_size_preset_has_the_published_parameters(row: str, preset: str) -> None:
    facts = row_presets(row)[preset]
    modules = ENCODERS[row].build_modules(facts["vision_config"], facts["extra"], torch.bfloat16, torch.device("meta"))
    assert sum(parameter.numel() for parameter in modules.parameters()) == facts["parameters"]


def test_videos_of_4_5_are_refused_with_the_reason() -> None:
    with pytest.raises(InputError, match=r"not yet encoded here: its resampler joins several frames"):
        checks.preset_source("minicpm-v-4.5").rule().geometry(640, 480, 8)
    with pytest.raises(InputError, match="this model takes images only"):
        checks.preset_source("minicpm-v-2.5").rule().geometry(640, 480, 8)
