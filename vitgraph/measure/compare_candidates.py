"""One backend of a comparison from loading to release: whatever goes wrong with it ends up in its row, nowhere else."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from vitgraph.attention.registry import backend_class
from vitgraph.attention.selection import first_line
from vitgraph.errors import BackendError, NothingReplayedError, VitgraphError
from vitgraph.graphs.manager import CallPlan, EncoderCudaGraphManager
from vitgraph.measure.bench import PreparedBench
from vitgraph.measure.calls import CallInputs, EncoderCall
from vitgraph.measure.compare_reference import Reference, largest_error
from vitgraph.measure.compare_results import COMPARED_MODES, OK
from vitgraph.measure.runner import BenchRunner
from vitgraph.measure.setup import load
from vitgraph.models.base import EncoderInputs
from vitgraph.models.encoder import VisionEncoder
from vitgraph.planning.accounting import GraphCounters
from vitgraph.planning.packing import PackedBatch
from vitgraph.records.compare_record import (
    CAPTURE_FAILED,
    ERROR,
    INCORRECT,
    OUT_OF_MEMORY,
    UNAVAILABLE,
    UNSUPPORTED,
    empty_row,
    set_status,
)
from vitgraph.records.samples import GRAPH
from vitgraph.specs import ModelSpec

Outcome = TypeVar("Outcome")


class Candidate:
    """A backend with an encoder and graphs of its own, or with the reason why it has none.

    Args:
        name: Registry name.
        prepared: Model, calls and plan.
        inputs: Makes the calls' pixels.

    Attributes:
        name: Registry name.
        row: Its row of the record, filled as facts become known.
    """

    def __init__(self, name: str, prepared: PreparedBench, inputs: CallInputs) -> None:
        self.name = name
        self.row = empty_row(name)
        self._prepared = prepared
        self._inputs = inputs
        self._states: dict[str, dict[str, Any]] = {mode: {"status": OK, "reason": None} for mode in COMPARED_MODES}
        self._encoder: VisionEncoder | None = None
        self._manager: EncoderCudaGraphManager | None = None
        self._runner: BenchRunner | None = None

    @property
    def modes(self) -> list[str]:
        """Modes that are loaded and right so far."""
        return [mode for mode in COMPARED_MODES if self._encoder is not None and self._states[mode]["status"] == OK]

    @property
    def manager(self) -> EncoderCudaGraphManager:
        """The captured graphs."""
        assert self._manager is not None
        return self._manager

    def open(self, device: torch.device, dtype: torch.dtype, reference: Reference) -> None:
        """Loads the encoder, captures its graphs, and checks both modes against the reference."""
        self._load(device, dtype)
        if self._encoder is not None:
            self._capture()
        for mode in self.modes:
            self._check(mode, reference)
        set_status(self.row, self._states)

    def run(self, mode: str, inputs: EncoderInputs) -> Sequence[torch.Tensor]:
        """Encodes one call."""
        return self.encode_alone(mode, inputs)

    def encode_alone(self, mode: str, inputs: EncoderInputs) -> list[torch.Tensor]:
        """Encodes one call in this process."""
        assert self._runner is not None
        return self.manager.execute(inputs) if mode == GRAPH else self._runner.run_eager(inputs)

    def attempt(self, mode: str, work: Callable[[], Outcome]) -> Outcome | None:
        """Does some work of a mode; a failure ends the mode, is kept in the row, and gives None."""
        try:
            return work()
        except Exception as error:  # whatever a backend raises, the others are still to be measured
            status = OUT_OF_MEMORY if isinstance(error, torch.OutOfMemoryError) else ERROR
            self.fail((mode,), status, _reason(error))
            return None

    def fail(self, modes: Sequence[str], status: str, reason: str) -> None:
        """Ends some modes, and releases what only they needed."""
        for mode in modes:
            self._states[mode] = {"status": status, "reason": reason}
        set_status(self.row, self._states)
        if GRAPH in modes and self._manager is not None:
            # After a device error even releasing fails, and the error itself is already in the row.
            with suppress(RuntimeError):
                self._manager.clear()
        if not self.modes:
            self.release()

    def release(self) -> None:
        """Frees the encoder and its graphs."""
        if self._encoder is None:
            return
        device = self._encoder.device
        if self._manager is not None:
            with suppress(RuntimeError):
                self._manager.clear()
        self._encoder = self._manager = self._runner = None
        gc.collect()
        if device.type == "cuda":
            with suppress(RuntimeError):
                torch.cuda.empty_cache()

    def prepare(self, calls: Sequence[EncoderCall]) -> None:
        """Lets the backend build what it needs for the calls' lengths, so that no timed call does."""
        runner, modes = self._runner, self.modes
        if runner is None or not modes:
            return
        self.attempt(modes[0], lambda: runner.prepare_attention(calls))
        if modes[0] not in self.modes:
            # Both modes need what could not be built.
            self.fail(self.modes, **self._states[modes[0]])

    def plan(self, call: EncoderCall) -> CallPlan:
        """How a call is packed; its pixels are not needed for that."""
        return self.manager.plan_call(EncoderInputs(call.items, {}, {}, tuple(range(len(call.items)))))

    def batches_of(self, call: EncoderCall) -> list[PackedBatch]:
        """What is packed together of a call."""
        return self.plan(call).batches

    def count(self) -> None:
        """Puts hits, misses and the use of the graphs over all calls into the row."""
        if GRAPH in self.modes:
            self.row["use"] = self.counters().as_dict()
        if self._encoder is not None:
            self.row["plan_build_ms"] = self._encoder.attention.plan_build_ms

    def counters(self) -> GraphCounters:
        """Hits, misses and the use of the graphs over all calls."""
        counters = GraphCounters()
        for call in self._prepared.calls:
            counters.add(self.batches_of(call))
        return counters

    # -- opening ---------------------------------------------------------------------------------------------------

    def model_spec(self, device: torch.device) -> ModelSpec | None:
        """How the encoder is loaded; None where its backend is not there, which the row then says."""
        chosen = backend_class(self.name)
        model = self._prepared.spec.model
        reason = chosen.unavailable_reason(device)
        if reason is not None:
            self.fail(COMPARED_MODES, UNAVAILABLE, reason)
            return None
        version = model.flash_attn_version if chosen.has_versions else None
        return replace(model, attn_backend=self.name, flash_attn_version=version)

    def _load(self, device: torch.device, dtype: torch.dtype) -> None:
        try:
            spec = self.model_spec(device)
            if spec is None:
                return
            self._encoder, facts = load(self._prepared.source, spec, device=device, dtype=dtype)
        except BackendError as error:
            self.fail(COMPARED_MODES, UNSUPPORTED, str(error))
        except Exception as error:  # whatever a package raises, the other backends are still to be measured
            status = OUT_OF_MEMORY if isinstance(error, torch.OutOfMemoryError) else ERROR
            self.fail(COMPARED_MODES, status, _reason(error))
        else:
            self.row |= {"used": facts["attn_backend"], "implementation": facts["attn_implementation"]}
            graph = self._prepared.spec.graph
            self._manager = EncoderCudaGraphManager(self._encoder, self._prepared.plan, policy=graph.packing)
            self._runner = BenchRunner(self._encoder, self._manager, self._inputs)

    def _capture(self) -> None:
        assert self._encoder is not None
        refusal = self._encoder.capture_refusal()
        if refusal is not None:
            self.fail((GRAPH,), UNSUPPORTED, refusal)
            return
        manager = self.manager
        try:
            manager.capture()
        except Exception as error:  # a capture fails in many ways, and eager mode may still be measured
            is_memory = isinstance(error, torch.OutOfMemoryError) or (
                isinstance(error, NothingReplayedError) and bool(manager.dropped)
            )
            self.fail((GRAPH,), OUT_OF_MEMORY if is_memory else CAPTURE_FAILED, _reason(error))
            return
        self.row |= {
            "captured": len(manager.graphs),
            "dropped": [dropped.as_dict() for dropped in manager.dropped],
            "pool_bytes": manager.pool_bytes,
            "buffer_bytes": manager.buffer_bytes,
            "capture_s": sum(graph.capture_ms for graph in manager.graphs.values()) / 1e3,
        }
        counters = self.counters()
        if not counters.replays:
            reasons = ", ".join(f"{count} {name}" for name, count in counters.misses_by_reason.items())
            text = f"its graphs would replay nothing: all {counters.items} items go eager ({reasons})"
            self.fail((GRAPH,), ERROR, text)

    def _check(self, mode: str, reference: Reference) -> None:
        error = self.attempt(mode, lambda: largest_error(partial(self.encode_alone, mode), reference, self._inputs))
        if error is None:
            return
        self.row["error_vs_float32"][mode] = error
        if not error <= reference.limit:
            text = f"relative L2 distance {error:.3g} from float32, at most {reference.limit:.3g} passes"
            self.fail((mode,), INCORRECT, text)


def _reason(error: Exception) -> str:
    """An error in a line: our own say everything, others need their kind."""
    return str(error) if isinstance(error, VitgraphError) else first_line(error)
