"""What a bench run on several ranks adds: who encodes what, that all ranks do the same, and their facts."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vitgraph.measure.setup import load
from vitgraph.planning.items import EncoderItemSpec
from vitgraph.predict.assignment import (
    Assigner,
    ShareByCost,
    assignment_effect,
    imbalance_of,
    input_loads,
    share_by_size,
)
from vitgraph.predict.cost_model import CostModel
from vitgraph.predict.find_profile import find_profile
from vitgraph.records.rank_samples import RankSample, RankSampleWriter, summarize_ranks
from vitgraph.specs import BenchSpec, ModelSpec

if TYPE_CHECKING:
    import torch

    from vitgraph.graphs.manager import EncoderCudaGraphManager
    from vitgraph.measure.calls import CallInputs
    from vitgraph.measure.parallel_runner import ParallelBenchRunner
    from vitgraph.measure.runner import BenchOutcome
    from vitgraph.models.encoder import VisionEncoder
    from vitgraph.models.registry import ModelSource
    from vitgraph.ranks.group import ParallelGroup

MOST_EFFECT_CALLS = 200
"""Calls, spread over the workload, on which both assignments are predicted."""

_ADVICE = {
    "vitgraph": "install one version on every host",
    "model": "give every rank the same command",
    "workload": "give every rank the same command and the same files",
    "graphs": "give every rank the same command",
}


def choose_assigner(spec: BenchSpec, model: str) -> tuple[Assigner, CostModel | None]:
    """Who encodes what, by `--dp-assignment`, with the cost model behind it.

    Raises:
        UsageError: It goes by cost, and there is no calibration of the model.
    """
    if spec.parallel.assignment == "size":
        return share_by_size, None
    cost = CostModel(find_profile(spec.graph.calibration, model))
    return ShareByCost(cost), cost


def describe_sharing(
    calls: Sequence[Sequence[EncoderItemSpec]], ranks: int, assign: Assigner, cost: CostModel | None
) -> dict[str, Any]:
    """How the calls would be shared, for `--dry-run`: idle ranks, imbalance, and what assigning by cost changes."""
    shared = [assign(specs, ranks) for specs in calls]
    loads = [input_loads(specs, shares) for specs, shares in zip(calls, shared, strict=True)]
    described: dict[str, Any] = {
        "ranks": ranks,
        "calls_with_idle_ranks": sum(not all(shares) for shares in shared),
        "input_imbalance": sum(imbalance_of(each) for each in loads) / len(loads) if loads else None,
        "by_cost": None,
    }
    chosen = calls[:: max(1, len(calls) // MOST_EFFECT_CALLS)][:MOST_EFFECT_CALLS]
    effect = assignment_effect(chosen, ranks, cost) if cost is not None else None
    if effect is not None:
        described["by_cost"] = {
            "calls": effect.calls,
            "changed_calls": effect.changed,
            "predicted_slowest_ms": {"size": effect.size_ms, "cost": effect.cost_ms},
            "predicted_imbalance": {"size": effect.size_imbalance, "cost": effect.cost_imbalance},
            "input_imbalance": {"size": effect.size_input_imbalance, "cost": effect.cost_input_imbalance},
        }
    return described


def sharing_notes(described: Mapping[str, Any]) -> list[str]:
    """The description in words."""
    ranks, idle = described["ranks"], described["calls_with_idle_ranks"]
    notes = [f"{ranks} ranks share the items of each call; the heaviest has {described['input_imbalance']:.3f} times "
             "the mean of the pixel rows"]  # fmt: skip
    if idle:
        notes.append(f"{idle} calls have fewer items than ranks, so some ranks only take part in their gather")
    by_cost = described["by_cost"]
    if by_cost is not None:
        slowest, imbalance = by_cost["predicted_slowest_ms"], by_cost["predicted_imbalance"]
        notes.append(
            f"sharing by cost instead of size changes {by_cost['changed_calls']} of {by_cost['calls']} calls; "
            f"predicted slowest rank {slowest['size']:.3f} ms by size, {slowest['cost']:.3f} ms by cost (imbalance "
            f"{imbalance['size']:.3f} and {imbalance['cost']:.3f})"
        )
    return notes


class RanksOfRun:
    """One run's ranks: their facts and samples as rank 0 records them. The other ranks only take part.

    Args:
        group: The ranks.
        assign: Who encodes what.
        writer: Takes the samples; None on ranks other than 0.

    Attributes:
        samples: Samples of all ranks, on rank 0.
    """

    def __init__(self, group: ParallelGroup, assign: Assigner, writer: RankSampleWriter | None) -> None:
        self.group = group
        self.assign = assign
        self.samples: list[RankSample] = []
        self._writer = writer

    def keep(self, sample: RankSample) -> None:
        """Records a sample."""
        self.samples.append(sample)
        if self._writer is not None:
            self._writer.write(sample)

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Makes sure that every rank has the same program, model, requests and graphs before it. See `agree_on`."""
        from vitgraph.ranks.group import agree_on

        agree_on(self.group, dict(facts), lambda name: _ADVICE[name])

    def load(
        self, source: ModelSource, spec: ModelSpec, *, device: torch.device, dtype: torch.dtype
    ) -> tuple[VisionEncoder, Mapping[str, Any]]:
        """Builds this rank's encoder; where `auto` chooses the attention backend, rank 0 chooses for all."""
        from vitgraph.attention.registry import AUTO

        if spec.attn_backend != AUTO:
            return load(source, spec, device=device, dtype=dtype)
        loaded = load(source, spec, device=device, dtype=dtype) if self.group.is_leader else None
        chosen = self.group.exchange(str(loaded[1]["attn_backend"]) if loaded else "", "its attention", slow=True)[0]
        return loaded or load(source, replace(spec, attn_backend=chosen), device=device, dtype=dtype)

    def runner(
        self, encoder: VisionEncoder, manager: EncoderCudaGraphManager, inputs: CallInputs, *, baseline: str
    ) -> ParallelBenchRunner:
        """What measures on this rank."""
        from vitgraph.measure.parallel_runner import ParallelBenchRunner

        return ParallelBenchRunner(
            encoder, manager, inputs, self.group, self.assign, baseline=baseline, on_rank_sample=self.keep
        )

    def meet(self, record: dict[str, Any]) -> None:
        """After every rank has captured: what it runs on and what it holds goes into rank 0's record."""
        environment, graph = record["environment"], record["graph"]
        own = {
            "rank": self.group.rank,
            "host": socket.gethostname(),
            "device": str(self.group.device),
            "device_name": environment["device"],
            "attn_backend": environment["attn_backend"],
            "captured": len(graph["captured"]),
            "dropped": graph["dropped"],
            "pool_bytes": graph["pool_bytes"],
            "buffer_bytes": graph["buffer_bytes"],
            "capture_s": graph["capture_s"],
            "problems": [],
        }
        environment["ranks"] = self.group.exchange(own, "its captured graphs", slow=True)

    def after_measuring(self, record: dict[str, Any], outcome: BenchOutcome) -> None:
        """What makes a rank's times invalid goes into rank 0's record.

        Raises:
            RankFailedError: The measuring was stopped because another rank failed.
        """
        from vitgraph.measure.environment import validity_problems

        if outcome.is_interrupted:
            failure = self.group.failure_behind_stop()
            if failure is not None:
                raise failure
            return
        everyone = self.group.exchange(validity_problems(outcome.gpu_states), "the end of the measuring")
        for facts, problems in zip(record["environment"]["ranks"], everyone, strict=True):
            facts["problems"] = problems

    def problems(self, record: dict[str, Any]) -> list[str]:
        """Why the times of ranks other than 0 are invalid, each with its rank."""
        ranks = record["environment"].get("ranks", [])
        return [f"rank {facts['rank']}: {problem}" for facts in ranks[1:] for problem in facts["problems"]]

    def summarize(self, summary: dict[str, Any]) -> None:
        """Adds to each mode of the summary how its calls were shared."""
        for mode, entry in summary.items():
            found = summarize_ranks(self.samples, mode, self.group.size)
            if found is not None:
                entry["parallel"] = found
