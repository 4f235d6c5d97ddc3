"""What vLLM's model files ask of a list of budgets, by family: facts read from its wheel, as data.

Legend: b is a token budget, `items` and `frames` are `encoder_cudagraph_max_vision_items_per_batch` and
`..._max_frames_per_batch`, and m is the spatial merge size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

ENGINE = "vLLM 0.33.0"
"""What the rules were read from."""

MANAGER_FILE = "v1/worker/encoder_cudagraph.py"
"""Where the manager's own rules were read, inside the wheel's `vllm/`."""


@dataclass(frozen=True, slots=True)
class EngineTower:
    """What the rules need to know of a tower.

    Attributes:
        architecture: As config.json names it.
        merge: Patches along one side of an output token.
        path_tokens: Output tokens of one unit (item, tile, crop) on each path.
        tokens_per_segment: Fewest output tokens of an attention segment.
        segments_per_video: Segments of the longest video; 0 where videos are not taken.
        crops: Crops that an image may bring beside its whole view.
    """

    architecture: str
    merge: int
    path_tokens: Mapping[str, int]
    tokens_per_segment: int = 1
    segments_per_video: int = 0
    crops: int = 0

    @property
    def unit(self) -> int:
        """Output tokens of the smallest unit."""
        return min(self.path_tokens.values())


@dataclass(frozen=True, slots=True)
class BudgetLimit:
    """The largest budget that a family can hold at given limits.

    Attributes:
        name: Of the rule.
        text: What must hold, in words.
        most: Largest budget, from the tower, the items and the frames.
    """

    name: str
    text: str
    most: Callable[[EngineTower, int, int], int]


def _row_limit(positions: int) -> BudgetLimit:
    def most(tower: EngineTower, items: int, frames: int) -> int:
        return items * max(1, frames // items) * (positions // tower.merge)

    text = (
        f"the capture batch has one row of patches an item, m x (b / items) wide, over frames // items where that is "
        f"above 1; the rotary table has {positions:,} positions, and a wider row ends the engine at start"
    )
    return BudgetLimit("rotary-table", text, most)


def _grid_limit(side: int) -> BudgetLimit:
    text = (
        f"the capture batch is shaped within a position table of {side} x {side} patches, so that b / items is at most "
        f"({side} // m) squared; above it the engine stops at start"
    )
    return BudgetLimit("position-grid", text, lambda tower, items, _: items * (side // tower.merge) ** 2)


def _most_crops(tower: EngineTower, items: int, _: int) -> int:
    # Without crops every item is one unit, and a batch has no more units than items.
    return (items + 1) * tower.unit - 1 if tower.crops else 2**31


_ROW, _GRID = _row_limit(8192), _grid_limit(512)
_CROPS = BudgetLimit(
    "crops-of-an-item",
    "a graph holds min(b // tokens of a crop, items) crops, so that with pan-and-scan an item of more crops than items "
    "overflows it, unless its tokens are above every budget",
    _most_crops,
)


@dataclass(frozen=True, slots=True)
class EngineFamily:
    """What vLLM's model file asks of a list.

    Attributes:
        name: For people.
        architectures: Values of `architectures` in config.json.
        file: Where it was read, inside the wheel's `vllm/`.
        limits: Largest budgets.
        rounds_down: Buffers hold items x (b // items) tokens, fewer than b unless items divides it.
        needs_whole_unit: A budget below one unit captures an empty batch.
        segments_held: Attention segments that a graph holds, from items and frames; None without such a size.
        note: What else was read, in words.
    """

    name: str
    architectures: tuple[str, ...]
    file: str
    limits: tuple[BudgetLimit, ...] = ()
    rounds_down: bool = False
    needs_whole_unit: bool = False
    segments_held: Callable[[int, int], int] | None = None
    note: str = ""


def _frame_slots(items: int, frames: int) -> int:
    return max(items * max(1, frames // items), frames)


_NO_LIMIT = "the buffers are sized by the budget alone; no limit was found"
_PATHS = "each path's budgets double from one unit of it to the largest budget given, which is all that a list sets"
_NO_TABLE = "rotary positions are computed for the capture batch; no limit was found"
_SLICES_AN_ITEM = 10

FAMILIES: tuple[EngineFamily, ...] = (
    EngineFamily(
        "Qwen2-VL",
        ("Qwen2VLForConditionalGeneration",),
        "model_executor/models/qwen2_vl.py",
        (_ROW,),
        segments_held=_frame_slots,
    ),
    EngineFamily(
        "Qwen2.5-VL, OpenCUA, EXAONE 4.5",
        (
            "Qwen2_5_VLForConditionalGeneration",
            "OpenCUAForConditionalGeneration",
            "Exaone4_5_ForConditionalGeneration",
        ),
        "model_executor/models/qwen2_5_vl.py",
        (_ROW,),
        segments_held=_frame_slots,
    ),
    EngineFamily(
        "Qwen3-VL, Qwen3.5, Cosmos 3",
        (
            "Qwen3VLForConditionalGeneration",
            "Qwen3VLMoeForConditionalGeneration",
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForConditionalGeneration",
            "Cosmos3ForConditionalGeneration",
        ),
        "model_executor/models/qwen3_vl.py",
        (_ROW,),
        segments_held=_frame_slots,
    ),
    EngineFamily(
        "GLM-4.1V, GLM-4.5V, GLM-4.6V, GLM-OCR",
        (
            "Glm4vForConditionalGeneration",
            "Glm4vMoeForConditionalGeneration",
            "Glm46VForConditionalGeneration",
            "GlmOcrForConditionalGeneration",
        ),
        "model_executor/models/glm4_1v.py",
        (_ROW,),
        rounds_down=True,
        segments_held=_frame_slots,
    ),
    EngineFamily(
        "GLM-5.3-Flash",
        ("Glm5NextForConditionalGeneration",),
        "models/glm5next/common/model.py",
        rounds_down=True,
        segments_held=_frame_slots,
        note="captures as GLM-4.1V does; the rotary table is as long as the text model's positions",
    ),
    EngineFamily(
        "Cohere Compass",
        ("CohereCompassForConditionalGeneration",),
        "model_executor/models/cohere_compass.py",
        (_ROW,),
        note="images only",
    ),
    EngineFamily("Kimi-VL", ("KimiVLForConditionalGeneration",), "model_executor/models/kimi_vl.py", (_GRID,)),
    EngineFamily(
        "Kimi-K2.5",
        ("KimiK25ForConditionalGeneration",),
        "model_executor/models/kimi_k25.py",
        (_GRID,),
        note="chunks of a video run eagerly",
    ),
    EngineFamily("Kimi-K3", ("KimiK3ForConditionalGeneration",), "models/kimi_k3/nvidia/model.py", (_GRID,)),
    EngineFamily(
        "ERNIE-4.5-VL",
        ("Ernie4_5_VLMoeForConditionalGeneration", "Ernie4_5_VL_MoeForConditionalGeneration"),
        "model_executor/models/ernie45_vl.py",
        note=f"{_NO_TABLE}; videos run eagerly",
    ),
    EngineFamily(
        "InternVL",
        ("InternVLChatModel", "H2OVLChatModel", "NVLM_D", "QianfanOCRForConditionalGeneration"),
        "model_executor/models/internvl.py",
        note=_NO_LIMIT,
    ),
    EngineFamily(
        "Gemma 3",
        ("Gemma3ForConditionalGeneration",),
        "model_executor/models/gemma3_mm.py",
        (_CROPS,),
        needs_whole_unit=True,
    ),
    EngineFamily(
        "Gemma 4",
        ("Gemma4ForConditionalGeneration",),
        "model_executor/models/gemma4_mm.py",
        segments_held=max,
        note="one graph a budget and row width; rows are min(max(items, frames), b // width)",
    ),
    EngineFamily("Llama 4", ("Llama4ForConditionalGeneration",), "model_executor/models/mllama4.py", note=_NO_LIMIT),
    EngineFamily(
        "MiniCPM-V",
        ("MiniCPMV", "MiniCPMO"),
        "model_executor/models/minicpmv.py",
        segments_held=lambda items, frames: _SLICES_AN_ITEM * max(items, frames),
        note=f"one graph a budget and patch grid; slices are min(b // queries, {_SLICES_AN_ITEM} x max(items, frames))",
    ),
    EngineFamily(
        "DeepSeek-OCR",
        ("DeepseekOCRForCausalLM", "UnlimitedOCRForCausalLM"),
        "model_executor/models/deepseek_ocr.py",
        note=_PATHS,
    ),
    EngineFamily(
        "Step3-VL",
        ("StepVLForConditionalGeneration", "Step3VLForConditionalGeneration", "Step3p7ForConditionalGeneration"),
        "model_executor/models/step3_vl.py",
        note=_PATHS,
    ),
    EngineFamily("DeepSeek-VL2", ("DeepseekVLV2ForCausalLM",), "model_executor/models/deepseek_vl2.py", note=_NO_LIMIT),
    EngineFamily(
        "DeepSeek-V4.1",
        ("DeepseekV41ForCausalLM",),
        "models/deepseek_v41/common/vl_cudagraph.py",
        note=_NO_TABLE,
    ),
    EngineFamily(
        "Idefics3, SmolVLM",
        ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"),
        "model_executor/models/idefics3.py",
        note=_NO_LIMIT,
    ),
    EngineFamily(
        "LFM2-VL",
        ("Lfm2VlForConditionalGeneration",),
        "model_executor/models/lfm2_vl.py",
        note="one attention segment for each min_image_tokens of a budget; tiles below that size could outnumber them",
    ),
    EngineFamily(
        "MiniMax-M3",
        ("MiniMaxM3SparseForConditionalGeneration",),
        "models/minimax_m3/common/encoder_cudagraph.py",
        note=f"{_NO_TABLE}; only FlashAttention can be captured",
    ),
)

WITHOUT_GRAPHS = {
    "LightOnOCRForConditionalGeneration": "model_executor/models/lightonocr.py",
    "LlavaForConditionalGeneration": "model_executor/models/llava.py",
    "LlavaOnevisionForConditionalGeneration": "model_executor/models/llava_onevision.py",
    "Molmo2ForConditionalGeneration": "model_executor/models/molmo2.py",
    # Not among the engine's own models: what runs it captures nothing.
    "Ovis2ForConditionalGeneration": "model_executor/models/registry.py",
    "Mistral3ForConditionalGeneration": "model_executor/models/mistral3.py",
    "InternVLForConditionalGeneration": "model_executor/models/interns1.py",
    "Qwen2_5OmniModel": "model_executor/models/qwen2_5_omni_thinker.py",
    "Qwen2_5OmniForConditionalGeneration": "model_executor/models/qwen2_5_omni_thinker.py",
    "Qwen3OmniMoeForConditionalGeneration": "model_executor/models/qwen3_omni_moe_thinker.py",
}
"""Architectures whose encoder the engine always runs eagerly, and where that was read."""
