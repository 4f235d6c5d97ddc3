"""Checks that the two-path adapters' tests share: both paths against transformers, padding, operations, the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import encoder_checks as checks
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import FlopCounterMode

from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.measure.setup import plan_graphs
from vitgraph.models.geometry import ItemGeometry
from vitgraph.models.registry import ModelSource
from vitgraph.models.replaced_modules import stock_modules
from vitgraph.models.two_path import GLOBAL, LOCAL, CropGeometry, TwoPathEncoder
from vitgraph.planning.budgets import IMAGE, GraphKey
from vitgraph.specs.parts import GraphSpec
from vitgraph.verify.probes import encode_eagerly

UNTILED = CropGeometry(IMAGE, 0, 0)
MIXED = (UNTILED, CropGeometry(IMAGE, 3, 2), UNTILED, CropGeometry(IMAGE, 1, 2), CropGeometry(IMAGE, 2, 1))


def build(source: ModelSource) -> TwoPathEncoder:
    """The encoder with seeded weights; scales and special rows are near one, so that all of them count."""
    encoder = checks.build(source)
    assert isinstance(encoder, TwoPathEncoder)
    for name, parameter in encoder.modules.named_parameters():
        if "lambda_" in name or "tokens." in name:
            parameter.add_(1)
    return encoder


def tower_views(encoder: TwoPathEncoder, items: Sequence[CropGeometry], pixels: Mapping[str, torch.Tensor]) -> Any:
    """Arguments of transformers' `get_image_features` for these items."""
    crops = pixels[encoder.rule.local_pixels]
    return SimpleNamespace(
        whole=pixels["pixel_values"],
        crops=crops if len(crops) else None,
        counts=[item.crops for item in items],
        grids=[[max(item.columns, 1), max(item.rows, 1)] for item in items],
    )


@torch.inference_mode()
def assert_equals(encoder: TwoPathEncoder, items: Sequence[CropGeometry], expected: Sequence[torch.Tensor]) -> None:
    """The items' assembled eager embeddings are `expected`, and so is the stock forward."""
    inputs = checks.inputs_of(encoder, items)
    with checks.transformers_attention(encoder):
        stock = encoder.stock_forward(inputs)
    embeddings = encode_eagerly(encoder, inputs)
    assert [len(rows) for rows in embeddings] == [encoder.rule.final_tokens(item) for item in items]
    for actual, wanted in zip(embeddings, expected, strict=True):
        assert checks.relative_error(actual, wanted) <= 1e-6
    assert checks.relative_error(stock, torch.cat(list(expected))) <= 1e-6


@torch.inference_mode()
def assert_padded_equals_eager(encoder: TwoPathEncoder, items: Sequence[CropGeometry], spare: int) -> None:
    """Views of garbage after the real ones change nothing, on either path; `spare` is rows, not always whole views."""
    inputs = checks.inputs_of(encoder, items)
    for path in (GLOBAL, LOCAL):
        rows = sum(encoder.rule.item_spec(item).tokens_on(path) for item in items)
        capacity = GraphKey(path, rows + spare, rows + spare)
        wanted = encoder.prepare_encoder_cudagraph_capture_inputs(capacity)
        values = encoder.prepare_encoder_cudagraph_replay_buffers(inputs, capacity)
        assert (wanted.metadata, wanted.scalars, dict(values.metadata)) == ({}, {}, {})
        generator = torch.Generator().manual_seed(7)
        buffers = {}
        for name, field in wanted.pixels.items():
            buffers[name] = 1e3 * torch.randn((field.rows, *field.row_shape), generator=generator)
            values.pixels[name].copy_into(buffers[name])
        (padded,) = encoder.encoder_cudagraph_forward(buffers, {}, path)
        assert len(padded) == capacity.token_budget - capacity.token_budget % encoder.rule.path_tokens[path]
        assert checks.relative_error(padded[:rows], encoder.encoder_eager_forward(inputs, path)) <= 1e-5


@torch.inference_mode()
def assert_flops_are_counted(encoder: TwoPathEncoder) -> None:
    """The rule's operations are those that torch counts in the forward, attention included."""
    for path in (GLOBAL, LOCAL):
        pixels = torch.zeros(1, 3, encoder.rule.side_of(path), encoder.rule.side_of(path))
        counter = FlopCounterMode(display=False)
        with sdpa_kernel(SDPBackend.MATH), stock_modules(encoder), counter:
            encoder.encode_views(pixels, path)
        assert encoder.rule.view_flops(encoder.rule.side_of(path)) == counter.get_total_flops(), path
    whole, crop = (encoder.rule.view_flops(encoder.rule.side_of(path)) for path in (GLOBAL, LOCAL))
    assert encoder.rule.flops(CropGeometry(IMAGE, 3, 2)) == whole + 6 * crop


class OneDevice(TorchDispatchMode):
    """Fails on an operation that reads or makes a tensor elsewhere than on the meta device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves, _ = tree_flatten((args, kwargs, result))
        elsewhere = {str(leaf.device) for leaf in leaves if isinstance(leaf, torch.Tensor)} - {"meta"}
        assert not elsewhere, f"{func} touches {elsewhere}"
        return result


@torch.inference_mode()
def assert_forward_stays_on_device(source: ModelSource) -> None:
    """What a capture runs neither reads a value back nor touches a host tensor: neither exists on the meta device."""
    encoder_class = source.row.encoder_class()
    meta = torch.device("meta")
    modules = encoder_class.build_modules(source.vision_config, source.extra, torch.bfloat16, meta)
    encoder = encoder_class(modules, source.rule(), checks.plain_backend())
    assert isinstance(encoder, TwoPathEncoder)
    for path in (GLOBAL, LOCAL):
        side = encoder.rule.side_of(path)
        with OneDevice():
            rows = encoder.encode_views(torch.empty(2, 3, side, side, dtype=torch.bfloat16, device=meta), path)
        assert rows.shape == (2, encoder.rule.path_tokens[path], encoder.rule.output_width)
        assert rows.dtype == torch.bfloat16


def capture(encoder: Any, budgets: Sequence[int], max_items: int = 0) -> EncoderCudaGraphManager:
    """A manager with the graphs of a plan as `bench` makes it."""
    spec = GraphSpec(token_budgets=tuple(budgets), max_vision_items_per_batch=max_items)
    manager = EncoderCudaGraphManager(encoder, plan_graphs(encoder.rule, spec, []))
    manager.capture()
    return manager


@torch.inference_mode()
def assert_manager_equals_eager(manager: EncoderCudaGraphManager, items: Sequence[ItemGeometry], seed: int) -> Any:
    """Every item equals eager, in input order; returns the plan of the call."""
    encoder: Any = manager.model
    inputs = checks.inputs_of(encoder, items, seed)
    expected = encode_eagerly(encoder, inputs)
    for actual, wanted in zip(manager.execute(inputs), expected, strict=True):
        assert checks.relative_error(actual, wanted) <= 1e-5
    return manager.plan_call(inputs)
