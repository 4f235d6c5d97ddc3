"""Stands in for vLLM's encoder-graph manager in vLLM's own tests of it: their names, this project's packing and graphs.

A pytest plugin: imported first, it puts modules of vLLM's names into `sys.modules`. Their mock models speak vLLM's
protocol; `AdaptedModel` lets this project's manager call them. Only the forms are vLLM's; nothing of its code is here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from vitgraph.errors import BudgetError
from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.models.base import (
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphReplayBuffers,
    EncoderInputs,
    PixelField,
)
from vitgraph.models.geometry import EncoderCudaGraphConfig, GridGeometry, ItemGeometry
from vitgraph.models.two_path import CropGeometry
from vitgraph.planning.accounting import GraphCounters, count_calls
from vitgraph.planning.budgets import (
    DEFAULT_PATH,
    IMAGE,
    BudgetPlan,
    EncoderItemSpec,
    GraphKey,
    generate_budgets,
    resolve_budget_settings,
    select_budget,
    validate_budgets,
)
from vitgraph.planning.packing import pack_items

POLICY = "greedy-defer"
"""This project's name for what vLLM 0.33 packs by."""

PIXELS, GRIDS = ("pixel_values", "pixel_values_videos"), ("image_grid_thw", "video_grid_thw")


@dataclass
class ItemSpec:
    """vLLM's form of what the packing knows of an item."""

    input_size: int
    output_tokens: int
    path_output_tokens: dict[str, int] = field(default_factory=dict)

    def get_path_output_tokens(self, path: str) -> int:
        return self.adapted().tokens_on(path)

    def adapted(self, modality: str = IMAGE) -> EncoderItemSpec:
        return EncoderItemSpec(modality, self.input_size, self.output_tokens, 1, self.path_output_tokens)


@dataclass
class Config:
    """vLLM's form of a model's static facts, as far as the mocks give them."""

    modalities: list[str]
    buffer_keys: list[str]
    out_hidden_size: int


@dataclass
class Values:
    """vLLM's form of a capture's and a replay's tensors."""

    values: dict[str, torch.Tensor]


class Protocol:
    """What the mocks derive from; only one of them makes embeddings of the rows itself."""

    postprocess_encoder_output: Any = None


def inputs_of(mm_kwargs: Mapping[str, Any]) -> EncoderInputs:
    """A call of vLLM's keywords."""
    video = int(GRIDS[1] in mm_kwargs)
    items: list[ItemGeometry]
    if "images_spatial_crop" in mm_kwargs:
        items = [CropGeometry(IMAGE, *crop) for crop in mm_kwargs["images_spatial_crop"].tolist()]
    else:
        items = [GridGeometry(("image", "video")[video], *grid) for grid in mm_kwargs[GRIDS[video]]]
    rows = [item.patches if isinstance(item, GridGeometry) else 1 + item.crops for item in items]  # type: ignore[attr-defined]
    offsets = tuple(int(end) for end in np.concatenate([[0], np.cumsum(rows)]))
    pixels = {"pixel_values": mm_kwargs[PIXELS[video]]}
    return EncoderInputs(tuple(items), pixels, {"pixel_values": offsets}, tuple(range(len(items))))


def keywords_of(inputs: EncoderInputs) -> dict[str, Any]:
    """The call in vLLM's keywords."""
    pixels, items = inputs.rows("pixel_values").materialize(), inputs.chosen
    if isinstance(items[0], CropGeometry):
        crops = [[item.columns, item.rows] for item in items]  # type: ignore[attr-defined]
        return {"pixel_values": pixels, "images_spatial_crop": torch.tensor(crops)}
    video = int(items[0].modality != IMAGE)
    return {PIXELS[video]: pixels, GRIDS[video]: [[item.t, item.h, item.w] for item in items]}  # type: ignore[attr-defined]


class AdaptedModel:
    """One of vLLM's mock models behind this project's protocol; tokens are the rows that its forward gives."""

    def __init__(self, model: Any, device: torch.device, dtype: torch.dtype, max_items: int, max_frames: int) -> None:
        self.model, self.device, self.dtype = model, device, dtype
        self.limits = max_items, max_frames

    def capture_refusal(self) -> str | None:
        return None

    def graph_path(self) -> Any:
        return nullcontext()

    def reserve_for_capture(self, rows: int) -> None:
        pass

    def release_capture(self) -> None:
        pass

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        config = self.model.get_encoder_cudagraph_config()
        return EncoderCudaGraphConfig(tuple(config.modalities), config.out_hidden_size)

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: EncoderInputs) -> list[EncoderItemSpec]:
        specs = self.model.get_encoder_cudagraph_item_specs(keywords_of(mm_kwargs))
        if self.model.postprocess_encoder_output is not None:
            # vLLM's counts have the tokens that join later; budgets here are rows of the graph.
            cells = self.model.encoder_eager_forward(keywords_of(mm_kwargs)).shape[1]
            specs = [ItemSpec(spec.input_size, spec.input_size * cells) for spec in specs]
        return [spec.adapted(item.modality) for spec, item in zip(specs, mm_kwargs.chosen, strict=True)]

    def select_encoder_cudagraph_items(self, mm_kwargs: EncoderInputs, indices: Sequence[int]) -> EncoderInputs:
        chosen = tuple(mm_kwargs.indices[index] for index in indices)
        return EncoderInputs(mm_kwargs.items, mm_kwargs.pixels, mm_kwargs.row_offsets, chosen)

    def prepare_encoder_cudagraph_capture_inputs(self, capacity: GraphKey) -> EncoderCudaGraphCaptureInputs:
        values = self.model.prepare_encoder_cudagraph_capture_inputs(
            capacity.token_budget, *self.limits, self.device, self.dtype
        ).values
        pixels = values["pixel_values"]
        field_of_pixels = PixelField(len(pixels), tuple(pixels.shape[1:]))
        return EncoderCudaGraphCaptureInputs({"pixel_values": field_of_pixels}, {}, {}, {})

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: EncoderInputs, capacity: GraphKey
    ) -> EncoderCudaGraphReplayBuffers:
        return EncoderCudaGraphReplayBuffers({"pixel_values": mm_kwargs.rows("pixel_values")}, {}, {})

    def encoder_cudagraph_forward(
        self, inputs: dict[str, torch.Tensor], scalars: Mapping[str, int], path: str = DEFAULT_PATH
    ) -> Sequence[torch.Tensor]:
        return [self.model.encoder_cudagraph_forward(inputs, path).flatten(0, -2)]

    def encoder_eager_forward(self, mm_kwargs: EncoderInputs, path: str = DEFAULT_PATH) -> torch.Tensor:
        return self.model.encoder_eager_forward(keywords_of(mm_kwargs), path).flatten(0, -2)

    def postprocess_encoder_output(
        self, mm_kwargs: EncoderInputs, outputs: Mapping[str, Sequence[torch.Tensor | None]]
    ) -> list[torch.Tensor]:
        rows = [part for part in outputs[DEFAULT_PATH] if part is not None]
        if self.model.postprocess_encoder_output is None:
            return rows
        found: dict[int, torch.Tensor] = {}
        tiles = sum(1 + item.crops for item in mm_kwargs.chosen)  # type: ignore[attr-defined]
        joined = torch.cat(rows).unflatten(0, (tiles, -1))
        counts = [len(part) for part in rows]
        self.model.postprocess_encoder_output(
            {DEFAULT_PATH: joined}, range(len(rows)), counts, found, False, keywords_of(mm_kwargs)
        )
        return [found[index] for index in range(len(rows))]


class Manager:
    """The names of vLLM's manager; the tests set its attributes themselves, and patch some of its methods."""

    token_budgets: list[int]
    path_token_budgets: dict[str, list[int]]
    max_batch_size: int
    budget_graphs: dict[str, dict[int, Any]]
    model: Any
    device: torch.device
    dtype: torch.dtype
    max_frames_per_batch: int
    graph_hits = graph_misses = 0
    _get_item_specs: Any = None
    _select_items: Any = None
    _run_budget_graph: Any = None
    """What the tests of packing put in."""

    def __init__(self, vllm_config: Any, device: torch.device, dtype: torch.dtype, model: Any) -> None:
        asked = vllm_config.compilation_config
        try:
            settings = resolve_budget_settings(
                model.get_encoder_cudagraph_budget_range(vllm_config),
                asked.encoder_cudagraph_token_budgets,
                asked.encoder_cudagraph_max_vision_items_per_batch,
                asked.encoder_cudagraph_max_frames_per_batch,
                video_limit_per_prompt=vllm_config.model_config.multimodal_config.get_limit_per_prompt("video"),
            )
        except BudgetError as error:
            raise ValueError(str(error)) from error
        self.token_budgets, self.max_batch_size = list(settings.token_budgets), settings.max_items

    @staticmethod
    def _generate_budgets(smallest: int, largest: int) -> list[int]:
        return generate_budgets(smallest, largest)

    def _find_smallest_fitting_budget_given_tokens(self, tokens: int) -> int | None:
        return select_budget(self.token_budgets, tokens)

    def get_num_graphs_to_capture(self) -> int:
        return len(self._plan().graph_keys())

    def get_cumulative_stats(self) -> dict[str, Any]:
        counters = GraphCounters(self.graph_hits + self.graph_misses, self.graph_hits)
        return {
            "graph_hits": self.graph_hits,
            "graph_misses": self.graph_misses,
            "hit_rate": counters.hit_rate or 0.0,
            "num_budgets": sum(map(len, self.budget_graphs.values())),
            "token_budgets": self.token_budgets,
        }

    def _plan(self) -> BudgetPlan:
        budgets = {path: tuple(filter(None, own)) for path, own in self.path_token_budgets.items()}
        tiers = {(path, budget): (1,) for path, own in budgets.items() for budget in own}
        # Frames are not limited by themselves: the mocks attend to nothing.
        return BudgetPlan(budgets, self.max_batch_size, 10**6, tiers, segment_free_paths=frozenset(budgets))

    def _execute_local(self, mm_kwargs: Any) -> list[Any]:
        specs = self._get_item_specs(mm_kwargs)
        outputs: dict[int, Any] = {}
        for batch in pack_items([spec.adapted() for spec in specs], self._plan(), POLICY):
            kwargs, axis_keys = self._select_items(mm_kwargs, list(batch.items))
            rows = {}
            for path, run in batch.runs.items():
                if run.key is not None:
                    rows[path] = self._run_budget_graph(kwargs, run.key.token_budget, path, axis_keys)
                else:
                    rows[path] = self.model.encoder_eager_forward(kwargs, path)
            self._count([[batch]])
            counts = [spec.output_tokens for spec in specs]
            self.model.postprocess_encoder_output(rows, list(batch.items), counts, outputs, True, kwargs)
        return [outputs[index] for index in range(len(specs))]

    def _count(self, calls: Sequence[Any]) -> None:
        counters = count_calls(calls)
        self.graph_hits += counters.hits
        self.graph_misses += counters.misses

    def capture(self, graph_pool: Any = None) -> None:
        limits = self.max_batch_size, self.max_frames_per_batch
        adapted = AdaptedModel(self.model, self.device, self.dtype, *limits)
        self.manager = EncoderCudaGraphManager(adapted, self._plan(), policy=POLICY)
        self.manager.capture()
        for key, graph in self.manager.graphs.items():
            self.budget_graphs[key.path][key.token_budget] = graph

    def clear(self) -> None:
        self.manager.clear()
        self.budget_graphs = {path: {} for path in self.budget_graphs}

    def execute(self, mm_kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        inputs = inputs_of(mm_kwargs)
        outputs = self.manager.execute(inputs)
        self._count([self.manager.plan_call(inputs).batches])
        return outputs


class CompilationConfig:
    """The one check of vLLM's configuration that its tests of the manager ask for."""

    def __init__(self, encoder_cudagraph_token_budgets: Sequence[int]) -> None:
        try:
            validate_budgets(encoder_cudagraph_token_budgets)
        except BudgetError as error:
            raise ValueError(str(error)) from error


PLATFORM = SimpleNamespace(
    device_type="cuda" if torch.cuda.is_available() else "cpu",
    # A CPU records calls and replays them in place of a graph, so these tests run there too.
    is_cuda_alike=lambda: True,
    is_cuda=lambda: True,
    is_xpu=lambda: False,
    graph_pool_handle=object,
)
MODULES: Mapping[str, Mapping[str, Any]] = {
    "vllm": {},
    "vllm.model_executor": {},
    "vllm.model_executor.models": {},
    "vllm.model_executor.models.interfaces": {"SupportsEncoderCudaGraph": Protocol},
    "vllm.platforms": {"current_platform": PLATFORM},
    "vllm.config": {},
    "vllm.config.compilation": {"CompilationConfig": CompilationConfig},
    "vllm.v1": {},
    "vllm.v1.worker": {},
    "vllm.v1.worker.encoder_cudagraph": {"EncoderCudaGraphManager": Manager},
    "vllm.v1.worker.encoder_cudagraph_defs": {
        "EncoderCudaGraphCaptureInputs": Values,
        "EncoderCudaGraphConfig": Config,
        "EncoderCudaGraphReplayBuffers": Values,
        "EncoderItemSpec": ItemSpec,
    },
}
for name, contents in MODULES.items():
    module = sys.modules.setdefault(name, ModuleType(name))
    vars(module).update(contents, __path__=[])
