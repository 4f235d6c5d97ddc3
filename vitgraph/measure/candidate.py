"""One backend of a comparison from loading to release: whatever goes wrong with it ends up in its row, nowhere else.

On several ranks a candidate is open on all of them or on none. A failure inside a call that they share ends the run,
because the other ranks wait in its gather.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from vitgraph.attention.registry import AUTO, backend_class
from vitgraph.errors import BackendError, NothingReplayedError, VitgraphError, first_line
from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.measure.calls import CallInputs, EncoderCall
from vitgraph.measure.correctness import Reference, largest_deviation, worst
from vitgraph.measure.diagnose import Diagnosis
from vitgraph.measure.on_ranks import RanksOfRun
from vitgraph.measure.preparation import PreparedBench
from vitgraph.measure.run import captured_facts, clear_graphs
from vitgraph.measure.series import (
    CallTime,
    CallTimer,
    Encode,
    Series,
    eager_series,
    expect_calls,
    graph_series,
    prepare_attention,
)
from vitgraph.measure.setup import load
from vitgraph.measure.trace import busy_time
from vitgraph.models.base import EncoderInputs
from vitgraph.models.compilation import compile_facts
from vitgraph.models.encoder import VisionEncoder
from vitgraph.planning.accounting import GraphCounters
from vitgraph.records.candidates import (
    CAPTURE_FAILED,
    COMPARED_MODES,
    ERROR,
    INCORRECT,
    OK,
    OUT_OF_MEMORY,
    UNAVAILABLE,
    UNSUPPORTED,
    before_its_turn,
    series_name,
)
from vitgraph.records.record import CompareRecord
from vitgraph.records.results import BusyTime, CandidateMode, RowStatus
from vitgraph.records.results import Candidate as CandidateRow
from vitgraph.records.sample_table import EAGER, GRAPH, Sample
from vitgraph.records.sections import Encoder
from vitgraph.records.series import GraphFacts
from vitgraph.records.store import Draft
from vitgraph.specs.parts import ModelSpec

Outcome = TypeVar("Outcome")

PLAIN, COMPILED = "plain", "compiled"

MOST_GRAPHS = 4
"""Graphs of each candidate that are timed alone."""
WHOLE_CALLS = 3
BUSY_REPEATS = 2


class CandidateSeries(Series):
    """One mode of a candidate; a failure while it is timed ends the mode, and nothing else."""

    def __init__(self, candidate: Candidate, mode: str, series: Series) -> None:
        super().__init__(series_name(candidate.name, mode), series.encode, series.manager)
        self.candidate = candidate
        self.mode = mode

    @property
    def is_live(self) -> bool:
        return self.mode in self.candidate.modes

    def release(self) -> None:
        """Lets go of the encoder and its graphs; an experiment may still hold the series."""
        self.encode, self.manager = _refuse, None

    def time(self, timer: CallTimer, inputs: EncoderInputs) -> CallTime | None:
        return self.candidate.attempt(self.mode, lambda: timer.time(lambda: self.encode(inputs)))


class Candidate:
    """A backend with an encoder and graphs of its own, or with the reason why it has none.

    Args:
        place: Its place among the candidates of the record.
        draft: The record, whose row is filled as facts become known.
        ranks: The ranks that open it together; None in one process.

    Attributes:
        series: Its modes, once it is open.
    """

    def __init__(
        self,
        place: int,
        draft: Draft[CompareRecord],
        prepared: PreparedBench,
        inputs: CallInputs,
        ranks: RanksOfRun | None = None,
    ) -> None:
        self._place, self._draft = place, draft
        self.name = self.row.name
        self.series: list[Series] = []
        self._prepared = prepared
        self._inputs = inputs
        self._ranks = ranks
        self._alone: dict[str, CandidateSeries] = {}
        self._encoder: VisionEncoder | None = None
        self._manager: EncoderCudaGraphManager | None = None

    @property
    def row(self) -> CandidateRow:
        """Its row of the record."""
        return self._draft.record.result.candidates[self._place]

    @row.setter
    def row(self, row: CandidateRow) -> None:
        rows = list(self._draft.record.result.candidates)
        rows[self._place] = row
        self._draft.note_result(candidates=tuple(rows))

    @property
    def modes(self) -> list[str]:
        """Modes that are loaded and right so far."""
        return [mode for mode in COMPARED_MODES if self._encoder is not None and self.row.mode(mode).status == OK]

    @property
    def manager(self) -> EncoderCudaGraphManager:
        """The captured graphs."""
        assert self._manager is not None
        return self._manager

    def open(self, device: torch.device, dtype: torch.dtype, reference: Reference) -> None:
        """Loads the encoder, captures its graphs, and checks both modes against the reference."""
        self.row = self.row.with_modes(**dict.fromkeys(COMPARED_MODES, CandidateMode(status=OK)))
        try:
            self._load(device, dtype)
            if self._encoder is not None:
                self._capture()
            for mode in self.modes:
                self._check(mode, self._alone[mode].encode, reference)
        except BaseException:
            self.row = before_its_turn(self.name)
            raise
        if self._ranks is None:
            return
        self._agree("opened")
        if self._encoder is not None:
            self.series = self._ranks.share(self.series, self._encoder)
        for mode, shared in zip(COMPARED_MODES, self.series, strict=False):
            if mode in self.modes:
                self._check(mode, self._ranks.waiting(shared), reference, self._ranks)

    def attempt(self, mode: str, work: Callable[[], Outcome]) -> Outcome | None:
        """Does some work of a mode; a failure ends the mode, is kept in the row, and gives None."""
        with self._ending((mode,)):
            return work()
        return None

    @contextmanager
    def _ending(self, modes: Sequence[str], known: Mapping[type[Exception], RowStatus] | None = None) -> Iterator[None]:
        """Ends some modes where the block fails: whatever a backend raises, the others are still to be measured."""
        try:
            yield
        except Exception as error:
            by_kind: dict[type[Exception], RowStatus] = {torch.OutOfMemoryError: OUT_OF_MEMORY, **(known or {})}
            status = next((found for kind, found in by_kind.items() if isinstance(error, kind)), ERROR)
            self.fail(modes, status, str(error) if isinstance(error, VitgraphError) else first_line(error))

    def fail(self, modes: Sequence[str], status: RowStatus, reason: str) -> None:
        """Ends some modes, and releases what only they needed."""
        failed = {"status": status, "reason": reason, "latency": None}
        self.row = self.row.with_modes(**{mode: self.row.mode(mode).but(**failed) for mode in modes})
        if GRAPH in modes and self._manager is not None:
            clear_graphs([self._manager])
        if not self.modes:
            self.release()

    def release(self) -> None:
        """Frees the encoder and its graphs."""
        if self._encoder is None:
            return
        device = self._encoder.device
        clear_graphs([] if self._manager is None else [self._manager])
        for series in self._alone.values():
            series.release()
        self._encoder = self._manager = None
        gc.collect()
        if device.type == "cuda":
            with suppress(RuntimeError):
                torch.cuda.empty_cache()

    def prepare(self, calls: Sequence[EncoderCall]) -> None:
        """Lets the backend build what it needs for the calls' lengths, so that no timed call does."""
        encoder, modes = self._encoder, self.modes
        if encoder is not None and modes:
            self.attempt(modes[0], lambda: prepare_attention(encoder, calls, self._inputs))
            if modes[0] not in self.modes:
                # Both modes need what could not be built.
                failed = self.row.mode(modes[0])
                self.fail(self.modes, failed.status, str(failed.reason))
        if self._ranks is not None:
            self._agree("prepared")

    def count(self, counters: Mapping[str, GraphCounters]) -> None:
        """Puts hits, misses and the use of the graphs into the row."""
        if GRAPH in self.modes:
            self._note_graphs(self._graphs.but(**counters[self._alone[GRAPH].name].as_dict()))
        if self._encoder is not None:
            attention = self._encoder.attention
            self.row = self.row.but(
                plan_build_ms=attention.plan_build_ms,
                implementation=attention.implementation,
                choices=attention.choices() or None,
            )

    @property
    def _graphs(self) -> GraphFacts:
        """What the record says of its graphs, once they are captured."""
        assert self.row.graphs is not None
        return self.row.graphs

    def _note_graphs(self, facts: GraphFacts) -> None:
        self.row = self.row.but(graphs=facts)

    def counters(self) -> GraphCounters:
        """Hits, misses and the use of the graphs over all calls; with equal graphs every rank can tell it of all."""
        counters, calls = GraphCounters(), self._prepared.calls
        for call in calls if self._ranks is None else [part for one in calls for part in self._ranks.parts(one)]:
            counters.add(self._alone[GRAPH].batches(call))
        return counters

    @torch.inference_mode()
    def diagnose(
        self, inputs: CallInputs, calls: Sequence[EncoderCall], samples: Mapping[str, Sequence[Sample]]
    ) -> None:
        """Puts into the row what replays take alone, and how long the GPU is busy in whole calls; on a GPU only.

        Args:
            samples: By mode, their samples, for the latency of whole calls.
        """
        assert self._encoder is not None
        if GRAPH in self.modes:
            requests = sum(len(call.requests) for call in self._prepared.calls)
            for facts in Diagnosis(self.manager, inputs, calls).replay_facts(self._graphs, requests, MOST_GRAPHS):
                self._note_graphs(facts)
        spread = sorted(calls, key=lambda call: call.tokens)
        chosen = [spread[int((place + 0.5) / WHOLE_CALLS * len(spread))] for place in range(WHOLE_CALLS)]
        for mode in self.modes:
            busy_ms = wall_ms = 0.0
            for call in chosen:
                encode = partial(self._alone[mode].encode, inputs.make(call))
                found = busy_time(encode, self._encoder.device, BUSY_REPEATS)
                walls = [sample.wall_ms for sample in samples[mode] if sample.call == call.index]
                if found is not None and walls:
                    busy_ms += found.busy_ms
                    wall_ms += float(np.mean(walls))
            if wall_ms:
                n, share = sum(len(call.requests) for call in chosen), busy_ms / wall_ms
                busy = BusyTime(calls=len(chosen), gpu_busy_ms=busy_ms / n, wall_ms=wall_ms / n, share=share)
                self.row = self.row.with_modes(**{mode: self.row.mode(mode).but(busy=busy)})

    # -- opening ---------------------------------------------------------------------------------------------------

    def model_spec(self, device: torch.device) -> ModelSpec | None:
        """How the encoder is loaded; None where its backend is not there, which the row then says."""
        model = self._prepared.spec.model
        if self.name == AUTO:
            return replace(model, attn_backend=AUTO, flash_attn_version=None)
        chosen = backend_class(self.name)
        reason = chosen.unavailable_reason(device)
        if reason is not None:
            self.fail(COMPARED_MODES, UNAVAILABLE, reason)
            return None
        version = model.flash_attn_version if chosen.has_versions else None
        return replace(model, attn_backend=self.name, flash_attn_version=version)

    def _load(self, device: torch.device, dtype: torch.dtype) -> None:
        with self._ending(COMPARED_MODES, {BackendError: UNSUPPORTED}):
            spec = self.model_spec(device)
            if spec is not None:
                self._encoder, facts = load(self._prepared.source, spec, device=device, dtype=dtype)
        if self._encoder is None:
            return
        self._note_encoder(facts)
        graph = self._prepared.spec.graph
        self._manager = EncoderCudaGraphManager(self._encoder, self._prepared.plan, policy=graph.packing)
        expect_calls(self._encoder, [self._manager], self._prepared.calls)
        modes = {EAGER: eager_series(self._encoder), GRAPH: graph_series(self._manager)}
        self._alone = {mode: CandidateSeries(self, mode, series) for mode, series in modes.items()}
        self.series = list(self._alone.values())

    def _note_encoder(self, facts: Encoder) -> None:
        self.row = self.row.but(used=facts.attn_backend, implementation=facts.attn_implementation)

    def _capture(self) -> None:
        assert self._encoder is not None
        refusal = self._encoder.capture_refusal()
        if refusal is not None:
            self.fail((GRAPH,), UNSUPPORTED, refusal)
            return
        # Nothing replays only where every graph was dropped for want of memory. Eager mode may still be measured.
        with self._ending((GRAPH,), {NothingReplayedError: OUT_OF_MEMORY, Exception: CAPTURE_FAILED}):
            self.manager.capture()
        if GRAPH not in self.modes:
            return
        self._note_graphs(GraphFacts(**captured_facts(self.manager) | {"captured": ()}))
        counters = self.counters()
        if not counters.replays:
            reasons = ", ".join(f"{count} {name}" for name, count in counters.misses_by_reason.items())
            text = f"its graphs would replay nothing: all {counters.items} items go eager ({reasons})"
            self.fail((GRAPH,), ERROR, text)

    def _check(self, mode: str, encode: Encode, reference: Reference, ranks: RanksOfRun | None = None) -> None:
        """Compares a mode with the reference; with ranks, what they encode together, and nobody's failure is kept."""
        over = ""
        if ranks is None:
            deviation = self.attempt(mode, lambda: largest_deviation(encode, reference, self._inputs))
            error = None if deviation is None else deviation.distance
        else:
            own = largest_deviation(encode, reference, self._inputs).distance
            error = worst(ranks.group.exchange(own, f"checked {self.name}", slow=True))
            over = " over all ranks"
        if error is None:
            return
        checked = self.row.mode(mode)
        checked = checked.but(error_vs_float32=worst([error, checked.error_vs_float32]))
        self.row = self.row.with_modes(**{mode: checked})
        if not error <= reference.limit:
            text = f"relative L2 distance {error:.3g} from float32{over}, at most {reference.limit:.3g} passes"
            self.fail((mode,), INCORRECT, text)

    def _agree(self, what: str) -> None:
        """Ends a mode on all ranks that one of them could not open, and graph mode where their graphs differ."""
        assert self._ranks is not None
        keys = sorted(map(str, self.manager.graphs)) if self._manager is not None else []
        own = {mode: (self.row.mode(mode).status, self.row.mode(mode).reason) for mode in COMPARED_MODES}
        everyone = self._ranks.group.exchange((own, keys), f"{what} {self.name}", slow=True)
        for mode in COMPARED_MODES:
            states = [found[mode] for found, _ in everyone]
            at_fault = next((rank for rank, (status, _) in enumerate(states) if status != OK), None)
            if at_fault is not None:
                status, reason = states[at_fault]
                self.fail((mode,), status, reason if at_fault == 0 else f"rank {at_fault}: {reason}")
        differing = next((rank for rank, (_, theirs) in enumerate(everyone) if theirs != everyone[0][1]), None)
        if differing is not None and GRAPH in self.modes:
            counts = f"{len(everyone[differing][1])} against {len(everyone[0][1])}"
            self.fail((GRAPH,), ERROR, f"rank {differing} captured other graphs than rank 0 ({counts})")


class CompileCandidate(Candidate):
    """The tower as it is, or with its blocks compiled; both with the attention backend that was asked for."""

    def model_spec(self, device: torch.device) -> ModelSpec:
        return replace(self._prepared.spec.model, compile=self.name == COMPILED)

    def _note_encoder(self, facts: Encoder) -> None:
        super()._note_encoder(facts)
        self.row = self.row.but(compiled=facts.compiled)

    def count(self, counters: Mapping[str, GraphCounters]) -> None:
        super().count(counters)
        if self.row.compiled is not None:
            # Lengths that no sample call had may have been compiled for since.
            self.row = self.row.but(compiled=self.row.compiled.but(**compile_facts()))


def _refuse(inputs: EncoderInputs) -> list[torch.Tensor]:
    raise AssertionError("a candidate that was released is not measured any more")
