"""Where the time of a comparison's calls goes on a GPU: replays alone, and the GPU-busy share of whole calls."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from vitgraph.measure.calls import CallInputs, EncoderCall
from vitgraph.measure.candidate import Candidate
from vitgraph.measure.diagnose import measure_replays
from vitgraph.measure.timing import busy_time
from vitgraph.planning.budgets import GraphKey
from vitgraph.records.candidates import series_name
from vitgraph.records.sample_table import GRAPH, Sample

MOST_GRAPHS = 4
WHOLE_CALLS = 3
BUSY_REPEATS = 2


@torch.inference_mode()
def diagnose(
    candidate: Candidate,
    inputs: CallInputs,
    calls: Sequence[EncoderCall],
    samples: Sequence[Sample],
    device: torch.device,
) -> None:
    """Fills `replay_ms`, `gpu_busy_ms`, `launch_gap` and `busy` of a candidate's row; nothing on a CPU.

    Args:
        candidate: A measured backend.
        inputs: Makes the calls' pixels.
        calls: The measured calls.
        samples: Their samples, for the latency of whole calls.
        device: Where the candidate runs.
    """
    if device.type != "cuda":
        return
    if GRAPH in candidate.modes:
        _diagnose_replays(candidate, inputs, calls)
    spread = sorted(calls, key=lambda call: call.tokens)
    chosen = [spread[int((place + 0.5) / WHOLE_CALLS * len(spread))] for place in range(WHOLE_CALLS)]
    for mode in candidate.modes:
        busy_sum = wall_sum = 0.0
        for call in chosen:
            found = busy_time(partial(candidate.encode_alone(mode), inputs.make(call)), device, BUSY_REPEATS)
            walls = [
                sample.wall_ms
                for sample in samples
                if sample.series == series_name(candidate.name, mode)
                and sample.rank is None
                and sample.call == call.index
            ]
            if found is not None and walls:
                busy_sum += found.busy_ms
                wall_sum += float(np.mean(walls))
        if wall_sum:
            requests = sum(len(call.requests) for call in chosen)
            candidate.row[mode]["busy"] = {
                "calls": len(chosen),
                "gpu_busy_ms": busy_sum / requests,
                "wall_ms": wall_sum / requests,
                "share": busy_sum / wall_sum,
            }


def _diagnose_replays(candidate: Candidate, inputs: CallInputs, calls: Sequence[EncoderCall]) -> None:
    """Averages over the most used graphs, by use; the same for every backend, unless one lacks some or takes long.

    Whatever ends this leaves the averages over the graphs that were timed before.
    """
    use = candidate.counters().use
    ending_with: dict[GraphKey, EncoderCall] = {}
    for call in calls:
        batches = candidate.manager.plan_call(call.shape_inputs()).batches
        keys = [run.key for batch in batches for run in batch.runs.values() if run.key is not None]
        if keys and not call.has_images:
            ending_with.setdefault(keys[-1], call)
    most_used = sorted(ending_with, key=lambda key: -use[key].replays)[:MOST_GRAPHS]
    timed: dict[GraphKey, dict[str, Any]] = {}
    try:
        for key, times in measure_replays(candidate.manager, inputs, {key: ending_with[key] for key in most_used}):
            if times["launch_gap"]:
                timed[key] = times
    finally:
        if timed:
            weights = [use[key].replays for key in timed]
            for name in ("replay_ms", "gpu_busy_ms", "launch_gap"):
                candidate.row["graphs"][name] = float(
                    np.average([times[name] for times in timed.values()], weights=weights)
                )
