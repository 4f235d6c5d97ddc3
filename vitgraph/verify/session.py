"""One verification under way: the captured encoder, its probes, calls through the manager, and what checks found."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch

from vitgraph.errors import InputError
from vitgraph.graphs.manager import CallPlan, EncoderCudaGraphManager, forced_batch
from vitgraph.measure.correctness import limit_of, worst
from vitgraph.models.encoder import VisionEncoder
from vitgraph.planning.accounting import GraphCounters
from vitgraph.planning.budgets import GraphKey
from vitgraph.records.results import Check
from vitgraph.verify.probes import Candidate, Probe, ProbeStore, item_catalogue, sample_candidates

OK: Final = "ok"
FAILED: Final = "failed"
SKIPPED: Final = "skipped"
ERROR: Final = "error"

PREDICTED_TOKENS: Final = "predicted_tokens"
FINITE: Final = "finite"
EVERY_GRAPH: Final = "every_graph"
ORDER: Final = "order"
COUNTERS: Final = "counters"
"""Checks that what others find may belong to."""


class SkipCheck(Exception):  # noqa: N818 (no error, but the reason why a check has nothing to do)
    """A check has nothing to check here; the text says why."""


def unreached(name: str) -> Check:
    """A check that nothing has come to yet."""
    return Check(name=name, status=SKIPPED, detail="not reached")


@dataclass(slots=True)
class CheckBook:
    """Results of all checks of one verification.

    Attributes:
        tolerance: Largest relative L2 distance from eager that passes.
        rounding: What an item's eager output is from float32, which decides what passes beyond the tolerance; None
            where the tolerance holds for all.
        own_error: The largest such rounding that was asked for.
        checks: Results by name, in the order in which the checks run.
        under_way: The check that is running; what it finds is its own unless it says otherwise.
    """

    tolerance: float
    rounding: Callable[[Probe], float] | None = None
    own_error: float | None = None
    checks: dict[str, Check] = field(default_factory=dict)
    under_way: str = ""

    @property
    def max_rel_l2(self) -> float | None:
        return worst(check.max_rel_l2 for check in self.checks.values())

    @property
    def total_failures(self) -> int:
        return sum(check.failures for check in self.checks.values())

    def fail(self, detail: str, name: str | None = None) -> None:
        """Counts a fault of check `name`; the first one's text is kept."""
        name = name or self.under_way
        self._note(name, failures=self.checks[name].failures + 1)
        self.end(FAILED, detail, name)

    def end(self, status: str, detail: str, name: str | None = None) -> None:
        """Notes how check `name` ended, unless it has failed before."""
        name = name or self.under_way
        if self.checks[name].status != FAILED:
            self._note(name, status=status, detail=detail)

    def _note(self, name: str, **changes: Any) -> None:
        self.checks[name] = self.checks[name].model_copy(update=changes)

    def compare(
        self,
        probes: Sequence[Probe],
        outputs: Sequence[torch.Tensor],
        where: str,
        *,
        name: str | None = None,
        finite: str = FINITE,
    ) -> bool:
        """Compares a call's outputs with each item's eager output alone, in the same order; True where all agree.

        A fault goes to the check that it speaks of: values that are not finite to `finite`, rows that are another
        item's to `order`, and everything else to `name` (None is the one under way). `where` names graph and call for
        the report.
        """
        name = name or self.under_way
        if len(outputs) != len(probes):
            self.fail(f"{len(outputs)} outputs for {len(probes)} items ({where})", name)
            return False
        references = [probe.reference for probe in probes]
        same_shape = [index for index, output in enumerate(outputs) if output.shape == references[index].shape]
        found = distances((outputs[index], references[index]) for index in same_shape)
        measured = dict(zip(same_shape, found, strict=True))
        passed, limit = True, self.tolerance
        for index, (output, probe) in enumerate(zip(outputs, probes, strict=True)):
            distance, is_finite = measured.get(index, (math.nan, True))
            place = f"item {index} ({probe.candidate.size}, pixel seed {probe.seed}), {where}, found by {name}"
            if is_finite:
                self._measure(name, distance)
                limit = self._limit(probe, distance)
                if distance <= limit:
                    continue
            passed = False
            if not is_finite:
                self.fail(f"values that are not finite: {place}", finite)
            elif (owner := self._owner(output, references, index)) is not None:
                self.fail(f"the output holds the rows of item {owner}: {place}", ORDER)
            elif index in measured:
                self.fail(f"relative L2 {distance:.3g} from eager, above {limit:.3g}: {place}", name)
            else:
                shape, wanted = (" x ".join(map(str, tensor.shape)) for tensor in (output, probe.reference))
                self.fail(f"the output is {shape}, eager gives {wanted}: {place}", name)
        return passed

    def _measure(self, name: str, distance: float) -> None:
        check = self.checks[name]
        largest = max(check.max_rel_l2 or 0.0, distance) if math.isfinite(distance) else check.max_rel_l2
        self._note(name, compared=check.compared + 1, max_rel_l2=largest)

    def _limit(self, probe: Probe, distance: float) -> float:
        """Largest distance that passes for an item that was measured."""
        if distance <= self.tolerance or self.rounding is None:
            return self.tolerance
        own_error = self.rounding(probe)
        self.own_error = max(self.own_error or 0.0, own_error)
        return limit_of(own_error, self.tolerance)

    def _owner(self, output: torch.Tensor, references: Sequence[torch.Tensor], index: int) -> int | None:
        """The other item of the call whose reference `output` equals, or None."""
        others = [j for j, one in enumerate(references) if j != index and one.shape == output.shape]
        found = zip(others, distances((output, references[other]) for other in others), strict=True)
        return next((other for other, (distance, _) in found if distance <= self.tolerance), None)


def distances(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[float, bool]]:
    """Relative L2 distance of each value from its reference in float32, and whether it is finite; one
    synchronisation."""
    found = []
    for value, reference in pairs:
        value, reference = value.float(), reference.float()
        found.append((value - reference).norm() / reference.norm().clamp(min=1e-30))
        found.append(value.isfinite().all().float())
    numbers = torch.stack(found).tolist() if found else []
    return [(distance, bool(is_finite)) for distance, is_finite in zip(numbers[::2], numbers[1::2], strict=True)]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much a verification does on a kind of device; a CPU replay costs what it computes, a GPU's hardly anything.

    Attributes:
        doublings: Token budgets to capture, each twice the one before.
        most_flops: Operations of an item that still fits, beyond which no third budget is captured.
        frames_per_item: Most video frames of a replay, for each item that it may hold.
        oversize: Sizes above the largest budget.
        call_sizes: Shares of the random calls by their most tokens, in multiples of `call_unit`; 0 is no limit.
        unit_flops: Operations up to which `call_unit` grows beyond the smallest budget.
        large_call: Most tokens of the first call of each policy, in multiples of the largest budget; 0 is no limit.
        whole_call_every: Every so many random calls, eager encodes the whole call too.
    """

    doublings: int
    most_flops: float
    frames_per_item: int
    oversize: int
    call_sizes: tuple[tuple[float, int], ...]
    unit_flops: float
    large_call: int
    whole_call_every: int


CPU_EFFORT = Effort(3, 6e9, 2, 1, ((0.88, 1), (0.1, 2), (0.02, 4)), 1.5e8, 2, 10)
GPU_EFFORT = Effort(5, float("inf"), 8, 2, ((0.5, 2), (0.4, 8), (0.1, 16)), 0.0, 4, 8)


class VerifySession:
    """What the checks share; the graphs of `manager` are captured before they begin.

    Attributes:
        store: Probes with their eager references.
        catalogue: Every item size.
        sample: Sizes of random calls.
        counters: Hits and misses of every call so far.
        items: Items of every call so far.
        replays: Replays that the calls' plans asked for.
        random_calls: Random calls done.

    Raises:
        InputError: The model takes no size.
    """

    def __init__(
        self,
        encoder: VisionEncoder,
        manager: EncoderCudaGraphManager,
        book: CheckBook,
        effort: Effort,
        seed: int,
        calls: int,
    ) -> None:
        self.encoder, self.manager, self.book, self.effort = encoder, manager, book, effort
        self.seed, self.calls = seed, calls
        self.device = encoder.device
        self.store = ProbeStore(encoder, seed)
        self.catalogue = item_catalogue(encoder.rule)
        if not self.catalogue:
            raise InputError(
                "the model's rule refuses every size that is tried; its processor settings cannot be right"
            )
        self.sample = sample_candidates(
            self.catalogue, self.largest_budgets, effort.oversize, np.random.default_rng(seed)
        )
        self.counters = GraphCounters()
        self.items = self.random_calls = 0
        self.replays: Counter[GraphKey] = Counter()

    @property
    def largest_budgets(self) -> tuple[int, ...]:
        """Ascending budgets of the path that has the largest."""
        return max(self.manager.plan.path_budgets.values(), key=lambda budgets: budgets[-1])

    @property
    def call_unit(self) -> int:
        """Tokens of a small random call: the smallest budget or item, or more of it where that costs little."""
        smallest = min(budgets[0] for budgets in self.manager.plan.path_budgets.values())
        unit = max(smallest, min(candidate.tokens for candidate in self.sample))
        flops = max(candidate.flops for candidate in self.sample if candidate.tokens <= unit)
        return unit * max(1, int(self.effort.unit_flops / flops))

    # -- batches for a chosen graph --------------------------------------------------------------------------------

    def has_segments(self, key: GraphKey) -> bool:
        return self.encoder.get_encoder_cudagraph_config().paths[key.path].has_segments

    def usable(self, key: GraphKey) -> list[Candidate]:
        """Sizes that a graph can hold alone, fewest tokens on its path first."""
        usable = []
        for candidate in self.catalogue:
            spec = candidate.spec
            tokens = spec.tokens_on(key.path)
            if not 0 < tokens <= key.token_budget or (self.has_segments(key) and spec.segments > key.segment_slots):
                continue
            needs = [need for axis in self.manager.plan.axes for need in spec.axis_sizes[axis.name]]
            if all(need <= have for need, have in zip(needs, key.axis_key, strict=True)):
                usable.append(candidate)
        return sorted(usable, key=lambda candidate: candidate.spec.tokens_on(key.path))

    def fullest(self, key: GraphKey, usable: Sequence[Candidate]) -> list[Candidate]:
        """As many rows as the graph holds: one item with many segments where slots allow, then the largest."""
        has_segments = self.has_segments(key)
        room, items = key.token_budget, self.manager.plan.max_items
        slots = key.segment_slots if has_segments else room
        batch: list[Candidate] = []

        def add(candidate: Candidate) -> None:
            nonlocal room, slots
            batch.append(candidate)
            room -= candidate.spec.tokens_on(key.path)
            slots -= candidate.spec.segments if has_segments else 0

        many = [one for one in usable if 1 < one.spec.segments < slots and 2 * one.spec.tokens_on(key.path) <= room]
        if has_segments and many and items > 1:
            add(max(many, key=lambda candidate: candidate.spec.segments))
        for candidate in reversed(usable):
            while (
                len(batch) < items
                and candidate.spec.tokens_on(key.path) <= room
                and (not has_segments or candidate.spec.segments <= slots)
            ):
                add(candidate)
        return batch

    # -- calls -----------------------------------------------------------------------------------------------------

    def use_policy(self, policy: str) -> None:
        """Packs the calls from here on by `policy`."""
        self.manager.policy = policy
        # Cached plans are those of the policy before.
        self.manager._plans.clear()

    def execute(self, probes: Sequence[Probe], key: GraphKey | None = None) -> tuple[list[torch.Tensor], CallPlan]:
        """Encodes a call as a server would, or with one replay of the graph `key`, whichever packing would choose, and
        other paths eager; the plan tells which graphs took part."""
        inputs = self.store.inputs(probes)
        if key is None:
            plan = self.manager.plan_call(inputs)
        else:
            specs, paths = [probe.candidate.spec for probe in probes], self.manager.plan.paths
            plan = CallPlan.of([forced_batch(range(len(specs)), specs, paths, {key.path: key})], specs, paths)
        outputs = self.manager.execute_planned(inputs, plan)
        # A batch that overflowed was re-planned while it ran, so counting comes after.
        self.counters.add(plan.batches)
        self.items += len(probes)
        placed = sorted(index for batch in plan.batches for index in batch.items)
        if placed != list(range(len(probes))):
            self.book.fail(f"items {placed} were packed of a call of {len(probes)}", COUNTERS)
        self.replays.update(replayed_keys(plan))
        return outputs, plan


def replayed_keys(plan: CallPlan) -> list[GraphKey]:
    """Graphs that a plan replays, in order."""
    return [run.key for batch in plan.batches for run in batch.runs.values() if run.key is not None]


def graph_name(key: GraphKey) -> str:
    """A graph as reports name it."""
    path = "" if key.path == "default" else f"path {key.path!r}, "
    axis = f", axis key {'x'.join(map(str, key.axis_key))}" if key.axis_key else ""
    return f"{path}budget {key.token_budget}, segment slots {key.segment_slots}{axis}"


def call_name(plan: CallPlan) -> str:
    """The graphs of a call as reports name them."""
    names = [graph_name(key) for key in replayed_keys(plan)]
    eager = sum(len(indices) for indices in plan.eager_items.values())
    return "; ".join(names + ([f"{eager} item(s) eager"] if eager else []))
