"""A backend comparison on several ranks: every backend on all of them, each with its own share of every call's items.

What fails while a backend is opened costs its row on all ranks. A failure inside a shared call ends the run, because
the other ranks wait in its gather.
"""

from __future__ import annotations

import math
import socket
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vitgraph.measure.bench import Progress
from vitgraph.measure.calls import CallInputs, EncoderCall
from vitgraph.measure.compare import Comparison, run_compare
from vitgraph.measure.compare_candidates import Candidate
from vitgraph.measure.compare_reference import Reference, largest_error
from vitgraph.measure.compare_results import COMPARED_MODES, OK, Series
from vitgraph.measure.compare_spec import PreparedCompare, new_record
from vitgraph.measure.environment import validity_problems
from vitgraph.measure.parallel_runner import RankPart, RankTimer, part_of, rank_samples, slowest
from vitgraph.measure.preparation import PreparedBench, shared_facts
from vitgraph.measure.runner import make_sample
from vitgraph.models.base import EncoderInputs
from vitgraph.planning.packing import PackedBatch
from vitgraph.predict.assignment import Assigner
from vitgraph.ranks.gather import RowGather
from vitgraph.ranks.group import agree_on
from vitgraph.ranks.manager import CallSharing, DataParallelEncoder
from vitgraph.records.compare_record import ERROR, INCORRECT, CompareRecord
from vitgraph.records.compare_samples import BackendSample, BackendSampleWriter
from vitgraph.records.rank_samples import RankSample, RankSampleWriter, summarize_ranks
from vitgraph.records.samples import GRAPH

if TYPE_CHECKING:
    from vitgraph.measure.timing import CallTime
    from vitgraph.ranks.group import ParallelGroup

BACKEND_RANK_SAMPLES_FILE = "backend_samples-ranks.csv"

Keep = Callable[[Series, bool, RankSample], None]
"""Takes a rank's sample: whose it is, whether it is a repeat, and the sample."""


class ParallelCandidate(Candidate):
    """A backend that is open on every rank, or on none.

    Args:
        name: Registry name.
        prepared: Model, calls and plan.
        inputs: Makes the calls' pixels, the same on every rank.
        group: The ranks.
        assign: Who encodes what.
        on_encoded: Called between encoding and gather.
    """

    def __init__(
        self,
        name: str,
        prepared: PreparedBench,
        inputs: CallInputs,
        group: ParallelGroup,
        assign: Assigner,
        on_encoded: Callable[[], None],
    ) -> None:
        super().__init__(name, prepared, inputs)
        self._group = group
        self._assign = assign
        self._on_encoded = on_encoded
        self._sharing: CallSharing | None = None
        self._shared: dict[str, DataParallelEncoder] = {}

    def open(self, device: torch.device, dtype: torch.dtype, reference: Reference) -> None:
        """As in one process, on each rank alone; then what the ranks gather together is checked too."""
        super().open(device, dtype, reference)
        self._agree("opened")
        for mode in self.modes:
            error = largest_error(partial(self._run_and_wait, mode), reference, self._inputs)
            # A NaN is the worst, and `max` would drop it.
            errors = self._group.exchange(error, f"checked {self.name}", slow=True)
            worst = max(errors, key=lambda one: (math.isnan(one), one))
            own = self.row["error_vs_float32"][mode]
            self.row["error_vs_float32"][mode] = worst if own is None or not worst <= own else own
            if not worst <= reference.limit:
                found = f"relative L2 distance {worst:.3g} from float32 over all ranks"
                self.fail((mode,), INCORRECT, f"{found}, at most {reference.limit:.3g} passes")

    def run(self, mode: str, inputs: EncoderInputs) -> Sequence[torch.Tensor]:
        """Encodes one call on all ranks."""
        return self._shared[mode].execute(inputs)

    def batches_of(self, call: EncoderCall) -> list[PackedBatch]:
        return [batch for packed in self.batches_by_rank(call) for batch in packed]

    def batches_by_rank(self, call: EncoderCall) -> list[list[PackedBatch]]:
        """What each rank packs together; with equal graphs every rank can tell it of the others."""
        assert self._sharing is not None
        parts = [part_of(call, share) for share in self._sharing.divide(call.items).shares]
        return [[] if part is None else self.plan(part).batches for part in parts]

    def prepare(self, calls: Sequence[EncoderCall]) -> None:
        super().prepare(calls)
        self._agree("prepared")

    def release(self) -> None:
        super().release()
        self._shared.clear()

    def _load(self, device: torch.device, dtype: torch.dtype) -> None:
        super()._load(device, dtype)
        encoder, group = self._encoder, self._group
        if encoder is None:
            return
        self._sharing = CallSharing(encoder, group.rank, group.size, self._assign)
        gather = RowGather(group, encoder.rule.output_width, encoder.dtype)
        self._shared = {
            mode: DataParallelEncoder(partial(self.encode_alone, mode), self._sharing, gather, self._on_encoded)
            for mode in COMPARED_MODES
        }

    def _run_and_wait(self, mode: str, inputs: EncoderInputs) -> Sequence[torch.Tensor]:
        outputs = self.run(mode, inputs)
        self._group.wait_device()
        return outputs

    def _agree(self, what: str) -> None:
        """Ends a mode on all ranks that one of them could not open, and graph mode where their graphs differ."""
        keys = sorted(map(str, self.manager.graphs)) if self._manager is not None else []
        everyone = self._group.exchange((self._states, keys), f"{what} {self.name}", slow=True)
        for mode in COMPARED_MODES:
            states = [found[mode] for found, _ in everyone]
            at_fault = next((rank for rank, state in enumerate(states) if state["status"] != OK), None)
            if at_fault is not None:
                reason = states[at_fault]["reason"]
                named = reason if at_fault == 0 else f"rank {at_fault}: {reason}"
                self.fail((mode,), states[at_fault]["status"], named)
        differing = next((rank for rank, (_, theirs) in enumerate(everyone) if theirs != everyone[0][1]), None)
        if differing is not None and GRAPH in self.modes:
            counts = f"{len(everyone[differing][1])} against {len(everyone[0][1])}"
            self.fail((GRAPH,), ERROR, f"rank {differing} captured other graphs than rank 0 ({counts})")


class ParallelComparison(Comparison):
    """One rank's part of a comparison; rank 0 records, and the others give it their times.

    Args:
        prepared: What to compare.
        record: Filled on rank 0.
        progress: Told about the work.
        group: The ranks.
        keep: Takes every rank's samples, on rank 0.
    """

    def __init__(
        self, prepared: PreparedCompare, record: CompareRecord, progress: Progress, group: ParallelGroup, keep: Keep
    ) -> None:
        super().__init__(prepared, record, progress)
        assert prepared.bench.assign is not None
        self.device = group.device
        self.timer = self._rank_timer = RankTimer(group)
        self._group = group
        self._assign: Assigner = prepared.bench.assign
        self._keep = keep
        self._of_ranks: dict[Series, list[RankSample]] = defaultdict(list)
        self._problems: list[str] = []

    def execute(self, writer: BackendSampleWriter | None) -> None:
        try:
            super().execute(writer)
        except KeyboardInterrupt as stop:
            failure = self._group.failure_behind_stop()
            if failure is not None:
                raise failure from stop
            raise

    def _release(self) -> None:
        # A rank's process ends with its run, and where another rank failed, this device may wait in a gather for ever.
        return

    def own_calls(self) -> list[EncoderCall]:
        group = self._group
        parts = (part_of(call, self._assign(call.specs, group.size)[group.rank]) for call in self.calls)
        return [part for part in parts if part is not None]

    def make_candidate(self, name: str, inputs: CallInputs) -> Candidate:
        bench, marks = self.prepared.bench, self._rank_timer.mark_encoded
        return ParallelCandidate(name, bench, inputs, self._group, self._assign, marks)

    def _open(self) -> CallInputs:
        facts = shared_facts(self.prepared.bench) | {"backends": ", ".join(self.prepared.spec.backends)}
        agree_on(self._group, facts, lambda name: "give every rank the same program, command and files")
        inputs = super()._open()
        own = {
            "rank": self._group.rank,
            "host": socket.gethostname(),
            "device": str(self.device),
            "device_name": self.record.data["environment"]["device"],
            "problems": [],
        }
        self.record.data["environment"]["ranks"] = self._group.exchange(own, "opened backends", slow=True)
        return inputs

    def _time(self, candidate: Candidate, mode: str, inputs: EncoderInputs) -> CallTime:
        return self.timer.time(partial(candidate.run, mode, inputs))

    def _measure(self, inputs: CallInputs, writer: BackendSampleWriter | None) -> None:
        super()._measure(inputs, writer)
        if self.is_interrupted:
            failure = self._group.failure_behind_stop()
            if failure is not None:
                raise failure
            return
        everyone = self._group.exchange(validity_problems(self.states), "the end of the measuring")
        for facts, problems in zip(self.record.data["environment"]["ranks"], everyone, strict=True):
            facts["problems"] = problems
        self._problems = [f"rank {rank}: {text}" for rank, found in enumerate(everyone) for text in found if rank]

    def _measure_call(
        self, call: EncoderCall, round_index: int, is_repeated: bool, inputs: CallInputs
    ) -> Iterator[BackendSample]:
        candidates = {candidate.name: candidate for candidate in self.live}
        order = self._order(call, round_index, is_repeated)
        call_inputs = inputs.make(call)
        own = []
        for name, mode, _ in order:
            self._time(candidates[name], mode, call_inputs)
            own.append(self._rank_timer.last)
        everyone = self._group.exchange(own, f"request {call.index} of round {round_index}")
        if not self._group.is_leader:
            return
        shares = self._assign(call.specs, self._group.size)
        for position, (name, mode, is_repeat) in enumerate(order):
            candidate = candidates[name]
            assert isinstance(candidate, ParallelCandidate)
            batches = candidate.batches_by_rank(call)
            parts = [RankPart(times[position], packed) for times, packed in zip(everyone, batches, strict=True)]
            for of_rank in rank_samples(call, round_index, mode, position, shares, parts):
                self._keep((name, mode), is_repeat, of_rank)
                if not is_repeat:
                    self._of_ranks[name, mode].append(of_rank)
            flat = [batch for packed in batches for batch in packed]
            sample = make_sample(call, round_index, mode, position, slowest(parts), flat)
            yield BackendSample(name, is_repeat, sample)

    def summarize(self) -> None:
        if not self._group.is_leader:
            return
        self.record.data["comparison"]["invalid_reasons"] += self._problems
        super().summarize()
        for row in self.record.rows:
            found = {
                mode: summarize_ranks(self._of_ranks[row["requested"], mode], mode, self._group.size)
                for mode in COMPARED_MODES
            }
            row["parallel"] = {mode: shared for mode, shared in found.items() if shared is not None}

    def _diagnose(self, inputs: CallInputs) -> None:
        # Replays alone are rank 0's on its own share, and the others wait for it at the end of the run.
        if self._group.is_leader:
            super()._diagnose(inputs)


def lead_compare(
    prepared: PreparedCompare, folder: Path, command: Sequence[str], progress: Progress, group: ParallelGroup
) -> CompareRecord:
    """`run_compare` on rank 0 of several; the others run `follow_compare`. Every rank's samples are saved beside it.

    Raises:
        VitgraphError: As `run_compare`, or another rank failed.
    """
    overwrite = prepared.spec.bench.run.overwrite
    with RankSampleWriter(folder, overwrite, BACKEND_RANK_SAMPLES_FILE, ("backend", "repeat")) as writer:

        def keep(series: Series, is_repeat: bool, sample: RankSample) -> None:
            writer.write(sample, (series[0], str(int(is_repeat))))

        def comparison(prepared: PreparedCompare, record: CompareRecord, progress: Progress) -> ParallelComparison:
            return ParallelComparison(prepared, record, progress, group, keep)

        return run_compare(prepared, folder, command, progress, comparison)


def follow_compare(prepared: PreparedCompare, command: Sequence[str], group: ParallelGroup, progress: Progress) -> None:
    """A rank's part of a comparison where it is not rank 0: the same work, and no record.

    Raises:
        VitgraphError: This rank, or another one, failed.
    """
    ParallelComparison(prepared, new_record(prepared, command), progress, group, lambda *sample: None).execute(None)
