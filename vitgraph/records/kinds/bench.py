"""The result of `vitgraph bench`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vitgraph.records.graph_facts import GraphFacts
from vitgraph.records.latency import Compared, Latency, Pair, Verdict
from vitgraph.records.sections import Count, Number, Section


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
