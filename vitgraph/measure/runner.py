"""Runs every call in every mode, interleaved, and hands each sample out as soon as it is measured."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from vitgraph.attention.base import AttentionBackend
from vitgraph.errors import IncorrectOutputError
from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.measure.calls import CallInputs, EncoderCall
from vitgraph.measure.environment import GpuState, read_gpu_state
from vitgraph.measure.monolithic import real_rows
from vitgraph.measure.timing import CallTime, CallTimer
from vitgraph.models.base import EncoderInputs
from vitgraph.models.encoder import SEGMENT_OFFSETS, VisionEncoder
from vitgraph.planning.accounting import GraphCounters
from vitgraph.planning.items import DEFAULT_PATH
from vitgraph.planning.packing import PackedBatch
from vitgraph.records.samples import EAGER, EAGER_REPEAT, GRAPH, GRAPH_MODES, HF, MONOLITHIC, Sample

CONTROL_SHARE = 0.1
MIN_CONTROL_CALLS = 40
P99_CONTROL_CALLS = 300
"""Eager is measured against itself on a share of the calls, and on at least so many; where there are enough calls to
speak of a P99, on enough to know its noise."""

CORRECTNESS_CALLS = 8
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}
"""Relative L2 distance of replay and eager that passes, by dtype."""

STATE_READS = 8
"""Times that clocks and throttling are read during a run."""


@dataclass(slots=True)
class BenchOutcome:
    """What a run measured, complete or not.

    Attributes:
        counters: Hits, misses and use of the graphs, over one round.
        monolithic: The same of the monolithic graphs; None where there are none.
        max_rel_l2: Largest distance of replay and eager on the checked calls; None where none was checked.
        monolithic_max_rel_l2: The same of the monolithic graphs.
        checked_calls: Calls whose outputs were compared.
        gpu_states: Readings of the GPU during the run.
        is_interrupted: The user stopped the run; the samples until then are valid.
    """

    counters: GraphCounters = field(default_factory=GraphCounters)
    monolithic: GraphCounters | None = None
    max_rel_l2: float | None = None
    monolithic_max_rel_l2: float | None = None
    checked_calls: int = 0
    gpu_states: list[GpuState | None] = field(default_factory=list)
    is_interrupted: bool = False


class BenchRunner:
    """Measures one encoder with one manager on one list of calls.

    Args:
        encoder: The encoder, for eager and for the stock forward.
        manager: The captured graphs.
        inputs: Makes the calls' pixels.
        baseline: `eager`, or `hf` to measure transformers' stock forward too.
        monolithic: Captured monolithic graphs of the same encoder, to be measured too.
    """

    def __init__(
        self,
        encoder: VisionEncoder,
        manager: EncoderCudaGraphManager,
        inputs: CallInputs,
        *,
        baseline: str = "eager",
        monolithic: EncoderCudaGraphManager | None = None,
    ) -> None:
        self.encoder = encoder
        self.manager = manager
        self.inputs = inputs
        self.managers = {GRAPH: manager} if monolithic is None else {GRAPH: manager, MONOLITHIC: monolithic}
        self._timer = CallTimer(encoder.device)
        self._extra_modes = [*([HF] if baseline == HF else []), *([MONOLITHIC] if monolithic is not None else [])]

    def _run(self, mode: str, mm_kwargs: EncoderInputs) -> object:
        """The work that is timed in a mode."""
        if mode in self.managers:
            return self.managers[mode].execute(mm_kwargs)
        if mode == HF:
            return self.encoder.stock_forward(mm_kwargs)
        return self.run_eager(mm_kwargs)

    def run_eager(self, mm_kwargs: EncoderInputs) -> list[torch.Tensor]:
        """One eager call: every path on all items at once, split into items like the graph call's result."""
        encoder = self.encoder
        specs = encoder.get_encoder_cudagraph_item_specs(mm_kwargs)
        outputs: dict[str, list[torch.Tensor | None]] = {}
        for path in encoder.get_encoder_cudagraph_config().paths:
            counts = [spec.tokens_on(path) for spec in specs]
            present = [index for index, count in enumerate(counts) if count]
            outputs[path] = [None] * len(counts)
            if not present:
                continue
            selected = mm_kwargs
            if len(present) < len(counts):
                selected = encoder.select_encoder_cudagraph_items(mm_kwargs, present)
            rows = encoder.encoder_eager_forward(selected, path)
            for index, piece in zip(present, rows.split([counts[i] for i in present]), strict=True):
                outputs[path][index] = piece
        return encoder.postprocess_encoder_output(mm_kwargs, outputs)

    @torch.inference_mode()
    def check_outputs(self, calls: Sequence[EncoderCall], outcome: BenchOutcome) -> None:
        """Compares replay and eager on some calls before anything is timed.

        Raises:
            IncorrectOutputError: An output is not finite, or farther from eager than the dtype's tolerance.
        """
        chosen = {call.items: call for call in calls}
        for call in list(chosen.values())[:CORRECTNESS_CALLS]:
            mm_kwargs = self.inputs.make(call)
            graph, eager = self._checked_outputs(mm_kwargs), self.run_eager(mm_kwargs)
            for index, (replayed, reference) in enumerate(zip(graph, eager, strict=True)):
                distance = relative_l2(replayed, reference)
                outcome.max_rel_l2 = worse(outcome.max_rel_l2, distance)
                self._require_equal(GRAPH, distance, index, call)
            if MONOLITHIC in self.managers:
                whole = self.managers[MONOLITHIC].execute(mm_kwargs)
                for index, (replayed, reference) in enumerate(zip(whole, eager, strict=True)):
                    distance = relative_l2(replayed, reference)
                    outcome.monolithic_max_rel_l2 = worse(outcome.monolithic_max_rel_l2, distance)
                    self._require_equal(MONOLITHIC, distance, index, call)
            outcome.checked_calls += 1

    def _require_equal(self, mode: str, distance: float, index: int, call: EncoderCall) -> None:
        tolerance = TOLERANCE[self.encoder.dtype]
        if not distance <= tolerance:
            raise IncorrectOutputError(
                f"item {index} of a call with {call.tokens} tokens: {mode} and eager differ by {distance:.3g} "
                f"(relative L2, at most {tolerance:g} for {self.encoder.dtype}); nothing was timed. "
                "Try another --mm-encoder-attn-backend, and `vitgraph verify` for the details"
            )

    def _checked_outputs(self, mm_kwargs: EncoderInputs) -> list[torch.Tensor]:
        """What graph mode gives for a call, to be compared with eager."""
        return self.manager.execute(mm_kwargs)

    def own_calls(self, calls: Sequence[EncoderCall]) -> list[EncoderCall]:
        """The calls as this process encodes them."""
        return list(calls)

    @torch.inference_mode()
    def prepare_attention(self, calls: Sequence[EncoderCall]) -> None:
        """Lets the backend build what it needs for the calls' lengths (plans, tuning), so that no timed call does."""
        encoder, shapes = self.encoder, set()
        if type(encoder.attention).prepare is AttentionBackend.prepare:
            return
        tile_counts: dict[int, EncoderCall] = {}
        for items, call in {call.items: call for call in calls}.items():
            metadata = encoder.compute_metadata(items, DEFAULT_PATH, ()) if encoder.calls_varlen else {}
            names = SEGMENT_OFFSETS.keys() & metadata.keys()
            scalars = encoder.compute_scalars(metadata) if names else {}
            for name in names:
                offsets = metadata[name]
                shapes.add((int(offsets[-1]), len(offsets) - 1, scalars[SEGMENT_OFFSETS[name]]))
            if not names:
                tile_counts[call.input_rows] = call
        encoder.attention.prepare(sorted(shapes))
        for call in tile_counts.values():
            self.run_eager(self.inputs.make(call))

    @torch.inference_mode()
    def warm_up(self, calls: Sequence[EncoderCall], tick: Callable[[], None] | None = None) -> None:
        """Runs calls in every mode without recording them."""
        for call in calls:
            mm_kwargs = self.inputs.make(call)
            for mode in (EAGER, GRAPH, *self._extra_modes):
                self._timer.time(partial(self._run, mode, mm_kwargs))
            if tick is not None:
                tick()

    @torch.inference_mode()
    def measure(
        self,
        calls: Sequence[EncoderCall],
        rounds: int,
        record: Callable[[Sample], None],
        outcome: BenchOutcome,
        tick: Callable[[], None] | None = None,
    ) -> None:
        """Measures every call in every mode, `rounds` times, alternating which mode goes first.

        A stop by the user ends the measuring and marks the outcome; nothing measured before is lost.

        Args:
            calls: The calls.
            rounds: Rounds over all of them.
            record: Takes each sample as it is measured.
            outcome: Filled while measuring.
            tick: Called after each call.
        """
        least = P99_CONTROL_CALLS if len(calls) >= P99_CONTROL_CALLS else MIN_CONTROL_CALLS
        control_every = max(1, len(calls) // max(least, int(len(calls) * CONTROL_SHARE)))
        read_every = max(1, len(calls) * rounds // STATE_READS)
        gc.collect()
        gc.disable()
        done = 0
        try:
            for round_index in range(rounds):
                for call in calls:
                    if done % read_every == 0:
                        outcome.gpu_states.append(read_gpu_state(self.encoder.device))
                    done += 1
                    is_control = (call.index + round_index) % control_every == 0
                    batches = self._measure_call(call, round_index, is_control, record)
                    if round_index == 0:
                        outcome.counters.add(batches[GRAPH])
                    if round_index == 0 and MONOLITHIC in batches:
                        outcome.monolithic = outcome.monolithic or GraphCounters()
                        outcome.monolithic.add(batches[MONOLITHIC], real_rows(call))
                    if tick is not None:
                        tick()
        except KeyboardInterrupt:
            outcome.is_interrupted = True
        finally:
            gc.enable()
            outcome.gpu_states.append(read_gpu_state(self.encoder.device))

    def _measure_call(
        self, call: EncoderCall, round_index: int, is_control: bool, record: Callable[[Sample], None]
    ) -> dict[str, list[PackedBatch]]:
        """Times a call in every mode, and returns the packed batches of those that replay."""
        mm_kwargs = self.inputs.make(call)
        batches: dict[str, list[PackedBatch]] = {}
        for position, mode in enumerate(self._order_modes(call, round_index, is_control)):
            time = self._timer.time(partial(self._run, mode, mm_kwargs))
            if mode in self.managers:
                # Looked up after the timed run, which has to pack the call itself.
                batches[mode] = self.managers[mode].plan_call(mm_kwargs).batches
            record(make_sample(call, round_index, mode, position, time, batches.get(mode, ())))
        return batches

    def _order_modes(self, call: EncoderCall, round_index: int, is_control: bool) -> list[str]:
        turn = call.index + round_index
        modes = [GRAPH, *self._extra_modes]
        # Of three modes the other two change places too, so that neither always follows eager.
        if turn // 2 % 2:
            modes.reverse()
        modes.insert(0, EAGER)
        if turn % 2:
            modes.reverse()
        if is_control:
            # The control runs on the other side of the graph call, as far from the first eager one as graph is.
            modes.append(EAGER_REPEAT) if modes[0] == EAGER else modes.insert(0, EAGER_REPEAT)
        return modes


def make_sample(
    call: EncoderCall, round_index: int, mode: str, position: int, time: CallTime, batches: Sequence[PackedBatch]
) -> Sample:
    """The sample of a timed call; its packed batches tell hits and replays."""
    in_graph = mode in GRAPH_MODES
    hits = sum(batch.miss_reason_of(item) is None for batch in batches for item in batch.items)
    replays = sum(run.key is not None for batch in batches for run in batch.runs.values())
    return Sample(
        round=round_index,
        request=call.index,
        mode=mode,
        position=position,
        wall_ms=time.wall_ms / call.requests,
        gpu_ms=None if time.gpu_ms is None else time.gpu_ms / call.requests,
        items=len(call.items),
        tokens=call.tokens,
        input_rows=call.input_rows,
        hits=hits if in_graph else 0,
        misses=len(call.items) - hits if in_graph else 0,
        replays=replays if in_graph else 0,
    )


def worse(known: float | None, distance: float) -> float:
    """The larger of two distances; a NaN stays, which compares with nothing and which `max` would drop."""
    return distance if known is None or not distance <= known else known


def relative_l2(value: torch.Tensor, reference: torch.Tensor) -> float:
    """`|value - reference| / |reference|` in float32; NaN stays NaN."""
    value, reference = value.float(), reference.float()
    return ((value - reference).norm() / reference.norm().clamp(min=1e-30)).item()
