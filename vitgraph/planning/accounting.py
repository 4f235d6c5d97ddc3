"""Hits, misses with reasons, fill and waste, counted from packed batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from vitgraph.planning.budgets import GraphKey
from vitgraph.planning.packing import PackedBatch


@dataclass(slots=True)
class GraphUse:
    """How one graph was used.

    Attributes:
        replays: Times it was replayed.
        items: Items in those replays.
        tokens: Real output rows in those replays.
        segments: Real attention segments in those replays.
    """

    replays: int = 0
    items: int = 0
    tokens: int = 0
    segments: int = 0


@dataclass(slots=True)
class PathUse:
    """How one encoder path was used.

    Attributes:
        hits: Those of them whose rows were replayed.
        runs: Executions of the path, replayed or eager.
        replays: Those of them that were replayed.
    """

    items: int = 0
    hits: int = 0
    runs: int = 0
    replays: int = 0


@dataclass(slots=True)
class GraphCounters:
    """Counts over many encoder calls. An item is a hit where every non-empty path of it was replayed.

    Attributes:
        items: Items seen; always `hits + misses`.
        hits: Items with every non-empty path replayed.
        misses_by_reason: Items with an eager path, by the reason of the first one.
        partial_hits: Misses of which at least one path was replayed.
        paths: Items and executions of each path.
        use: Replays of each graph.
    """

    items: int = 0
    hits: int = 0
    misses_by_reason: Counter[str] = field(default_factory=Counter)
    partial_hits: int = 0
    paths: dict[str, PathUse] = field(default_factory=dict)
    use: dict[GraphKey, GraphUse] = field(default_factory=dict)

    @property
    def misses(self) -> int:
        return sum(self.misses_by_reason.values())

    @property
    def replays(self) -> int:
        return sum(use.replays for use in self.use.values())

    @property
    def path_runs(self) -> int:
        """Path executions, replayed or eager."""
        return sum(path.runs for path in self.paths.values())

    @property
    def path_replays(self) -> int:
        """Path executions that were replayed."""
        return sum(path.replays for path in self.paths.values())

    @property
    def hit_rate(self) -> float | None:
        """Hits over items; None where there were no items."""
        return self.hits / self.items if self.items else None

    @property
    def tokens_replayed(self) -> int:
        """Real output rows of the replays."""
        return sum(use.tokens for use in self.use.values())

    @property
    def waste(self) -> float | None:
        """Share of the replayed rows that was padding; None where nothing was replayed."""
        share: float | None = _rows_of(self.use)["waste"]
        return share

    def add(self, batches: Iterable[PackedBatch], real_rows: Sequence[int] | None = None) -> None:
        """Counts the batches of one call.

        Args:
            real_rows: Output rows that each item of the call really has, where the packing counts more of them because
                the graph always computes more; None where it counts the real ones.
        """
        for batch in batches:
            self.items += len(batch.items)
            for item in batch.items:
                reason = batch.miss_reason_of(item)
                if reason is None:
                    self.hits += 1
                else:
                    self.misses_by_reason[reason] += 1
                    self.partial_hits += any(run.key is not None and item in run.items for run in batch.runs.values())
            for name, run in batch.runs.items():
                path = self.paths.setdefault(name, PathUse())
                path.items += len(run.items)
                path.runs += 1
                if run.key is not None:
                    path.hits += len(run.items)
                    path.replays += 1
                    use = self.use.setdefault(run.key, GraphUse())
                    use.replays += 1
                    use.items += len(run.items)
                    use.tokens += run.tokens if real_rows is None else sum(real_rows[item] for item in run.items)
                    use.segments += run.segments

    def as_dict(self) -> dict[str, Any]:
        """The counts in the shape of run.json's `graph` part."""
        return {
            "items": self.items,
            "hits": self.hits,
            "misses": self.misses,
            "hit_rate": self.hit_rate,
            "misses_by_reason": dict(sorted(self.misses_by_reason.items())),
            "replays": self.replays,
            "path_runs": self.path_runs,
            "path_replays": self.path_replays,
            "partial_hits": self.partial_hits,
            **_rows_of(self.use),
            "per_path": [
                {
                    "path": name,
                    **asdict(path),
                    **_rows_of({key: use for key, use in self.use.items() if key.path == name}),
                }
                for name, path in self.paths.items()
            ],
            "per_budget": [
                {**key.as_dict(), **asdict(use), "waste": waste_of(use.tokens, key.token_budget * use.replays)}
                for key, use in sorted(self.use.items())
            ],
        }


def _rows_of(used: Mapping[GraphKey, GraphUse]) -> dict[str, Any]:
    """Real and computed rows of some graphs' replays."""
    tokens = sum(use.tokens for use in used.values())
    computed = sum(key.token_budget * use.replays for key, use in used.items())
    return {"tokens_replayed": tokens, "budget_tokens_replayed": computed, "waste": waste_of(tokens, computed)}


def waste_of(tokens: int, budget_tokens: int) -> float | None:
    """Share of `budget_tokens` computed rows that was padding; None where none were computed."""
    return 1 - tokens / budget_tokens if budget_tokens else None


def count_calls(calls: Sequence[Sequence[PackedBatch]]) -> GraphCounters:
    """Counters over the packed batches of several calls."""
    counters = GraphCounters()
    for batches in calls:
        counters.add(batches)
    return counters
