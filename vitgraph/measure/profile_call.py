"""The `profile` command's work: where the time of one call goes, eagerly and in replay, beside the arithmetic limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from vitgraph.errors import InputError, NothingReplayedError, UsageError
from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.measure.calls import CallInputs, EncoderCall, make_calls
from vitgraph.measure.correctness import eager_reference, incorrect, largest_deviation
from vitgraph.measure.environment import snapshot
from vitgraph.measure.preparation import resolved_of
from vitgraph.measure.progress import Progress
from vitgraph.measure.series import CallTimer, encode_eagerly, expect_calls, matrix_rate_flops, prepare_attention
from vitgraph.measure.setup import load, plan_graphs, resolve_device, resolve_dtype, resolve_source
from vitgraph.measure.trace import save_chrome_trace, summarize_traces, trace_calls
from vitgraph.models.base import EncoderInputs
from vitgraph.models.encoder import VisionEncoder
from vitgraph.models.registry import ModelSource
from vitgraph.models.replaced_modules import stock_modules
from vitgraph.planning.budgets import VIDEO, BudgetPlan
from vitgraph.records.record import ProfileRecord
from vitgraph.records.results import ModeTrace, ProfiledCall, ProfileResult, SpeedOfLight
from vitgraph.records.sample_table import EAGER, GRAPH
from vitgraph.records.sections import GraphKey
from vitgraph.records.store import Draft, ResultFolder
from vitgraph.specs.asked import ProfileSpec
from vitgraph.specs.parts import GraphSpec, WorkloadSpec
from vitgraph.workloads.base import MediaItem, Request
from vitgraph.workloads.registry import build_workload

KERNELS, OPERATORS = "GPU kernels", "CPU operators"
WARMUPS = 3
WALL_REPEATS = 20


@dataclass(frozen=True, slots=True)
class PreparedProfile:
    """A profile that was planned without touching a device."""

    spec: ProfileSpec
    source: ModelSource
    call: EncoderCall
    plan: BudgetPlan


def prepare_profile(spec: ProfileSpec) -> PreparedProfile:
    """Everything that can be decided and refused before a device is touched.

    Raises:
        InputError: The model's processor does not take an item.
    """
    source = resolve_source(spec.model)
    rule = source.rule()
    calls, refused = make_calls([Request(0, _media(spec))], rule, 1)
    if refused:
        raise InputError(f"{source.name} does not take every item of the call: {refused[0].reason}")
    (call,) = calls
    graph = spec.graph
    if not graph.token_budgets:
        graph = _exact_graphs(graph, call, tuple(rule.graph_config().paths))
    return PreparedProfile(spec, source, call, plan_graphs(rule, graph, call.specs))


def _media(spec: ProfileSpec) -> tuple[MediaItem, ...]:
    """The items that are named, or the first request that random-mm draws."""
    is_drawn = spec.workload.random_mm_bucket_config != WorkloadSpec().random_mm_bucket_config
    if spec.items and is_drawn:
        raise UsageError("--items and --random-mm-bucket-config are both given; one of them is the call")
    if spec.items:
        return tuple(MediaItem(*size) for size in spec.items)
    (request,) = build_workload(replace(spec.workload, seed=spec.model.seed)).requests
    if not request.items:
        raise UsageError("--random-mm-base-items-per-request draws a request without items; ask for 1 or more")
    return request.items


def _exact_graphs(graph: GraphSpec, call: EncoderCall, paths: Sequence[str]) -> GraphSpec:
    """Budgets without padding, and a replay that holds the whole call."""
    budgets = sorted({sum(spec.tokens_on(path) for spec in call.specs) for path in paths} - {0})
    has_videos = any(spec.modality == VIDEO for spec in call.specs)
    frames = sum(spec.segments for spec in call.specs) if has_videos else None
    return replace(
        graph,
        token_budgets=tuple(budgets),
        max_vision_items_per_batch=graph.max_vision_items_per_batch or min(len(call.specs), budgets[0]),
        max_frames_per_batch=frames if graph.max_frames_per_batch is None else graph.max_frames_per_batch,
    )


def run_profile(prepared: PreparedProfile, folder: Path, progress: Progress) -> ProfileRecord:
    """Profiles the call in both modes and saves the record in `folder`, whatever ends it.

    Raises:
        UsageError: Results cannot be saved in `folder`.
        NothingReplayedError: No graph holds any item of the call.
        IncorrectOutputError: Replay and eager disagree; nothing was traced.
    """
    spec = prepared.spec
    resolved = resolved_of(spec.model, spec.graph, prepared.source, prepared.plan)
    draft = Draft(ProfileRecord(settings=spec.as_dict(), resolved=resolved, result=None))
    stopped = "stopped by the user before both modes were traced"
    with draft.saved_in(folder, spec.overwrite, lambda: stopped) as results:
        _profile(prepared, draft, progress, results)
        draft.end("complete")
    return draft.record


def _profile(prepared: PreparedProfile, draft: Draft[ProfileRecord], progress: Progress, folder: ResultFolder) -> None:
    spec, call = prepared.spec, prepared.call
    device = resolve_device(spec.model.device)
    dtype = resolve_dtype(spec.model.dtype, device)
    progress.phase("loading the encoder")
    encoder, facts = load(prepared.source, spec.model, device=device, dtype=dtype)
    draft.note(environment=snapshot(device).but(encoder=facts))
    manager = EncoderCudaGraphManager(encoder, prepared.plan, policy=spec.graph.packing)
    expect_calls(encoder, [manager], [call])
    progress.phase("capturing graphs", len(prepared.plan.graph_keys()))
    manager.capture(lambda done, of, key: progress.step())
    inputs = CallInputs(encoder, [call], spec.model.seed)
    progress.phase("comparing replay with eager")
    deviation = largest_deviation(manager.execute, eager_reference(encoder, [call]), inputs)
    if not deviation.passes:
        raise incorrect(GRAPH, deviation)
    prepare_attention(encoder, [call], inputs)
    draft.note_environment(encoder=facts.but(**encoder.attention.facts()))
    mm_kwargs = inputs.make(call)
    batches = manager.plan_call(mm_kwargs).batches
    keys = [run.key for batch in batches for run in batch.runs.values() if run.key is not None]
    if not keys:
        raise NothingReplayedError(
            "no graph holds any item of the call, so there is no replay to profile; leave --token-budgets out for "
            "graphs of exactly its size"
        )
    runs = {EAGER: partial(encode_eagerly, encoder, mm_kwargs), GRAPH: partial(manager.execute, mm_kwargs)}
    progress.phase("tracing", len(runs))
    modes, files = {}, []
    with torch.inference_mode():
        for mode, run in runs.items():
            modes[mode] = _traced(run, device, spec.repeats)
            if spec.chrome_trace:
                files.append(f"trace-{mode}.json")
                with TemporaryDirectory() as temporary:
                    trace = Path(temporary) / files[-1]
                    save_chrome_trace(run, device, trace)
                    folder.write(files[-1], trace.read_bytes())
            progress.step()
        limit = _speed_of_light(spec, encoder, call, mm_kwargs)
    manager.clear()
    profiled = ProfiledCall(
        items=tuple((media.width, media.height, media.frames) for media in call.media),
        tokens=call.tokens,
        input_rows=call.input_rows,
        replays=tuple(GraphKey(**key.as_dict()) for key in keys),
        eager_items=sum(len(batch.items) for batch in batches if not batch.is_hit),
    )
    traced = KERNELS if device.type == "cuda" else OPERATORS
    draft.note(
        result=ProfileResult(call=profiled, traced=traced, speed_of_light=limit, modes=modes, trace_files=tuple(files))
    )


def _traced(run: Callable[[], object], device: torch.device, repeats: int) -> ModeTrace:
    for _ in range(WARMUPS):
        run()
    wall_ms = CallTimer(device).median_ms(run, WALL_REPEATS)
    traces = trace_calls(run, device, repeats)
    return ModeTrace(wall_ms=wall_ms, **summarize_traces(traces, wall_ms if device.type == "cuda" else math.inf))


def _speed_of_light(
    spec: ProfileSpec, encoder: VisionEncoder, call: EncoderCall, mm_kwargs: EncoderInputs
) -> SpeedOfLight | None:
    """The arithmetic of the unpadded call at the rate of a large matrix product; None on a CPU.

    Products are counted while an eager call runs, without compiled code, inside which nothing is counted; the rest of
    the rule's count is attention's.
    """
    rate = matrix_rate_flops(encoder.device, encoder.dtype)
    if rate is None:
        return None
    total = sum(encoder.rule.flops(item) for item in call.items)
    with torch.compiler.set_stance("force_eager") if spec.model.compile else nullcontext():
        products = product_flops(encoder, mm_kwargs)
    return SpeedOfLight(
        matrix_rate_tflops=rate / 1e12,
        total_ms=total / rate * 1e3,
        product_ms=products / rate * 1e3,
        attention_ms=max(0.0, total - products) / rate * 1e3,
    )


def product_flops(encoder: VisionEncoder, mm_kwargs: EncoderInputs) -> float:
    """Floating-point operations of the matrix products and convolutions of an eager call, counted while it runs."""
    counter = FlopCounterMode(display=False)
    # Zeros that widen a layer are no work that anyone asked for.
    with torch.inference_mode(), stock_modules(encoder), counter:
        encode_eagerly(encoder, mm_kwargs)
    aten: Any = torch.ops.aten
    # Batched products are left out: towers have them only inside attention that is not fused.
    counted = (aten.mm, aten.addmm, aten.convolution, aten._convolution, aten.cudnn_convolution)
    return float(sum(counter.get_flop_counts()["Global"].get(operator, 0) for operator in counted))
