"""The result of `vitgraph compare-backends`, of attention backends, and with `--compile-rows` of compiled and not."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field

from vitgraph.records.graph_facts import GraphFacts
from vitgraph.records.latency import Compared, Improvement, Latency, Pair, Verdict
from vitgraph.records.sections import (
    AttentionChoice,
    Compiled,
    Count,
    DroppedGraph,
    Finite,
    Number,
    ReplayMode,
    Section,
    Share,
    Time,
)

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
