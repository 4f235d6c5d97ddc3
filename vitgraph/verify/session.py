"""One verification under way: the captured encoder, its probes, and calls through the manager, all of them counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from vitgraph.graphs.manager import CallPlan, EncoderCudaGraphManager
from vitgraph.models.base import EncoderInputs
from vitgraph.models.encoder import VisionEncoder
from vitgraph.planning.accounting import GraphCounters
from vitgraph.planning.budgets import GraphKey
from vitgraph.planning.packing import NOT_CAPTURED, PackedBatch, PathRun
from vitgraph.verify.findings import COUNTERS, CheckBook
from vitgraph.verify.probes import Candidate, Probe, ProbeStore, fullest_batch, usable_candidates

ProgressCallback = Callable[[str, int, int], None]
"""Called with the check's name, its steps done and its steps in all."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much a verification does on a kind of device; a CPU replay costs what it computes, a GPU's hardly anything.

    Attributes:
        doublings: Token budgets to capture, each twice the one before.
        most_flops: Operations of an item that still fits, beyond which no third budget is captured.
        frames_per_item: Most video frames of a replay, for each item that it may hold.
        per_stratum: Sizes of each modality between two budgets.
        oversize: Sizes above the largest budget.
        call_sizes: Shares of the random calls by their most tokens, in multiples of `call_unit`; 0 is no limit.
        unit_flops: Operations up to which `call_unit` grows beyond the smallest budget.
        large_call: Most tokens of the first call of each policy, in multiples of the largest budget; 0 is no limit.
        whole_call_every: Every so many random calls, eager encodes the whole call too.
        drills_every_graph: Small-large-small goes through every graph, not through one of each budget.
    """

    doublings: int
    most_flops: float
    frames_per_item: int
    per_stratum: int
    oversize: int
    call_sizes: tuple[tuple[float, int], ...]
    unit_flops: float
    large_call: int
    whole_call_every: int
    drills_every_graph: bool


CPU_EFFORT = Effort(3, 6e9, 2, 2, 1, ((0.88, 1), (0.1, 2), (0.02, 4)), 1.5e8, 2, 10, False)
GPU_EFFORT = Effort(5, float("inf"), 8, 2, 2, ((0.5, 2), (0.4, 8), (0.1, 16)), 0.0, 4, 8, False)


@dataclass(slots=True)
class VerifySession:
    """What the checks share.

    Attributes:
        encoder: The encoder.
        manager: Its captured graphs.
        store: Probes with their eager references.
        book: Results.
        effort: How much to do.
        catalogue: Every item size.
        sample: Sizes of random calls.
        seed: Seed of every draw.
        calls: Random calls.
        progress: Told about steps; None where nobody listens.
        counters: Hits and misses of every call so far.
        items: Items of every call so far.
        replays: Replays that the calls' plans asked for.
        random_calls: Random calls done.
    """

    encoder: VisionEncoder
    manager: EncoderCudaGraphManager
    store: ProbeStore
    book: CheckBook
    effort: Effort
    catalogue: list[Candidate]
    sample: list[Candidate]
    seed: int
    calls: int
    progress: ProgressCallback | None = None
    counters: GraphCounters = field(default_factory=GraphCounters)
    items: int = 0
    replays: Counter[GraphKey] = field(default_factory=Counter)
    random_calls: int = 0

    @property
    def device(self) -> torch.device:
        return self.encoder.device

    @property
    def call_unit(self) -> int:
        """Tokens of a small random call: the smallest budget or item, or more of it where that costs little."""
        smallest = min(budgets[0] for budgets in self.manager.plan.path_budgets.values())
        unit = max(smallest, min(candidate.tokens for candidate in self.sample))
        flops = max(candidate.flops for candidate in self.sample if candidate.tokens <= unit)
        return unit * max(1, int(self.effort.unit_flops / flops))

    def tick(self, name: str, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(name, done, total)

    def has_segments(self, key: GraphKey) -> bool:
        return self.encoder.get_encoder_cudagraph_config().paths[key.path].has_segments

    def usable(self, key: GraphKey) -> list[Candidate]:
        """Sizes that a graph can hold alone, fewest tokens first."""
        return usable_candidates(self.catalogue, key, self.manager.plan, has_segments=self.has_segments(key))

    def fullest(self, key: GraphKey, usable: Sequence[Candidate]) -> list[Candidate]:
        return fullest_batch(usable, key, self.manager.plan, has_segments=self.has_segments(key))

    # -- calls -----------------------------------------------------------------------------------------------------

    def use_policy(self, policy: str) -> None:
        """Packs the calls from here on by `policy`."""
        self.manager.policy = policy
        # Cached plans are those of the policy before.
        self.manager._plans.clear()

    def execute(self, probes: Sequence[Probe]) -> tuple[list[torch.Tensor], CallPlan]:
        """Encodes a call as a server would; the plan tells which graphs took part."""
        inputs = self.store.inputs(probes)
        plan = self.manager.plan_call(inputs)
        return self._run(inputs, plan), plan

    def execute_on(self, probes: Sequence[Probe], key: GraphKey) -> tuple[list[torch.Tensor], CallPlan]:
        """Encodes a call with one replay of the graph `key`, whichever packing would choose; other paths go eager."""
        inputs = self.store.inputs(probes)
        plan = self.forced_plan(probes, key)
        return self._run(inputs, plan), plan

    def forced_plan(self, probes: Sequence[Probe], key: GraphKey) -> CallPlan:
        """A plan with all items in one batch that replays `key`."""
        specs = [probe.candidate.spec for probe in probes]
        segments = sum(spec.segments for spec in specs)
        batch = PackedBatch(tuple(range(len(specs))))
        plan = CallPlan([batch], {}, {})
        for path in self.manager.plan.paths:
            counts = [spec.tokens_on(path) for spec in specs]
            ends = [0]
            for count in counts:
                ends.append(ends[-1] + count)
            plan.tokens[path], plan.offsets[path] = counts, ends
            present = tuple(index for index, count in enumerate(counts) if count)
            if path == key.path:
                batch.runs[path] = PathRun(ends[-1], segments, key, items=present)
            elif present:
                batch.runs[path] = PathRun(ends[-1], segments, None, NOT_CAPTURED, present)
                plan.eager_items[path] = list(present)
        return plan

    def _run(self, inputs: EncoderInputs, plan: CallPlan) -> list[torch.Tensor]:
        outputs = self.manager.execute_planned(inputs, plan)
        # A batch that overflowed was re-planned while it ran, so counting comes after.
        self.counters.add(plan.batches)
        self.items += len(inputs.chosen)
        placed = sorted(index for batch in plan.batches for index in batch.items)
        if placed != list(range(len(inputs.chosen))):
            self.book.fail(COUNTERS, f"items {placed} were packed of a call of {len(inputs.chosen)}")
        for key in replayed_keys(plan):
            self.replays[key] += 1
        return outputs


def replayed_keys(plan: CallPlan) -> list[GraphKey]:
    """Graphs that a plan replays, in order."""
    return [run.key for batch in plan.batches for run in batch.runs.values() if run.key is not None]


def graph_name(key: GraphKey) -> str:
    """A graph as reports name it."""
    path = "" if key.path == "default" else f"path {key.path!r}, "
    axis = f", axis key {'x'.join(map(str, key.axis_key))}" if key.axis_key else ""
    return f"{path}budget {key.token_budget}, {key.segment_slots} segment slots{axis}"


def call_name(plan: CallPlan) -> str:
    """The graphs of a call as reports name them."""
    names = [graph_name(key) for key in replayed_keys(plan)]
    eager = sum(len(indices) for indices in plan.eager_items.values())
    return "; ".join(names + ([f"{eager} item(s) eager"] if eager else []))
