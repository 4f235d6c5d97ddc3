"""Which settings vLLM can capture and replay, by family: facts read from its wheel, and the check of a list.

A list that breaks one of these rules does not run slower: it ends the server, at start or at the first call that its
buffers do not hold.

Legend: b is a token budget, `items` and `frames` are `encoder_cudagraph_max_vision_items_per_batch` and
`..._max_frames_per_batch`, and m is the spatial merge size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from vitgraph.models.registry import ModelSource
from vitgraph.planning.items import VIDEO
from vitgraph.predict.targets import Settings

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


def engine_tower(source: ModelSource) -> EngineTower:
    """The facts of a model; needs no torch."""
    config, graphs = source.vision_config, source.rule().graph_config()
    merge = config.get("spatial_merge_size") or config.get("merge_kernel_size") or 1
    has_crops = bool(source.processor.get("do_pan_and_scan"))
    return EngineTower(
        source.architecture,
        int(merge[0] if isinstance(merge, list | tuple) else merge),
        {path: policy.min_token_budget for path, policy in graphs.paths.items()},
        graphs.min_tokens_per_segment,
        graphs.max_frames_per_video if VIDEO in graphs.modalities else 0,
        int(source.processor.get("pan_and_scan_max_num_crops", 0)) if has_crops else 0,
    )


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
    "InternVLForConditionalGeneration": "model_executor/models/interns1.py",
    "Qwen2_5OmniModel": "model_executor/models/qwen2_5_omni_thinker.py",
    "Qwen2_5OmniForConditionalGeneration": "model_executor/models/qwen2_5_omni_thinker.py",
    "Qwen3OmniMoeForConditionalGeneration": "model_executor/models/qwen3_omni_moe_thinker.py",
}
"""Architectures whose encoder the engine always runs eagerly, and where that was read."""

ITEMS_RULE = "items may not exceed the smallest budget: the manager refuses to start"
PATH_RULE = "the largest budget holds one unit of every path: the manager refuses to start"
ROUNDING_RULE = (
    "buffers hold items x (b // items) tokens, fewer than b unless items divides it; a batch of more tokens overflows "
    "them"
)
UNIT_RULE = "a budget below one item captures an empty batch"
FRAMES_RULE = (
    "the manager packs by tokens and items alone, and frames 0 is a size, not a switch: a batch of videos with more "
    "segments than a graph holds overflows it. Where videos may come, a graph holds the segments of items videos of "
    "the greatest length, or of a whole budget; where not, --limit-mm-per-prompt turns them off"
)


@dataclass(frozen=True, slots=True)
class BrokenRule:
    """One rule that settings break.

    Attributes:
        name: Of the rule.
        text: The values, the rule, where it was read, and a way out.
    """

    name: str
    text: str


@dataclass(slots=True)
class EngineRules:
    """The rules of one tower.

    Attributes:
        tower: Its facts.
        has_videos: Whether videos may come.
        ruled_out: How often a rule changed or refused settings that were asked about, by its name.
    """

    tower: EngineTower
    has_videos: bool
    ruled_out: Counter[str] = field(default_factory=Counter)

    @property
    def family(self) -> EngineFamily | None:
        """The family's facts; None where the engine has no encoder graphs for it, or none that were read."""
        return next((family for family in FAMILIES if self.tower.architecture in family.architectures), None)

    def largest_budget(self, items: int, frames: int) -> tuple[int, str | None]:
        """The largest budget that can be captured at these limits, and the rule that sets it; None without one."""
        limits = self.family.limits if self.family else ()
        found = min(((limit.most(self.tower, items, frames), limit.name) for limit in limits), default=(2**31, None))
        return found if found[0] < 2**31 else (2**31, None)

    def least_frames(self, items: int, largest: int) -> int:
        """The fewest frames with which no batch of videos can overflow a graph; 0 where no video comes."""
        held = self.family.segments_held if self.family else None
        if held is None or not (self.has_videos and self.tower.segments_per_video):
            return 0
        needed = self._most_segments(items, largest)
        return next(frames for frames in (1, -(-needed // held(1, 1))) if held(items, frames) >= needed)

    def _most_segments(self, items: int, largest: int) -> int:
        by_length = items * self.tower.segments_per_video
        return min(by_length, largest // self.tower.tokens_per_segment)

    def broken(self, settings: Settings) -> list[BrokenRule]:
        """Every rule that settings break, each once, with the first value that breaks it."""
        family, items, frames = self.family, settings.max_items, settings.max_frames
        budgets, tower = settings.token_budgets, self.tower
        where = f"{ENGINE}, {family.file if family else MANAGER_FILE}"
        found: list[BrokenRule] = []

        def add(name: str, value: str, rule: str, way_out: str, source: str = where) -> None:
            found.append(BrokenRule(name, f"{value}: {rule} ({source}); {way_out}"))

        if items > min(budgets):
            smallest = min(budgets)
            add(
                "items-within-budget",
                f"{items} items with a budget of {smallest}",
                ITEMS_RULE,
                f"use at most {smallest} items",
                f"{ENGINE}, {MANAGER_FILE}",
            )
        largest = max(budgets)
        if len(tower.path_tokens) > 1 and largest < max(tower.path_tokens.values()):
            least = max(tower.path_tokens.values())
            add("path-minimum", f"largest budget {largest}", PATH_RULE, f"use a budget of {least} or more")
        if family is None:
            return found
        for limit in family.limits:
            most = limit.most(tower, items, frames)
            if largest > most:
                value = f"budget {largest} with {items} items and {frames} frames"
                add(limit.name, value, limit.text, f"use budgets up to {most}, or more items")
        odd = next((budget for budget in budgets if budget % items), None) if family.rounds_down else None
        if odd is not None:
            rounded = -(-odd // items) * items
            add("floor-division", f"budget {odd} with {items} items", ROUNDING_RULE, f"use {rounded}")
        if family.needs_whole_unit and min(budgets) < tower.unit:
            add("whole-item", f"budget {min(budgets)}", UNIT_RULE, f"use {tower.unit} or more")
        least = self.least_frames(items, largest)
        if (
            family.segments_held is not None
            and least
            and family.segments_held(items, frames) < self._most_segments(items, largest)
        ):
            value = f"{frames} frames with {items} items and a budget of {largest}"
            add("frames-held", value, FRAMES_RULE, f"use {least} frames, or leave them unset")
        return found

    def conform(self, settings: Settings) -> Settings | None:
        """The nearest settings that break no rule, or None where no budget is left."""
        items = settings.max_items
        frames = self.least_frames(items, max(settings.token_budgets))
        most, name = self.largest_budget(items, frames)
        budgets = sorted({self.usable(budget, items) for budget in settings.token_budgets})
        kept = tuple(budget for budget in budgets if items <= budget <= most)
        if name and budgets[-1] > most:
            self.ruled_out[name] += 1
        if not kept:
            return None
        found = replace(settings, token_budgets=kept, max_frames=self.least_frames(items, kept[-1]))
        broken = self.broken(found)
        for rule in broken:
            self.ruled_out[rule.name] += 1
        return None if broken else found

    def usable(self, budget: int, items: int) -> int:
        """The smallest budget from `budget` on whose buffers hold all of it."""
        return -(-budget // items) * items if self.family and self.family.rounds_down else budget

    def least_items(self, tokens: int) -> int:
        """The fewest items with which a budget of `tokens` can be captured."""
        items = 1
        while self.largest_budget(items, 0)[0] < tokens:
            items += 1
        return items


def rules_table() -> str:
    """The rules by family, as a Markdown table for the documentation."""
    rows = ["| family | read from | what a list must keep |", "|---|---|---|"]
    rows.append(f"| every family | `{MANAGER_FILE}` | {ITEMS_RULE}. Models of two paths: {PATH_RULE} |")
    for family in FAMILIES:
        texts = [limit.text for limit in family.limits]
        texts += [ROUNDING_RULE] if family.rounds_down else []
        texts += [UNIT_RULE] if family.needs_whole_unit else []
        texts += ["frames hold the longest videos (below)"] if family.segments_held else []
        texts += [family.note] if family.note else []
        rows.append(f"| {family.name} | `{family.file}` | {'. '.join(text[0].upper() + text[1:] for text in texts)} |")
    eager = ", ".join(f"{name} (`{file}`)" for name, file in WITHOUT_GRAPHS.items())
    return "\n".join([*rows, "", f"Frames: {FRAMES_RULE}.", "", f"Without encoder graphs there: {eager}."])
