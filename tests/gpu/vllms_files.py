"""vLLM 0.33.0's own encoder-graph manager, with the Qwen3-VL methods that it calls, around a tower of this project.

Three files of the wheel are read at run time: `encoder_cudagraph.py` and `encoder_cudagraph_defs.py` of
`vllm/v1/worker`, and `qwen3_vl.py` of `vllm/model_executor/models`. Nothing of them is kept here.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from logging import getLogger
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from vitgraph.graphs.capture import HostGraph
from vitgraph.models.families.qwen3_vl import Qwen3VLEncoder
from vitgraph.planning.budgets import DEFAULT_PATH
from vitgraph.predict.engine_rules import POSITIONS

METHODS = {
    "Qwen3_VisionTransformer": {
        *("rot_pos_ids", "rot_pos_emb", "fast_pos_embed_interpolate", "prepare_encoder_metadata"),
    },
    "Qwen3VLForConditionalGeneration": {
        *("get_encoder_cudagraph_config", "get_encoder_cudagraph_item_specs", "select_encoder_cudagraph_items"),
        *("prepare_encoder_cudagraph_capture_inputs", "prepare_encoder_cudagraph_replay_buffers"),
        *("encoder_cudagraph_forward", "encoder_eager_forward"),
        *("get_input_modality", "_get_pixel_values_by_modality", "_get_grid_thw_by_modality"),
    },
}
"""What is taken of each class of vLLM's model file; the rest of it needs all of vLLM."""


class Attention:
    """What vLLM's attention layer makes of the offsets of segments for FlashAttention."""

    @staticmethod
    def compute_max_seqlen(_backend: str, offsets: np.ndarray) -> int:
        return int(np.diff(offsets).max(initial=0))

    @staticmethod
    def maybe_compute_seq_lens(*_: Any) -> None:
        return None

    @staticmethod
    def maybe_recompute_cu_seqlens(
        _backend: str, offsets: np.ndarray, _hidden_size: int, _tp_size: int, device: torch.device, **_: Any
    ) -> torch.Tensor:
        found = torch.from_numpy(offsets)
        return found if device.type == "cpu" else found.pin_memory().to(device, non_blocking=True)


def smallest_of(budgets: Sequence[int], tokens: int) -> int | None:
    """The smallest of ascending budgets that holds the tokens; None where none does."""
    place = bisect_left(budgets, tokens)
    return budgets[place] if place < len(budgets) else None


def split_rows(
    rows: torch.Tensor, items: Sequence[int], tokens: Sequence[int], found: dict[int, torch.Tensor], clone: bool = False
) -> None:
    """Puts the rows `[at least their tokens, D]` of the items of a batch where they belong."""
    counts = [tokens[item] for item in items]
    for item, part in zip(items, rows[: sum(counts)].split(counts), strict=True):
        found[item] = part.clone() if clone else part


LENT: Mapping[str, Mapping[str, Any]] = {
    "vllm.config": {"VllmConfig": object},
    "vllm.distributed": dict.fromkeys(
        ("get_tensor_model_parallel_rank", "get_tensor_model_parallel_world_size", "tensor_model_parallel_all_gather")
    ),
    "vllm.logger": {"init_logger": getLogger},
    "vllm.model_executor.models.interfaces": {"SupportsEncoderCudaGraph": object},
    "vllm.model_executor.models.utils": {"scatter_output_slices": split_rows},
    "vllm.model_executor.models.vision": {"get_load_balance_assignment": None},
    "vllm.utils.gpu_sync_debug": {"gpu_sync_allowed": nullcontext},
    "vllm.utils.math_utils": {"round_up_to": smallest_of},
    "vllm.utils.torch_utils": {
        "current_stream": lambda: torch.cuda.current_stream() if torch.cuda.is_available() else None
    },
}
"""What the manager's file imports of the rest of vLLM, as far as one process needs it."""


def new_module(name: str, contents: Mapping[str, Any]) -> ModuleType:
    """A module that can be imported by that name."""
    sys.modules[name] = module = ModuleType(name)
    vars(module).update(contents)
    return module


def load_file(name: str, file: Path) -> ModuleType:
    """A file as the module of that name."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Tower:
    """This project's tower under the names that vLLM's methods of a tower read."""

    attn_backend = "FLASH_ATTN"
    tp_size, fp8_padded_hidden_size = 1, None
    prepare_encoder_metadata: Any

    def __init__(self, encoder: Qwen3VLEncoder) -> None:
        tower, rule, table = encoder.visual, encoder.rule, encoder.table
        assert table is not None
        self.encoder, self.device, self.dtype = encoder, encoder.device, encoder.dtype
        self.spatial_merge_size, self.num_grid_per_side = rule.merge, table.side(rule)
        self.hidden_size, self.out_hidden_size = rule.vision_config["hidden_size"], rule.output_width
        self.pos_embed, self.input_norm = tower.pos_embed, SimpleNamespace(input_dtype=None)
        self.patch_embed = SimpleNamespace(
            proj=SimpleNamespace(in_channels=rule.channels), patch_size=rule.patch, temporal_patch_size=rule.temporal
        )
        angles = torch.outer(torch.arange(POSITIONS, device=self.device), tower.rotary_pos_emb.inv_freq)
        cos, sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        self.rotary_pos_emb = SimpleNamespace(get_cos_sin=lambda size: (cos[:size], sin[:size]))
        self._rot_pos_ids_cache: dict[Hashable, torch.Tensor] = {}

    def __call__(
        self, pixels: torch.Tensor, grids: Any, *, encoder_metadata: Mapping[str, Any] | None = None
    ) -> torch.Tensor:
        """The encoder's rows `[M, D]` with the metadata that vLLM has made."""
        found = self.prepare_encoder_metadata(grids) if encoder_metadata is None else encoder_metadata
        # In float32 as this project's own, or compiled blocks would be compiled once more.
        angles = [
            torch.cat([half, half], -1).float() for half in (found["rotary_pos_emb_cos"], found["rotary_pos_emb_sin"])
        ]
        with self.encoder.attention.one_forward():
            parts = self.encoder.forward_embedded(
                self.encoder.visual.patch_embed(pixels),
                found["pos_embeds"],
                cu_seqlens=found["cu_seqlens"],
                max_seqlen=int(found["max_seqlen"]),
                position_embeddings=tuple(angles),
            )
        return torch.cat(list(parts), dim=1)


class Model:
    """What vLLM's manager asks of a model beside the methods of its file: images alone, on one GPU."""

    is_multimodal_pruning_enabled = False

    def __init__(self, visual: Any) -> None:
        self.visual = visual

    def get_max_frames_per_video(self) -> int:
        return 1

    def encoder_cudagraph_forward(self, values: dict[str, torch.Tensor], path: str = DEFAULT_PATH) -> torch.Tensor:
        with self.visual.encoder.graph_path():
            rows: torch.Tensor = super().encoder_cudagraph_forward(values, path)  # type: ignore[misc]
        return rows

    def postprocess_encoder_output(
        self,
        outputs: Mapping[str, torch.Tensor],
        items: Sequence[int],
        tokens: Sequence[int],
        found: dict[int, torch.Tensor],
        clone: bool = False,
        **_: Any,
    ) -> None:
        split_rows(outputs[DEFAULT_PATH], items, tokens, found, clone)


class VllmsManagers:
    """vLLM's managers around one encoder, by their lists; all live until the end.

    torch frees the workspace that all graphs of a stream write to when it resets one of them.

    Args:
        folder: The three files.
        encoder: The tower to run.
    """

    def __init__(self, folder: Path, encoder: Qwen3VLEncoder) -> None:
        for name, contents in LENT.items():
            new_module(name, contents)
        defs = load_file("vllm.v1.worker.encoder_cudagraph_defs", folder / "encoder_cudagraph_defs.py")
        self._manager = load_file("vllm.v1.worker.encoder_cudagraph", folder / "encoder_cudagraph.py")
        self._is_cuda, self.encoder = encoder.device.type == "cuda", encoder
        if not self._is_cuda:
            no_graphs = SimpleNamespace(CUDAGraph=object, graph=lambda *_, **__: nullcontext())
            vars(self._manager)["torch"] = SimpleNamespace(**{**vars(torch), "cuda": no_graphs})
        file = self._model_file(folder / "qwen3_vl.py", vars(defs))
        visual = type("Visual", (Tower, file.Qwen3_VisionTransformer), {})(encoder)
        self.model: Any = type("Asked", (Model, file.Qwen3VLForConditionalGeneration), {})(visual)
        self._made: dict[tuple[tuple[int, ...], int], tuple[Any, dict[str, float]]] = {}

    def _model_file(self, file: Path, defs: Mapping[str, Any]) -> ModuleType:
        """The parts of vLLM's model file that are wanted; lines keep their numbers, which Triton reads kernels by."""
        names = {"np": np, "torch": torch, "Any": Any, "Hashable": Hashable, "Sequence": Sequence, **defs}
        names |= {"MMEncoderAttention": Attention, "HAS_TRITON": self._is_cuda, "PIN_MEMORY": self._is_cuda}
        if self._is_cuda:
            import triton

            names |= {"triton": triton, "tl": triton.language}
        kept: list[ast.stmt] = []
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name in METHODS:
                node.bases, node.keywords, node.decorator_list = [], [], []
                node.body = [one for one in node.body if getattr(one, "name", None) in METHODS[node.name]]
                kept.append(node)
            elif getattr(node, "name", None) == "pos_embed_interpolate_native" or (
                isinstance(node, ast.If) and ast.unparse(node.test) == "HAS_TRITON"
            ):
                kept.append(node)
        module = new_module("vllm.model_executor.models.qwen3_vl", names)
        # Triton reads annotations as they are, and not as text.
        exec(compile(ast.Module(kept, []), str(file), "exec", dont_inherit=True), vars(module))
        return module

    def reserve(self, lists: Sequence[tuple[Sequence[int], int]]) -> None:
        """To be called with all lists before the first is captured: graphs share what the attention writes to."""
        rows = max(items * -(-max(budgets) // items) for budgets, items in lists)
        self.encoder.reserve_for_capture(rows * self.encoder.rule.merge**2)

    def captured(self, budgets: Sequence[int], items: int) -> tuple[Any, dict[str, float]]:
        """The manager of a list, and what capturing took."""
        key = tuple(budgets), items
        if key not in self._made:
            started, before = time.perf_counter(), self._reserved_bytes()
            manager = self._manager.EncoderCudaGraphManager(
                _config(budgets, items), self.encoder.device, self.encoder.dtype, self.model
            )
            manager.capture(torch.cuda.graph_pool_handle() if self._is_cuda else object())
            for graph in manager.budget_graphs[DEFAULT_PATH].values() if not self._is_cuda else ():
                graph.graph = HostGraph(self._stand_in(graph))
            facts = {"capture_s": time.perf_counter() - started, "reserved_bytes": self._reserved_bytes() - before}
            self._made[key] = manager, {**facts, "budgets": len(budgets), "items": items}
        return self._made[key]

    def _stand_in(self, graph: Any) -> Callable[[], None]:
        return lambda: graph.output_buffer.copy_(self.model.encoder_cudagraph_forward({**graph.input_buffers}))

    def _reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved() if self._is_cuda else 0


def _config(budgets: Sequence[int], items: int) -> SimpleNamespace:
    """A list as vLLM's configuration holds it."""
    graphs = SimpleNamespace(
        encoder_cudagraph_token_budgets=list(budgets),
        encoder_cudagraph_max_vision_items_per_batch=items,
        encoder_cudagraph_max_frames_per_batch=None,
    )
    media = SimpleNamespace(mm_encoder_tp_mode="weights", get_limit_per_prompt=lambda _: 0)
    return SimpleNamespace(
        compilation_config=graphs,
        model_config=SimpleNamespace(multimodal_config=media),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )
