"""What a backend is told of the calls to come, before anything is timed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AttentionInterface

from vitgraph.attention.base import AttentionBackend, Packed, TorchSdpaBackend
from vitgraph.attention.per_shape import PerShapeBackend, Trial
from vitgraph.attention.registry import create_backend
from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.measure.calls import CallInputs, EncoderCall
from vitgraph.measure.series import expect_calls, prepare_attention
from vitgraph.measure.setup import plan_graphs, resolve_source
from vitgraph.models.compilation import compile_encoder
from vitgraph.models.loading import load_encoder
from vitgraph.specs.parts import GraphSpec, ModelSpec

CPU = torch.device("cpu")


def shapes_of(preset: str, sizes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Shapes that the backend of a debug tower is asked to prepare for one call of images of these sizes."""
    backend, told = create_backend("TORCH_SDPA", CPU), []
    monkeypatch.setattr(type(backend), "prepare", lambda self, shapes: told.extend(shapes))
    source = resolve_source(ModelSpec(preset))
    encoder = load_encoder(source, backend, device=CPU, dtype=torch.float32, load_format="dummy")
    items = tuple(encoder.rule.image_geometry(*size) for size in sizes)
    call = EncoderCall(0, (0,), (), items, tuple(encoder.rule.item_spec(item) for item in items))
    prepare_attention(encoder, [call], CallInputs(encoder, [call], 0))
    return told


def test_rows_segments_and_the_longest_of_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shapes_of("qwen3-vl-debug", [(512, 512), (256, 512)], monkeypatch) == [(1536, 2, 1024)]


def test_windows_are_segments_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 x 8 patches each: 16 x 8 patches are two, 20 x 20 are nine, which are cut at two edges."""
    assert shapes_of("qwen2.5-vl-debug", [(112, 224), (280, 280)], monkeypatch) == [(528, 2, 400), (528, 11, 64)]


class Short(TorchSdpaBackend):
    is_capture_safe = True


class Long(Short):
    pass


def cost(backend: AttentionBackend, arguments: Packed, is_graph: bool) -> Trial:
    """The mean length decides: `Long` costs 300, `Short` its rows' work for each row."""
    lengths = arguments[3].diff().double()
    taken = 300.0 if isinstance(backend, Long) else float(lengths.square().sum() / lengths.sum())
    return Trial(taken, lambda: lambda: (0.0, taken))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("preset", "side"), [("qwen3-vl-debug", 256), ("qwen2.5-vl-debug", 224)])
def test_auto_judges_each_graph_by_the_replays_that_the_packing_gives_it(
    preset: str, side: int, compiled: bool, traced_only: None
) -> None:
    """The graphs that a tower captures are found again among those that were expected, windows and compiled too."""
    source = resolve_source(ModelSpec(preset))
    family = source.row.encoder_class()
    heads, width = family.head_count(source.vision_config), family.head_width(source.vision_config)
    assert heads is not None
    backend = PerShapeBackend({"SHORT": Short(), "LONG": Long()}, heads, width, torch.float32, CPU, timer=cost)
    AttentionInterface.register(backend.transformers_name, backend.transformers_function)
    encoder = load_encoder(source, backend, device=CPU, dtype=torch.float32, load_format="dummy")
    calls = []
    for index, sides in enumerate([[1], [1, 1], [2], [2], [4]]):
        items = tuple(encoder.rule.image_geometry(side * n, side * n) for n in sides)
        calls.append(EncoderCall(index, (index,), (), items, tuple(map(encoder.rule.item_spec, items))))
    spec = GraphSpec(token_budgets=(64, 256), max_vision_items_per_batch=2, slot_tiers=False)
    plan = plan_graphs(encoder.rule, spec, [item for call in calls for item in call.specs])
    if compiled:
        compile_encoder(encoder)
    manager = EncoderCudaGraphManager(encoder, plan)
    expect_calls(encoder, [manager], calls)
    manager.capture()
    prepare_attention(encoder, calls, CallInputs(encoder, calls, 0))
    lists = 1 + (preset == "qwen2.5-vl-debug")
    graphs = [row for row in backend.choices() if row["is_graph"]]
    assert sum(row["calls"] for row in graphs) == lists * 4, "the fifth call is too large for any graph"
    assert sum(row["calls"] for row in backend.choices() if not row["is_graph"]) == lists * 5
    # Images of 256 rows alone, and of 256 and 1,024 rows; windows have 64.
    taken = {row["longest"]: row["backend"] for row in graphs if row["calls"]}
    assert taken[max(taken)] == "LONG"
    assert taken[min(taken)] == "SHORT"
