"""What a graph call is made of: replay time, GPU-busy time, launch gap, and the host's share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from vitgraph.bench.calls import CallInputs, EncoderCall
from vitgraph.bench.timing import CallTimer, busy_time
from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.planning.budgets import GraphKey

REPLAY_REPEATS = 20
MOST_GRAPHS = 12
MOST_CALL_SHAPES = 4


@torch.inference_mode()
def measure_replays(
    manager: EncoderCudaGraphManager, inputs: CallInputs, calls: Sequence[EncoderCall]
) -> dict[GraphKey, dict[str, Any]]:
    """Times the most used graphs alone, each with a batch of the workload in its buffers.

    Args:
        manager: The captured graphs; it lives on a GPU.
        inputs: Makes the calls' pixels.
        calls: The measured calls.

    Returns:
        For each graph `replay_ms` (wall clock of one replay, median), `gpu_busy_ms` (the union of its kernels'
        intervals, from a profiler trace), `kernels`, and `launch_gap` (from the first kernel's start to the last one's
        end, over the busy time).
    """
    timer = CallTimer(manager.model.device)
    uses: dict[GraphKey, int] = {}
    last_use: dict[GraphKey, EncoderCall] = {}
    for call in calls:
        batches = manager.plan_call(inputs.make(call)).batches if not call.has_images else []
        keys = [run.key for batch in batches for run in batch.runs.values() if run.key is not None]
        for key in keys:
            uses[key] = uses.get(key, 0) + 1
        for key in keys:
            # After the call, the shared metadata is that of its last replay; graphs without any are always valid.
            if key == keys[-1] or not manager.graphs[key].writer.layout.nbytes:
                last_use.setdefault(key, call)
    found = {}
    for key in sorted(last_use, key=lambda key: -uses[key])[:MOST_GRAPHS]:
        manager.execute(inputs.make(last_use[key]))
        graph = manager.graphs[key].graph
        replay = timer.median_ms(graph.replay, REPLAY_REPEATS)
        trace = busy_time(graph.replay, manager.model.device)
        found[key] = {
            "replay_ms": replay,
            "gpu_busy_ms": trace.busy_ms if trace else None,
            "kernels": trace.kernels if trace else None,
            "launch_gap": (trace.span_ms or replay) / trace.busy_ms if trace else None,
        }
    return found


@torch.inference_mode()
def measure_call_overheads(
    manager: EncoderCudaGraphManager, inputs: CallInputs, calls: Sequence[EncoderCall]
) -> list[dict[str, Any]]:
    """Compares whole graph calls with their replays alone, for the most frequent call shapes that hit.

    Returns:
        For each shape: items, tokens, replays, `call_ms`, `replays_ms` (its replays, each between two
        synchronisations) and `overhead_ms` (what packing, metadata, copies and clone-out add).
    """
    timer = CallTimer(manager.model.device)
    frequency: dict[tuple[Any, ...], int] = {}
    example: dict[tuple[Any, ...], EncoderCall] = {}
    for call in calls:
        if not call.has_images:
            frequency[call.items] = frequency.get(call.items, 0) + 1
            example[call.items] = call
    found: list[dict[str, Any]] = []
    for items in sorted(frequency, key=lambda shape: -frequency[shape]):
        mm_kwargs = inputs.make(example[items])
        plan = manager.plan_call(mm_kwargs)
        keys = [run.key for batch in plan.batches for run in batch.runs.values() if run.key is not None]
        if not all(batch.is_hit for batch in plan.batches):
            continue
        call_ms = timer.median_ms(partial(manager.execute, mm_kwargs), REPLAY_REPEATS)
        replays_ms = 0.0
        for batch in plan.batches:
            selected = manager.model.select_encoder_cudagraph_items(mm_kwargs, batch.items)
            manager.execute(selected)
            for run in batch.runs.values():
                if run.key is not None:
                    replays_ms += timer.median_ms(manager.graphs[run.key].graph.replay, REPLAY_REPEATS)
        found.append(
            {
                "items": len(items),
                "tokens": example[items].tokens,
                "replays": len(keys),
                "call_ms": call_ms,
                "replays_ms": replays_ms,
                "overhead_ms": call_ms - replays_ms,
            }
        )
        if len(found) == MOST_CALL_SHAPES:
            break
    return found
