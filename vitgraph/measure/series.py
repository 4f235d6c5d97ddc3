"""Ways of encoding a call that are measured beside one another: each is a series of an experiment; and their clock."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from vitgraph.attention.base import AttentionBackend, GraphContents, Lengths
from vitgraph.attention.per_shape import PerShapeBackend
from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.measure.calls import CallInputs, EncoderCall
from vitgraph.models.base import EncoderInputs
from vitgraph.models.encoder import SEGMENT_OFFSETS, VisionEncoder
from vitgraph.models.geometry import ItemGeometry
from vitgraph.planning.budgets import GraphKey
from vitgraph.planning.packing import PackedBatch, pack_items
from vitgraph.records.sample_table import EAGER, GRAPH, HF, ITEMWISE


@dataclass(frozen=True, slots=True)
class CallTime:
    """One measured call.

    Attributes:
        wall_ms: Wall clock from the synchronisation before the call to the one after it.
        gpu_ms: Time between two events around the call on the device; None on a CPU.
        encode_ms: Of one rank's part of a call, encoding its share; else None.
        gather_ms: From the end of that to the end of the gather here.
    """

    wall_ms: float
    gpu_ms: float | None
    encode_ms: float | None = None
    gather_ms: float | None = None


def synchronize(device: torch.device) -> None:
    """Waits until a GPU has done everything; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class CallTimer:
    """Times calls on one device; its events are made once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events = (
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            if device.type == "cuda"
            else None
        )

    def time(self, call: Callable[[], object]) -> CallTime:
        """Runs `call` once and times it; its result is dropped."""
        if self._events is None:
            started = time.perf_counter()
            call()
            return CallTime((time.perf_counter() - started) * 1e3, None)
        start, end = self._events
        torch.cuda.synchronize(self._device)
        started = time.perf_counter()
        start.record()
        result = call()
        end.record()
        torch.cuda.synchronize(self._device)
        wall_ms = (time.perf_counter() - started) * 1e3
        del result
        return CallTime(wall_ms, start.elapsed_time(end))

    def median_ms(self, call: Callable[[], object], repeats: int, limit_ms: float = math.inf) -> float:
        """Median wall clock of up to `repeats` calls; of fewer, but at least 3, once they took `limit_ms` together."""
        times: list[float] = []
        while len(times) < repeats and (len(times) < 3 or sum(times) < limit_ms):
            times.append(self.time(call).wall_ms)
        return sorted(times)[len(times) // 2]


MATMUL_SIZE = 8192
MATMUL_REPEATS = 10


def matrix_rate_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Floating-point operations a second of a large matrix product on random data; None on a CPU.

    It is the unit of `speed of light`; measured in the run, because it depends on the card, its power limit and clocks.
    """
    if device.type != "cuda":
        return None
    left = torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=device, dtype=dtype)
    right = torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=device, dtype=dtype)
    timer = CallTimer(device)
    for _ in range(3):
        torch.mm(left, right)
    times = sorted(timer.time(lambda: torch.mm(left, right)).gpu_ms or 0.0 for _ in range(MATMUL_REPEATS))
    return 2.0 * MATMUL_SIZE**3 / (times[len(times) // 2] * 1e-3)


Encode = Callable[[EncoderInputs], list[torch.Tensor]]
"""Encodes a call: the embedding `[rows, D]` of each item, in input order."""


class Series:
    """One way of encoding a call.

    Args:
        manager: The graphs that it replays; None where it replays none.
        is_monolithic: They hold both paths of a two-path model.
    """

    def __init__(
        self, name: str, encode: Encode, manager: EncoderCudaGraphManager | None = None, *, is_monolithic: bool = False
    ) -> None:
        self.name, self.encode, self.manager, self.is_monolithic = name, encode, manager, is_monolithic

    @property
    def is_live(self) -> bool:
        """Whether it can still be measured."""
        return True

    def time(self, timer: CallTimer, inputs: EncoderInputs) -> CallTime | None:
        """Encodes a call once and times it; None where this call is not timed in this series."""
        return timer.time(partial(self.encode, inputs))

    def batches(self, call: EncoderCall) -> Sequence[PackedBatch]:
        """What is packed together of a call; none where nothing is replayed."""
        return [] if self.manager is None else self.manager.plan_call(call.shape_inputs()).batches

    def real_rows(self, call: EncoderCall) -> Sequence[int] | None:
        """Output rows of each item where the packing counts more of them; None where it counts the real ones."""
        return call.item_tokens if self.is_monolithic else None


def eager_series(encoder: VisionEncoder) -> Series:
    """Every path on all items of a call at once."""
    return Series(EAGER, partial(encode_eagerly, encoder))


def graph_series(manager: EncoderCudaGraphManager, name: str = GRAPH) -> Series:
    """The manager's replays, eager where no graph fits."""
    return Series(name, manager.execute, manager)


def stock_series(encoder: VisionEncoder) -> Series:
    """transformers' own forward of the same weights, split into items."""

    def encode(mm_kwargs: EncoderInputs) -> list[torch.Tensor]:
        rows = [encoder.rule.final_tokens(item) for item in mm_kwargs.chosen]
        return list(encoder.stock_forward(mm_kwargs).split(rows))

    return Series(HF, encode)


def itemwise_series(encoder: VisionEncoder) -> Series:
    """Eager with one item of a call after the other: what putting items together gives, without any graph."""

    def encode(mm_kwargs: EncoderInputs) -> list[torch.Tensor]:
        alone = (encoder.select_encoder_cudagraph_items(mm_kwargs, [index]) for index in range(len(mm_kwargs.chosen)))
        return [rows for item in alone for rows in encode_eagerly(encoder, item)]

    return Series(ITEMWISE, encode)


BASELINE_SERIES: Mapping[str, Callable[[VisionEncoder], Series]] = {HF: stock_series, ITEMWISE: itemwise_series}
"""Ways of encoding without graphs that a bench measures too, by `--baseline`."""


def encode_eagerly(
    encoder: VisionEncoder, mm_kwargs: EncoderInputs, check: Callable[[str, torch.Tensor, int], None] | None = None
) -> list[torch.Tensor]:
    """One eager call: every path on all items at once, split into items like a graph call's result.

    Args:
        check: Given each path, its rows `[rows, D]` and how many are expected, before they are split.
    """
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
        if check is not None:
            check(path, rows, sum(counts))
        for index, piece in zip(present, rows.split([counts[i] for i in present]), strict=True):
            outputs[path][index] = piece
    return encoder.postprocess_encoder_output(mm_kwargs, outputs)


def _segments(encoder: VisionEncoder, items: Sequence[ItemGeometry]) -> Iterator[tuple[str, Lengths]]:
    """Lists of attention segments of some items, by their metadata field."""
    metadata = encoder.compute_metadata(items)
    for name in SEGMENT_OFFSETS.keys() & metadata.keys():
        yield name, tuple(np.diff(metadata[name]).tolist())


def eager_segments(encoder: VisionEncoder, calls: Sequence[EncoderCall]) -> Counter[Lengths]:
    """How often an eager call attends within which segments; empty for towers of equal tiles."""
    found: Counter[Lengths] = Counter()
    for items, count in Counter(call.items for call in calls).items() if encoder.calls_varlen else ():
        for _, lengths in _segments(encoder, items):
            found[lengths] += count
    return found


def replay_segments(
    encoder: VisionEncoder, manager: EncoderCudaGraphManager, calls: Sequence[EncoderCall]
) -> list[GraphContents]:
    """What the replays of each graph will attend within, as the manager will pack these calls."""
    found: dict[tuple[GraphKey, str], Counter[Lengths]] = {}
    specs = {call.items: call.specs for call in calls}
    for items, count in Counter(call.items for call in calls).items() if encoder.calls_varlen else ():
        for batch in pack_items(specs[items], manager.plan, manager.policy, manager.cost):
            for run in batch.runs.values():
                if run.key is not None:
                    held = [items[index] for index in batch.items]
                    for name, lengths in _segments(encoder, held):
                        found.setdefault((run.key, name), Counter())[lengths] += count
    contents = []
    for (key, name), replays in found.items():
        slots = encoder.metadata_fields(key)[name].shape[0] - 1
        contents.append(GraphContents(slots, encoder.capture_scalars(key)[SEGMENT_OFFSETS[name]], replays))
    return contents


def expect_calls(
    encoder: VisionEncoder, managers: Iterable[EncoderCudaGraphManager], calls: Sequence[EncoderCall]
) -> None:
    """Tells the attention backend, before anything is captured, what eager calls and the managers' graphs will hold."""
    attention = encoder.attention
    if type(attention).expect is not AttentionBackend.expect:
        replays = [graph for manager in managers for graph in replay_segments(encoder, manager, calls)]
        attention.expect(eager_segments(encoder, calls), replays)


@torch.inference_mode()
def prepare_attention(encoder: VisionEncoder, calls: Sequence[EncoderCall], inputs: CallInputs) -> None:
    """Lets the attention backend build what it needs for the calls' lengths, so that no timed call does."""
    if type(encoder.attention).prepare is AttentionBackend.prepare:
        return
    shapes = {(sum(lengths), len(lengths), max(lengths, default=0)) for lengths in eager_segments(encoder, calls)}
    if shapes and isinstance(encoder.attention, PerShapeBackend):
        ends = (min(calls, key=lambda call: call.input_rows), max(calls, key=lambda call: call.input_rows))
        smallest, largest = (partial(encode_eagerly, encoder, inputs.make(call)) for call in ends)
        encoder.attention.learn_layer(smallest, largest, max(rows for rows, _, _ in shapes))
    encoder.attention.prepare(sorted(shapes))
    if not shapes:
        for call in {call.input_rows: call for call in calls}.values():
            encode_eagerly(encoder, inputs.make(call))
