"""The results of `bench`, `compare-backends` (also of compiled and not, of attention alone), `profile`, `verify`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, Self

from pydantic import Field

from vitgraph.records.sections import (
    AttentionChoice,
    Compiled,
    Count,
    DroppedGraph,
    Finite,
    GraphKey,
    Number,
    ReplayMode,
    Section,
    Share,
    Time,
)
from vitgraph.records.series import Compared, GraphFacts, Improvement, Latency, Pair, Verdict


class Correctness(Section):
    """Graph against eager before anything was timed."""

    checked: Count = Field(description="Calls whose outputs were compared.")
    status: Literal["ok", "incorrect", "unchecked"] = Field(description="How it ended; `incorrect` has no latency.")
    tolerance: Number = Field(description="Largest distance that passes.")
    max_rel_l2: Number | None = Field(default=None, description="Largest relative L2 distance; null where uncompared.")
    monolithic_max_rel_l2: Number | None = Field(default=None, description="The same of the monolithic graphs.")


class BenchComparison(Compared):
    """The series of a run against one another."""

    pairs: tuple[Pair, ...] = Field(default=(), description="Graph against eager first, then those of monolithic.")
    verdict: Verdict = Field(default="undecided", description="The verdict on the mean of the first pair.")
    verdict_reason: str = Field(default="nothing was measured", description="Why, in words.")

    def pair(self, base: str, series: str) -> Pair | None:
        """Two series compared; None where they were not."""
        return next((pair for pair in self.pairs if (pair.base, pair.series) == (base, series)), None)


class BenchResult(Section):
    """Latencies by series, graph against eager, and the graphs."""

    latency: dict[str, Latency] = Field(default={}, description="By series: `eager`, `graph`, `monolithic`, `hf`.")
    comparison: BenchComparison = Field(default=BenchComparison(), description="The series against one another.")
    graph: GraphFacts = Field(description="The graphs of the series `graph`.")
    monolithic: GraphFacts | None = Field(default=None, description="Graphs of both paths; null without any.")
    correctness: Correctness | None = Field(default=None, description="Graph against eager, first; null if unchecked.")


OK: Literal["ok"] = "ok"
COMPARED_MODES = ("eager", "graph")
RowStatus = Literal["ok", "unavailable", "unsupported", "capture_failed", "incorrect", "out_of_memory", "error"]


class Outcome(Section):
    """How something ended."""

    status: RowStatus = Field(description="`ok`, or what went wrong.")
    reason: str | None = Field(default=None, description="Why, in words; null exactly where the status is `ok`.")

    def model_post_init(self, context: Any) -> None:
        """Refuses a failure without a reason, and a reason without a failure."""
        if (self.status == "ok") == bool(self.reason):
            raise ValueError(f"status {self.status!r} with reason {self.reason!r}; ok alone has none")


class BusyTime(Section):
    """GPU-busy time of some whole calls."""

    calls: Count = Field(description="Calls that were traced.")
    gpu_busy_ms: Time = Field(description="Mean time in which the GPU computed, in ms a request.")
    wall_ms: Time = Field(description="Mean wall time of the same calls, in ms a request.")
    share: Finite = Field(description="`gpu_busy_ms` over `wall_ms`.")


class CandidateMode(Outcome):
    """One mode of a candidate."""

    latency: Latency | None = Field(default=None, description="Its latency; null unless its status is `ok`.")
    error_vs_float32: Number | None = Field(default=None, description="Largest relative L2 distance from float32.")
    busy: BusyTime | None = Field(default=None, description="GPU-busy time of some whole calls; null where untraced.")

    def model_post_init(self, context: Any) -> None:
        """Refuses a latency of a mode that is not `ok`."""
        super().model_post_init(context)
        if self.latency is not None and self.status != "ok":
            raise ValueError(f"a latency with status {self.status!r}; only ok has one")


class Candidate(Outcome):
    """One attention backend, or the tower compiled or not, in both modes; its status is its first failed mode's."""

    name: str = Field(description="Backend asked for; `compiled` or `eager` with `--compile-rows`.")
    used: str | None = Field(default=None, description="Attention backend that ran.")
    implementation: str | None = Field(default=None, description="What stands behind it: package and version.")
    eager: CandidateMode = Field(description="Eager mode.")
    graph: CandidateMode = Field(description="Graph mode.")
    gain: Pair | None = Field(default=None, description="Graph against its own eager; null unless both were measured.")
    graphs: GraphFacts | None = Field(default=None, description="Its graphs; null where none were captured.")
    dropped: tuple[DroppedGraph, ...] = Field(default=(), description="Failed captures, where they ended graph mode.")
    choices: tuple[AttentionChoice, ...] | None = None
    """Of `auto`: which backend each shape of a call went to, in graphs and eagerly."""
    plan_build_ms: Time | None = Field(default=None, description="Time that the backend spent building plans, in ms.")
    compiled: Compiled | None = Field(default=None, description="What compilation did; null without it.")

    def mode(self, name: str) -> CandidateMode:
        """One of its modes."""
        found: CandidateMode = getattr(self, name)
        return found

    def with_modes(self, **changed: CandidateMode) -> Self:
        """The candidate with other modes; its status and reason are those of the first that is not `ok`."""
        modes = {name: changed.get(name) or self.mode(name) for name in COMPARED_MODES}
        states = {name: (mode.status, mode.reason) for name, mode in modes.items()}
        failed = next((name for name, mode in modes.items() if mode.status != OK), None)
        if failed is None:
            return self.but(**modes, status=OK, reason=None)
        status, reason = states[failed]
        is_shared = len(set(states.values())) == 1
        return self.but(**modes, status=status, reason=reason if is_shared else f"{failed}: {reason}")


class Reference(Section):
    """What outputs were checked against before anything was timed."""

    backend: str = Field(description="Attention backend of the reference.")
    dtype: str = Field(description="Its dtype.")
    calls: Count = Field(description="Calls compared.")
    items: Count = Field(description="Items in them.")
    own_error: Number | None = Field(default=None, description="Distance of the run's dtype itself from float32.")
    limit: Number = Field(description="Largest distance that passes.")


class NoiseFloor(Section):
    """What a mode differs from itself, in percent."""

    mean: Number | None = Field(default=None, description="Of the mean.")
    p99: Number | None = Field(default=None, description="Of the 99th percentile.")


class Standing(Section):
    """One candidate and mode against the fastest."""

    name: str = Field(description="The candidate.")
    mode: Literal["eager", "graph"] = Field(description="Its mode.")
    mean_ms: Time = Field(description="Its mean, in ms a request.")
    against_best: Improvement | None = Field(default=None, description="Its gain over the fastest; null for that one.")

    @property
    def verdict(self) -> Verdict | Literal["best"]:
        """`best`, or the verdict against the best."""
        return "best" if self.against_best is None else self.against_best.verdict


class CandidateComparison(Compared):
    """The candidates against one another."""

    mode: ReplayMode | None = Field(default=None, description="`cpu-replay`: on a CPU, which saves no launches.")
    isolated: bool = Field(default=False, description="Each candidate was measured in a process of its own.")
    reference: Reference | None = Field(default=None, description="What outputs were checked against.")
    noise_floor: dict[str, NoiseFloor] = Field(default={}, description="What a mode differs from itself, by mode.")
    standings: tuple[Standing, ...] = Field(default=(), description="Measured candidates and modes, fastest first.")
    contrasts: tuple[Pair, ...] = Field(default=(), description="Of `--compile-rows`: graphs, compilation, and both.")
    speed_of_light_ms: Time | None = None
    """Time of the arithmetic of a mean request, without padding, at the measured matrix rate, in ms."""


class Recommendation(Section):
    """Which candidate and mode to use."""

    name: str | None = Field(default=None, description="The candidate; null where there is no advice.")
    mode: str | None = Field(default=None, description="Its mode.")
    sure: Literal["clear", "undecided"] = Field(default="undecided", description="Whether it is beyond the noise.")
    fastest_in_share: Share | None = Field(default=None, description="Share of the resamples in which it is fastest.")
    text: str = Field(description="The advice in a sentence or two.")


class CompareResult(Section):
    """The candidates, how they compare, and which to use."""

    candidates: tuple[Candidate, ...] = Field(description="One entry a backend, or the tower compiled and not.")
    comparison: CandidateComparison = Field(default=CandidateComparison(), description="How they compare.")
    recommendation: Recommendation = Field(description="Which to use.")


class MicroRow(Outcome):
    """One call of one backend; a backend that cannot run has one row, with the reason."""

    backend: str = Field(description="Backend.")
    implementation: str | None = Field(default=None, description="What stands behind it: package and version.")
    sweep: Literal["length", "slots"] | None = Field(default=None, description="What is varied: rows, or empty slots.")
    segment_length: Count | None = Field(default=None, description="Rows of a segment.")
    segments: Count | None = Field(default=None, description="Segments of the call.")
    slots: Count | None = Field(default=None, description="Segment slots of the call.")
    rows: Count | None = Field(default=None, description="Rows of the call.")
    timed_as: Literal["graph", "eager"] | None = None
    """Whether a graph of many calls was timed, or calls one by one."""
    milliseconds: Time | None = Field(default=None, description="Time of one call in ms; wall clock on a CPU.")
    first_call_ms: Time | None = Field(default=None, description="Time of the first call in ms, compilation included.")
    relative_error: Number | None = Field(default=None, description="Relative distance from attention in float32.")
    limit_ms: Time | None = Field(default=None, description="Its arithmetic at the matrix rate, in ms; null on a CPU.")
    limit_share: Number | None = Field(default=None, description="`limit_ms` over `milliseconds`.")


class Crossing(Section):
    """Where the fastest backend changes as segments get longer, or empty slots more."""

    sweep: Literal["length", "slots"] = Field(description="What is varied: rows of a segment, or empty slots by it.")
    segments: Count | None = Field(default=None, description="Segments of the calls, where their length is varied.")
    segment_length: Count | None = Field(default=None, description="Rows of the segment, where the slots are varied.")
    below: str = Field(description="The fastest backend before it.")
    above: str = Field(description="The fastest backend from there on.")
    equal_at: Number = Field(description="Rows of a segment, or slots, at which both take the same time; interpolated.")
    low: Count = Field(description="The measured size before it.")
    high: Count = Field(description="The measured size after it.")


class MicroResult(Section):
    """Attention alone with the heads of a model's tower."""

    heads: Count = Field(description="Heads of the tower.")
    head_width: Count = Field(description="Width of one head.")
    dtype: str = Field(description="Dtype.")
    rows: tuple[MicroRow, ...] = Field(default=(), description="One entry a backend and call.")
    crossings: tuple[Crossing, ...] = Field(default=(), description="Where one backend overtakes another.")


# -- where one backend overtakes another -------------------------------------------------------------------------------

CLEAR = 1.02
"""A backend stays the fastest until another is faster by so much: less is within the noise of these timings."""

_SWEPT = {"length": ("segments", "segment_length"), "slots": ("segment_length", "slots")}
"""What is kept, and what is varied, by sweep."""


def crossings(rows: Sequence[MicroRow]) -> tuple[Crossing, ...]:
    """The sizes at which the fastest backend changes, in the order of the rows.

    Between the two measured sizes that it lies between, the times are taken for powers of the size.
    """
    sweeps: dict[tuple[Literal["length", "slots"], int], dict[int, dict[str, float]]] = {}
    for row in rows:
        if row.sweep is not None and row.milliseconds:
            kept, varied = (getattr(row, name) for name in _SWEPT[row.sweep])
            sweeps.setdefault((row.sweep, kept), {}).setdefault(varied, {})[row.backend] = row.milliseconds
    return tuple(
        Crossing(sweep=sweep, **{_SWEPT[sweep][0]: kept}, below=below, above=above, equal_at=at, low=low, high=high)
        for (sweep, kept), times in sweeps.items()
        for below, above, at, low, high in _changes(times)
    )


def _changes(times: Mapping[int, Mapping[str, float]]) -> Iterator[tuple[str, str, float, int, int]]:
    sizes = sorted(times)
    fastest = min(times[sizes[0]], key=times[sizes[0]].__getitem__)
    for low, high in pairwise(sizes):
        now = times[high]
        best = min(now, key=now.__getitem__)
        if best == fastest or now.get(fastest, math.inf) <= CLEAR * now[best]:
            continue
        yield fastest, best, _meeting(times, fastest, best, low, high), low, high
        fastest = best


def _meeting(times: Mapping[int, Mapping[str, float]], below: str, above: str, low: int, high: int) -> float:
    """Where the times of two backends are equal; the middle where one was not timed at both ends."""
    ends = [(times[size].get(above), times[size].get(below)) for size in (low, high)]
    if not all(mine and other for mine, other in ends):
        return math.sqrt(low * high)
    before, after = (math.log(mine / other) for mine, other in ends if mine and other)
    share = min(max(before / (before - after), 0.0), 1.0)
    return low * (high / low) ** share


class ProfiledCall(Section):
    """The call."""

    items: tuple[tuple[Count, Count, Count], ...] = Field(description="Width, height and frames of each item.")
    tokens: Count = Field(description="Its output tokens.")
    input_rows: Count = Field(description="Its rows of the pixel tensors.")
    replays: tuple[GraphKey, ...] = Field(description="The graphs that it replays, in order.")
    eager_items: Count = Field(description="Items of it that run eagerly in graph mode too.")


class KernelTime(Section):
    """Kernels of one kind."""

    ms: Time = Field(description="Their time, in ms a call.")
    kernels: Finite = Field(description="How many there are in a call, a mean over the traces.")


class NamedKernel(KernelTime):
    """One kernel, or operator on a CPU."""

    name: str = Field(description="Its name.")
    kind: str = Field(description="Its kind.")


class ModeTrace(Section):
    """One mode, a mean over several traces."""

    wall_ms: Time = Field(description="Wall time of the call when nobody traces it, in ms.")
    kernels: Finite = Field(description="Kernels of a call.")
    busy_ms: Time = Field(description="Time in which the device computed, in ms.")
    span_ms: Time = Field(description="From the first kernel to the end of the last, in ms.")
    gap_ms: Finite = Field(description="`span_ms` without `busy_ms`, in ms.")
    kinds: dict[str, KernelTime] = Field(description="By kind of kernel; more than `busy_ms` where they overlap.")
    top: tuple[NamedKernel, ...] = Field(description="The kernels that took longest.")


class SpeedOfLight(Section):
    """The arithmetic of the unpadded call at the rate of a large matrix product."""

    matrix_rate_tflops: Time = Field(description="That rate, measured, in TFLOP/s.")
    total_ms: Time = Field(description="All of it, in ms.")
    product_ms: Time | None = Field(default=None, description="Matrix products and convolutions, in ms.")
    attention_ms: Time | None = Field(default=None, description="Attention, in ms.")


class ProfileResult(Section):
    """Where the time of one call goes, in both modes."""

    call: ProfiledCall = Field(description="The call.")
    traced: str = Field(description="What the times are of: kernels of a GPU, or operators of a CPU.")
    speed_of_light: SpeedOfLight | None = Field(default=None, description="Its arithmetic's time; null on a CPU.")
    modes: dict[str, ModeTrace] = Field(description="By mode: `eager` and `graph`.")
    trace_files: tuple[str, ...] = Field(default=(), description="Traces for chrome://tracing or Perfetto beside it.")


class Check(Section):
    """One named check."""

    name: str = Field(description="Its name.")
    status: Literal["ok", "failed", "skipped", "error"] = Field(description="How it ended.")
    max_rel_l2: Number | None = Field(default=None, description="Largest relative L2 distance from eager; null: none.")
    compared: Count = Field(default=0, description="Outputs that it compared.")
    failures: Count = Field(default=0, description="Faults that it found.")
    detail: str = Field(default="", description="What it did, why it was skipped, or its first fault, in words.")


class VerifiedModel(Section):
    """The verification of one encoder."""

    architecture: str = Field(description="Architecture name of the model.")
    row: str | None = Field(default=None, description="Row of the table of supported models.")
    preset: str | None = Field(default=None, description="Preset, folder or hub id that was verified.")
    device: str | None = Field(default=None, description="Where it ran.")
    dtype: str | None = Field(default=None, description="Dtype of the encoder.")
    backend_requested: str | None = Field(default=None, description="Attention backend asked for.")
    backend_used: str | None = Field(default=None, description="What really ran.")
    compiled_blocks: Count = Field(default=0, description="Blocks that were compiled; 0 unless it was asked for.")
    status: Literal["ok", "failed", "error"] = Field(description="`failed` a check, or `error`: it was not completed.")
    max_rel_l2: Number | None = Field(default=None, description="Largest relative L2 distance from eager; null: none.")
    attn_choices: tuple[AttentionChoice, ...] | None = None
    """Which backend each shape of an attention call went to, where there was a choice."""
    tolerance: Number | None = Field(default=None, description="Largest distance that passes.")
    own_error: Number | None = None
    """Distance of eager itself from float32 on the items beyond the tolerance, for which 1.5 times as much passes; null
    where there was none."""
    checks: tuple[Check, ...] = Field(default=(), description="The named checks, in the order in which they ran.")
    budgets: dict[str, tuple[Count, ...]] = Field(default={}, description="Token budgets of each path.")
    graphs_captured: Count = Field(default=0, description="Graphs captured.")
    graphs_dropped: Count = Field(default=0, description="Graphs planned that did not fit in memory.")
    calls: Count = Field(default=0, description="Random calls compared.")
    items: Count = Field(default=0, description="Items encoded by the graph path, over all checks.")
    replays: Count = Field(default=0, description="Graphs replayed in these; a model with none is not verified.")
    seed: Count = Field(default=0, description="Seed of weights, pixels and draws.")
    seconds: Time | None = Field(default=None, description="Wall time, in s.")
    error: str | None = Field(default=None, description="Class and message of what ended it early.")
    ranks: Count = Field(default=1, description="Processes that shared the calls.")

    @property
    def failed_checks(self) -> list[str]:
        """Names of the checks that failed."""
        return [check.name for check in self.checks if check.status == "failed"]


class VerifyResult(Section):
    """One entry a model that was verified."""

    models: tuple[VerifiedModel, ...] = Field(default=(), description="The models, in the order of verification.")
