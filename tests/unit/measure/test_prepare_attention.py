"""What a backend is told of the calls to come, before anything is timed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vitgraph.attention.registry import create_backend
from vitgraph.measure.calls import CallInputs, EncoderCall
from vitgraph.measure.series import prepare_attention
from vitgraph.measure.setup import resolve_source
from vitgraph.models.loading import load_encoder
from vitgraph.specs import ModelSpec

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
