"""Records as short dictionaries, for tests that look at many of their figures at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vitgraph.errors import UsageError, VitgraphError
from vitgraph.records.candidates import COMPARE_KIND, failure
from vitgraph.records.draft import facts_of
from vitgraph.records.record import BenchRecord, MicroRecord, ProfileRecord, Record
from vitgraph.records.record import CompareRecord as TypedComparison
from vitgraph.records.sample_table import Samples, read_samples
from vitgraph.records.sections import Environment, Improvement, Latency, Pair
from vitgraph.records.store import beside, read_record, record_file

Json = dict[str, Any]


def old_form(record: Record) -> Json:
    """The dictionary of a record."""
    found: Json = {
        "schema_version": 1,
        "kind": record.kind,
        **{name: getattr(record, name) for name in ("status", "status_reason", "vitgraph_version", "created_at")},
        "command": list(record.command),
        "settings": _settings(record),
        "environment": {} if record.environment is None else old_environment(record.environment),
    }
    if record.workload is not None:
        found["workload"] = record.workload.model_dump()
    if record.samples_file is not None:
        found["samples_file"] = record.samples_file
    for kind, make in _RESULTS.items():
        if isinstance(record, kind):
            found |= make(record)
    listed: Json = _listed(found)
    return listed


def _listed(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _listed(entry) for name, entry in value.items()}
    return [_listed(entry) for entry in value] if isinstance(value, list | tuple) else value


def _settings(record: Record) -> Json:
    if record.resolved is None:
        return dict(record.settings)
    names = [
        "architecture",
        "row",
        "config_source",
        "token_budgets",
        "max_vision_items_per_batch",
        "max_frames_per_batch",
        "graphs",
    ]
    resolved = {name: getattr(record.resolved, name) for name in names}
    resolved["token_budgets"] = {path: list(budgets) for path, budgets in record.resolved.token_budgets.items()}
    if record.resolved.monolithic is not None:
        resolved["monolithic"] = record.resolved.monolithic.model_dump()
    return {**record.settings, "resolved": resolved}


def old_environment(environment: Environment) -> Json:
    found = facts_of(environment)
    if environment.ranks:
        found["ranks"] = [rank.model_dump() for rank in environment.ranks]
    if environment.encoder is not None:
        found.setdefault("attn_selection", None)
        if (compiled := environment.encoder.compiled) is not None:
            found |= {"compile_s": compiled.seconds, "compilations": compiled.compilations}
            found["compile_cache"] = None if compiled.cache is None else compiled.cache.model_dump()
            found |= {"compile_cache_dir": compiled.cache_dir, "compile_fusions": compiled.fusions}
    return found


def _latency(latency: Latency | None) -> Json | None:
    if latency is None:
        return None
    found = latency.model_dump()
    sharing, found["n"] = found.pop("sharing"), found.pop("calls")
    del found["requests"]
    if found["speed_of_light_ms"] is None:
        del found["speed_of_light_ms"], found["times_speed_of_light"]
    return found if sharing is None else {**found, "parallel": sharing}


def _improvement(found: Improvement) -> Json:
    delta = None if found.improvement_pct is None else 0.0 - found.improvement_pct
    ci95 = None if found.ci95 is None else [0.0 - found.ci95[1], 0.0 - found.ci95[0]]
    return {**found.model_dump(), "delta_pct": delta, "ci95": ci95}


def _pair(pair: Pair, slower: str = "") -> Json:
    metrics = {name: pair.metric(name) for name in ("mean", "p50", "p99")}  # type: ignore[arg-type]
    found: Json = {name: _improvement(of) for name, of in metrics.items() if of is not None}
    if slower and pair.slower is not None:
        found[slower] = _slower(pair)
    return found


def _slower(pair: Pair) -> Json | None:
    if pair.slower is None:
        return None
    found = pair.slower.model_dump()
    return {"n": found.pop("requests"), **found}


def _graph(graph: Any) -> Json:
    found: Json = graph.model_dump()
    for name in ("graphs", "replay_ms", "gpu_busy_ms"):
        found.pop(name)
    found["per_budget"] = [
        {name: value for name, value in row.items() if value is not None} for row in found["per_budget"]
    ]
    if not found["parts"]:
        del found["parts"]
    return found


def _bench(record: BenchRecord) -> Json:
    result = record.result
    graph = _graph(result.graph)
    if result.monolithic is not None:
        graph["monolithic"] = _graph(result.monolithic)
    found, comparison = result.comparison, {}
    if found.pairs:
        comparison = {
            "requests": found.calls,
            **{name: getattr(found, name) for name in ("rounds", "unpaired_samples", "verdict", "verdict_reason")},
            **_pair(found.pairs[0], "slower_than_eager"),
        }
        names = ("monolithic_against_eager", "two_paths_against_monolithic")
        comparison |= {name: _pair(pair) for name, pair in zip(names, found.pairs[1:], strict=False)}
    correctness = None if result.correctness is None else result.correctness.model_dump()
    if correctness is not None and correctness["monolithic_max_rel_l2"] is None:
        del correctness["monolithic_max_rel_l2"]
    summary = {name: _latency(of) for name, of in result.latency.items()}
    return {"summary": summary, "comparison": comparison, "graph": graph, "correctness": correctness}


_SERIES = {
    "plain/eager": "eager",
    "compiled/eager": "eager+compile",
    "plain/graph": "graph",
    "compiled/graph": "graph+compile",
}


def _compare(record: TypedComparison) -> Json:
    found = record.result.comparison
    comparison: Json = {
        **{name: getattr(found, name) for name in ("mode", "isolated", "rounds", "unpaired_samples")},
        "reference": None if found.reference is None else found.reference.model_dump(),
        "invalid_reasons": list(found.invalid_reasons),
        "requests": found.calls,
        "noise_floor_pct": {mode: floor.model_dump() for mode, floor in found.noise_floor.items()},
        "standings": [_standing(entry, bool(found.invalid_reasons)) for entry in found.standings],
    }
    if record.kind == "compile-rows":
        comparison["contrasts"] = [
            {"first": _SERIES[pair.base], "second": _SERIES[pair.series], "metric": metric, **_improvement(gain)}
            for pair in found.contrasts
            for metric, gain in (("mean", pair.mean), ("p99", pair.p99))
            if gain is not None
        ]
        comparison["speed_of_light_ms"] = found.speed_of_light_ms
    advice = record.result.recommendation.model_dump()
    rows = [_candidate(row.model_dump(), row, comparison["standings"]) for row in record.result.candidates]
    return {
        "backends": rows,
        "comparison": comparison,
        "recommendation": {"backend": advice.pop("name"), **advice},
    }


def _standing(entry: Any, is_invalid: bool) -> Json:
    found: Json = {"backend": entry.name, "mode": entry.mode, "mean_ms": entry.mean_ms}
    if entry.against_best is None:
        verdict = "invalid" if is_invalid else "best"
        return found | {"delta_pct": 0.0, "ci95": None, "noise_floor_pct": None, "verdict": verdict}
    gain = _improvement(entry.against_best)
    del gain["improvement_pct"]
    return found | gain


def _candidate(row: Json, typed: Any, standings: list[Json]) -> Json:
    graphs = row["graphs"] or {}
    use = {name: value for name, value in graphs.items() if name in _USE} if graphs.get("items") else None
    modes = {mode: getattr(typed, mode) for mode in ("eager", "graph")}
    own = [entry for entry in standings if entry["backend"] == typed.name]
    shared = {mode: of.latency.sharing for mode, of in modes.items() if of.latency is not None}
    found: Json = {
        "requested": typed.name,
        **{name: row[name] for name in ("used", "implementation", "status", "reason", "plan_build_ms")},
        "modes": {mode: {"status": of.status, "reason": of.reason} for mode, of in modes.items()},
        "eager": _latency(typed.eager.latency),
        "graph": _latency(typed.graph.latency),
        "improvement": None if typed.gain is None else _pair(typed.gain),
        "slower_than_eager": None if typed.gain is None else _slower(typed.gain),
        "error_vs_float32": {mode: of.error_vs_float32 for mode, of in modes.items()},
        "busy": {mode: None if of.busy is None else of.busy.model_dump() for mode, of in modes.items()},
        "use": use,
        "captured": graphs.get("graphs"),
        "dropped": list(row["dropped"]),
        **{name: graphs.get(name) for name in _OF_GRAPHS},
        "verdict_vs_best": min(own, key=lambda entry: entry["mean_ms"], default=None),
    }
    if any(shared.values()):
        found["parallel"] = {mode: of.model_dump() for mode, of in shared.items() if of is not None}
    if typed.compiled is not None:
        found |= {"compile_s": typed.compiled.seconds, "compilations": typed.compiled.compilations}
        found["compile_cache"] = None if typed.compiled.cache is None else typed.compiled.cache.model_dump()
        found |= {"compile_cache_dir": typed.compiled.cache_dir, "compile_fusions": typed.compiled.fusions}
    return found


_OF_GRAPHS = ("pool_bytes", "buffer_bytes", "capture_s", "replay_ms", "gpu_busy_ms", "launch_gap")
_USE = [
    "items",
    "hits",
    "misses",
    "hit_rate",
    "misses_by_reason",
    "replays",
    "path_runs",
    "path_replays",
    "partial_hits",
    "tokens_replayed",
    "budget_tokens_replayed",
    "waste",
    "per_path",
    "per_budget",
]


def _micro(record: MicroRecord) -> Json:
    rate = None if record.environment is None else record.environment.matrix_rate_tflops
    return {**record.result.model_dump(), "matrix_rate_tflops": rate}


def _profile(record: ProfileRecord) -> Json:
    return {} if record.result is None else record.result.model_dump()


_RESULTS: dict[Any, Any] = {
    BenchRecord: _bench,
    TypedComparison: _compare,
    MicroRecord: _micro,
    ProfileRecord: _profile,
}


@dataclass(slots=True)
class RunRecord:
    """A run as dictionaries, with its types in `typed`."""

    data: Json
    folder: Path | None = field(default=None, compare=False)
    typed: BenchRecord | None = field(default=None, compare=False)

    def __getitem__(self, name: str) -> Any:
        return self.data[name]

    @classmethod
    def of(cls, record: BenchRecord, folder: Path | None = None) -> RunRecord:
        """The dictionaries of a record."""
        return cls(old_form(record), folder, record)

    @classmethod
    def load(cls, path: Path) -> RunRecord:
        """Reads a record; raises as `read_record` does."""
        record = read_record(path, "bench")
        assert isinstance(record, BenchRecord)
        return cls.of(record, record_file(path).parent)

    def as_json(self) -> Json:
        """The record as its file has it."""
        assert self.typed is not None
        return self.typed.model_dump(mode="json")

    @property
    def is_cpu_replay(self) -> bool:
        return bool(self.data["graph"]) and self.data["graph"].get("mode") == "cpu-replay"

    @property
    def model_name(self) -> str:
        return str(self.data["settings"]["model"]["model"])

    @property
    def backend_requested(self) -> str | None:
        requested = self.data["settings"]["model"].get("attn_backend")
        return None if requested == "auto" else requested

    @property
    def backend_used(self) -> str | None:
        return self.data["environment"].get("attn_backend")

    @property
    def device_name(self) -> str | None:
        return self.data["environment"].get("device")

    @property
    def ranks(self) -> int:
        return ranks_of(self.data["settings"])

    def load_samples(self) -> Any:
        """Reads the samples that belong to this record.

        Raises:
            UsageError: The record is not on disk, or its samples cannot be read.
        """
        if self.folder is None or self.data.get("samples_file") is None:
            raise UsageError("this record has no samples file; give the folder of a run that measured")
        table = read_samples(beside(self.folder / "run.json", self.data["samples_file"]))
        return SimpleNamespace(samples=old_samples(table), warning=table.warning)


def old_samples(table: Samples) -> list[Any]:
    """The calls of a table, times in milliseconds a request."""
    found = []
    for row in table.calls.to_dict("records"):
        requests = len(str(row["requests"]).split())
        gpu_ms = None if math.isnan(row["gpu_ms"]) else row["gpu_ms"] / requests
        counts = ("position", "items", "tokens", "hits", "misses", "replays", "round")
        found.append(
            SimpleNamespace(
                request=int(row["call"]),
                mode=str(row["series"]),
                wall_ms=row["wall_ms"] / requests,
                gpu_ms=gpu_ms,
                input_rows=0 if math.isnan(row["input_rows"]) else int(row["input_rows"]),
                **{name: int(row[name]) for name in counts},
            )
        )
    return found


def ranks_of(settings: Mapping[str, Any]) -> int:
    """Processes that shared every call, from a record's settings."""
    return int(settings.get("parallel", {}).get("ranks", 1))


@dataclass(slots=True)
class CompareRecord:
    """A comparison as dictionaries, with its types in `typed`."""

    data: Json
    folder: Path | None = field(default=None, compare=False)
    typed: TypedComparison | None = field(default=None, compare=False)

    def __getitem__(self, name: str) -> Any:
        return self.data[name]

    @classmethod
    def of(cls, record: TypedComparison, folder: Path | None = None) -> CompareRecord:
        """The dictionaries of a record."""
        return cls(old_form(record), folder, record)

    @classmethod
    def load(cls, path: Path, kind: str = COMPARE_KIND) -> CompareRecord:
        """Reads a record; raises as `read_record` does."""
        record = read_record(path, kind)
        assert isinstance(record, TypedComparison)
        return cls.of(record, record_file(path).parent)

    @property
    def rows(self) -> list[Json]:
        rows: list[Json] = self.data["backends"]
        return rows

    def as_json(self) -> Json:
        """The record as its file has it."""
        assert self.typed is not None
        return self.typed.model_dump(mode="json")

    @property
    def is_cpu_replay(self) -> bool:
        return self.data["comparison"].get("mode") == "cpu-replay"

    @property
    def model_name(self) -> str:
        return str(self.data["settings"]["model"]["model"])

    @property
    def device_name(self) -> str | None:
        return self.data["environment"].get("device")

    def failure(self) -> VitgraphError | None:
        """What a finished comparison must not exit with 0 for."""
        assert self.typed is not None
        return failure(self.typed.result)
