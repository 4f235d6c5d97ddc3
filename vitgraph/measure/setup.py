"""Sets an encoder up for measuring: device, dtype, backend, weights, budgets, graphs, monolithic ones too."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vitgraph.errors import BudgetError, UsageError
from vitgraph.measure.calls import EncoderCall
from vitgraph.models.geometry import GeometryRule
from vitgraph.models.registry import ROWS, ModelSource, resolve_model
from vitgraph.models.two_path import GLOBAL, LOCAL, MonolithicRule, TwoPathRule
from vitgraph.planning.accounting import GraphCounters, waste_of
from vitgraph.planning.budgets import VIDEO, BudgetPlan, BudgetSettings, EncoderItemSpec, resolve_budget_settings
from vitgraph.planning.packing import pack_items
from vitgraph.predict.engine_rules import ENGINE, EngineRules, engine_tower
from vitgraph.predict.targets import TARGETS, VITGRAPH, encoder_facts, make_plan
from vitgraph.records.sections import Compiled, Encoder, MonolithicPlan
from vitgraph.specs.asked import BenchSpec
from vitgraph.specs.parts import GraphSpec, ModelSpec

if TYPE_CHECKING:
    import torch

    from vitgraph.attention.base import AttentionBackend
    from vitgraph.models.encoder import VisionEncoder

AUTO_BACKEND = "auto"
"""What is asked for where the choice of the attention backend is left open."""


def resolve_source(spec: ModelSpec) -> ModelSource:
    """The model that a spec names, with the processor's overrides applied; needs no torch."""
    source = resolve_model(spec.model, revision=spec.revision)
    if spec.mm_processor_kwargs:
        from vitgraph.models.processor_overrides import override_processor

        source = override_processor(source, spec.mm_processor_kwargs)
    return source


def resolve_device(name: str) -> torch.device:
    """The device that `--device` names; `auto` is the first GPU, or the CPU.

    Raises:
        UsageError: Not a device, or not there.
    """
    import torch

    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise UsageError(f"--device is {name!r}; use auto, cpu, cuda or cuda:N")
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UsageError(f"--device is {name}, but torch sees no GPU here (torch {torch.__version__}); use cpu")
        device = torch.device("cuda", device.index or 0)
        if device.index >= torch.cuda.device_count():
            raise UsageError(f"--device is {name}, but there are {torch.cuda.device_count()} GPUs, counted from 0")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype that `--dtype` names; `auto` is bfloat16 on a GPU and float32 on a CPU."""
    import torch

    from vitgraph.models.loading import DTYPES

    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise UsageError(f"--dtype is {name!r}; known: auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def check_model(source: ModelSource, spec: ModelSpec, *, runs: bool = True) -> None:
    """Refuses what this machine cannot run, without loading anything; choices that are left open cannot be wrong.

    Args:
        runs: The tower runs here; where it is only predicted, it may ask for what this machine lacks.

    Raises:
        UsageError: A device that is not there, or an unknown dtype.
        BackendError: An attention backend that is unknown, not available here, or unfit for the tower.
    """
    is_open = spec.attn_backend == AUTO_BACKEND and spec.flash_attn_version is None
    if is_open and spec.device == spec.dtype == "auto":
        return
    device = resolve_device(spec.device if runs else "cpu")
    dtype = resolve_dtype(spec.dtype, device)
    if runs and not is_open:
        _create_backend(source, spec, device, dtype)
    elif spec.attn_backend != AUTO_BACKEND:
        from vitgraph.attention.registry import backend_class

        backend_class(spec.attn_backend)


def _create_backend(source: ModelSource, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    from vitgraph.attention.registry import create_backend

    family = source.row.encoder_class()
    return create_backend(
        spec.attn_backend,
        device,
        flash_attn_version=spec.flash_attn_version,
        head_width=family.head_width(source.vision_config),
        heads=family.head_count(source.vision_config),
        dtype=dtype,
    )


def plan_graphs(rule: GeometryRule, spec: GraphSpec, specs: Sequence[EncoderItemSpec]) -> BudgetPlan:
    """Resolves the graph settings for a model and the items it will meet; needs no torch.

    Args:
        specs: The workload's items; they decide whether videos take part, and warnings.

    Raises:
        BudgetError: Settings that contradict each other or the model; nothing was captured.
    """
    facts = encoder_facts(rule, specs)
    has_videos = any(item.modality == VIDEO for item in specs)
    video_limit = spec.video_limit_per_prompt
    if video_limit is None:
        video_limit = int(has_videos)
    if spec.video_pruning_rate > 0:
        video_limit = 0
    settings = resolve_budget_settings(
        rule.budget_range(spec.max_call_tokens),
        spec.token_budgets,
        spec.max_vision_items_per_batch,
        spec.max_frames_per_batch,
        video_limit_per_prompt=video_limit if VIDEO in facts.modalities else 0,
        max_frames_per_video=facts.max_frames_per_video,
    )
    smallest = min((item.output_tokens for item in specs), default=None)
    if smallest is not None and settings.max_budget < smallest:
        raise BudgetError(
            f"the largest token budget is {settings.max_budget}, but the smallest item of the workload has {smallest} "
            f"output tokens, so no graph could ever be used; pass a budget of {smallest} or more"
        )
    least = min(facts.path_minimums.values())
    if facts.segment_free_paths and settings.token_budgets[0] < least:
        raise BudgetError(
            f"token budget {settings.token_budgets[0]} is below one item of this model ({least} tokens): its graph "
            f"could hold nothing. Use budgets of {least} and more"
        )
    plan = make_plan(TARGETS[VITGRAPH], facts, settings)
    if not spec.slot_tiers:
        plan = replace(plan, slot_tiers={key: (tiers[-1],) for key, tiers in plan.slot_tiers.items()})
    return plan


def planning_warnings(plan: BudgetPlan, spec: GraphSpec, calls_items: Sequence[int]) -> list[str]:
    """What a user should know before anything is captured."""
    warnings = list(plan.notes)
    if spec.video_pruning_rate > 0:
        warnings.append(
            "video graphs are disabled: video-token pruning makes the token count depend on data; images are unaffected"
        )
    if plan.max_items == 1 and any(items > 1 for items in calls_items):
        warnings.append(
            "at most 1 item fits a replay, but calls have several: they will be replayed one after the other; "
            "raise --max-vision-items-per-batch or the largest budget"
        )
    graphs = len(plan.graph_keys())
    if graphs > 64:
        axes = " x ".join(str(len(axis.keys)) for axis in plan.axes)
        detail = f" ({axes} capture-axis keys multiply them)" if axes else ""
        warnings.append(f"{graphs} graphs will be captured{detail}")
    return warnings


def engine_notes(source: ModelSource, spec: GraphSpec, *, has_videos: bool) -> list[str]:
    """Which of vLLM's capture rules a configuration breaks that was given; nothing of automatic settings."""
    frames = spec.max_frames_per_batch
    if not (spec.token_budgets or spec.max_vision_items_per_batch or frames is not None):
        return []
    plan = plan_graphs(source.rule(), spec, [])
    budgets = spec.token_budgets or next(iter(plan.path_budgets.values()))
    rules = EngineRules(engine_tower(source), has_videos)
    if frames is None:
        frames = rules.least_frames(plan.max_items, max(budgets))
    broken = rules.broken(BudgetSettings(tuple(budgets), plan.max_items, frames, spec.packing))
    return [f"{ENGINE} cannot run these graphs as given: {text}" for text in broken.values()]


def load(
    source: ModelSource, spec: ModelSpec, *, device: torch.device, dtype: torch.dtype
) -> tuple[VisionEncoder, Encoder]:
    """Builds the encoder of a spec; returns it with what a record says of it.

    Raises:
        VitgraphError: What cannot be loaded or run; nothing else is used instead.
    """
    from vitgraph.models.compilation import compile_encoder
    from vitgraph.models.loading import load_encoder
    from vitgraph.models.replaced_modules import parameter_count

    attention = _create_backend(source, spec, device, dtype)
    encoder = load_encoder(source, attention, device=device, dtype=dtype, load_format=spec.load_format, seed=spec.seed)
    return encoder, Encoder(
        dtype=str(dtype).removeprefix("torch."),
        parameters=parameter_count(encoder.modules),
        weight_bytes=sum(p.numel() * p.element_size() for p in encoder.modules.parameters()),
        attn_backend_requested=spec.attn_backend,
        **attention.facts(),
        compiled=Compiled(**compile_encoder(encoder)) if spec.compile else None,
    )


@dataclass(frozen=True, slots=True)
class MonolithicBench:
    """The monolithic side of a run, planned without touching a device.

    Attributes:
        rule: Rows of an item in the monolithic graph.
        most_crops: The most crops of any item of the workload; those above the graph's are encoded eagerly.
    """

    rule: MonolithicRule
    plan: BudgetPlan
    most_crops: int

    def expected_counters(self, calls: Sequence[EncoderCall], policy: str) -> GraphCounters:
        """Hits, misses and waste that the packing predicts; exact unless a graph does not fit in memory."""
        counters = GraphCounters()
        for call in calls:
            specs = [self.rule.item_spec(item) for item in call.items]
            counters.add(pack_items(specs, self.plan, policy), call.item_tokens)
        return counters

    @property
    def notes(self) -> list[str]:
        """What a user should know before anything is captured."""
        captured = self.rule.max_crops
        if self.most_crops <= captured:
            return []
        return [
            f"an image of the workload has {self.most_crops} crops, the monolithic graph {captured}; images with more "
            f"than {captured} run eagerly in monolithic mode"
        ]

    def resolved(self) -> MonolithicPlan:
        """What the settings came to."""
        return MonolithicPlan(
            max_crops=self.rule.max_crops,
            item_tokens=self.rule.item_tokens,
            token_budgets=dict(self.plan.path_budgets),
            max_vision_items_per_batch=self.plan.max_items,
            graphs=len(self.plan.graph_keys()),
        )

    def describe_counters(self, counters: GraphCounters) -> dict[str, Any]:
        """The counters in the shape of run.json, with the rows of either path inside the graph as `parts`."""
        view, crop = (self.rule.inner.path_tokens[path] for path in (GLOBAL, LOCAL))
        places = sum(use.replays * (key.token_budget // self.rule.item_tokens) for key, use in counters.use.items())
        views = view * sum(use.items for use in counters.use.values())
        rows = {
            GLOBAL: (views, places * view),
            LOCAL: (counters.tokens_replayed - views, places * self.rule.max_crops * crop),
        }
        parts = [
            {
                "path": path,
                "tokens_replayed": used,
                "budget_tokens_replayed": computed,
                "waste": waste_of(used, computed),
            }
            for path, (used, computed) in rows.items()
        ]
        return {**counters.as_dict(), "parts": parts}


def plan_monolithic(
    spec: BenchSpec, model: str, rule: GeometryRule, two_paths: BudgetPlan, calls: Sequence[EncoderCall]
) -> MonolithicBench:
    """Plans the monolithic graphs that the two paths' graphs are compared with.

    They get what the two paths get: budgets that double from one item up to the two paths' largest, and their limit of
    items.

    Raises:
        UsageError: The model has one path.
        BudgetError: The largest budget does not hold one item.
    """
    if not isinstance(rule, TwoPathRule):
        known = ", ".join(row.models for row in ROWS if issubclass(row.encoder_class().rule_class, TwoPathRule))
        raise UsageError(
            f"--baseline monolithic puts the two paths of a model into one graph, but {model} has one path; use a "
            f"model with a global and a local path ({known}), or --baseline eager"
        )
    items = {item for call in calls for item in call.items}
    most = max(rule.checked_crops(item).crops for item in items)
    monolithic = MonolithicRule(rule, spec.run.monolithic_crops or max(most, 1))
    largest = max(budgets[-1] for budgets in two_paths.path_budgets.values())
    if largest < monolithic.item_tokens:
        view, crop = rule.path_tokens[GLOBAL], rule.path_tokens[LOCAL]
        raise BudgetError(
            f"the largest token budget is {largest}, but every image takes {monolithic.item_tokens} rows of a "
            f"monolithic graph ({view} of its global view and {monolithic.max_crops} crops of {crop}); use a budget of "
            f"{monolithic.item_tokens} or more, or fewer --monolithic-crops"
        )
    graph = replace(
        spec.graph,
        token_budgets=(),
        max_vision_items_per_batch=min(two_paths.max_items, largest // monolithic.item_tokens),
        max_model_len=largest,
        max_num_batched_tokens=largest,
    )
    return MonolithicBench(monolithic, plan_graphs(monolithic, graph, []), most)
