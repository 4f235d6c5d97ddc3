"""Records from the short dictionaries of `record_dicts`, for tests that change figures of a stored one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitgraph.records.draft import compiled_of, environment_of
from vitgraph.records.record import RECORDS, Record

Json = dict[str, Any]

_SHARED = ("status", "status_reason", "vitgraph_version", "created_at", "command", "samples_file")


def record_of(draft: Mapping[str, Any]) -> Record:
    """The record of a draft.

    Raises:
        pydantic.ValidationError: The draft breaks a rule of the format.
    """
    kind = draft["kind"]
    envelope: Json = {"kind": kind, **{name: draft[name] for name in _SHARED if name in draft}}
    if "status" not in draft:
        envelope |= {"status": "complete", "status_reason": None}
    settings = dict(draft.get("settings") or {})
    resolved = settings.pop("resolved", {})
    if settings.get("model"):
        envelope["resolved"] = _resolved(settings, resolved)
    if settings:
        envelope["settings"] = settings
    if draft.get("environment"):
        envelope["environment"] = environment_of(draft["environment"])
    if draft.get("workload"):
        envelope["workload"] = draft["workload"]
    return RECORDS[kind].model_validate(envelope | _RESULTS[kind](draft))


def _resolved(settings: Mapping[str, Any], resolved: Mapping[str, Any]) -> Json:
    model, graph = settings["model"], settings.get("graph", {})
    bench, parallel = settings.get("bench", {}), settings.get("parallel", {})
    backend = model.get("attn_backend")
    found: Json = {
        **{name: model.get(name) for name in ("model", "revision", "load_format", "dtype", "compile")},
        "processor": dict(model.get("mm_processor_kwargs") or {}),
        "attn_backend": None if backend == "auto" else backend,
        "packing": graph.get("packing"),
        "slot_tiers": graph.get("slot_tiers", True),
        "video_pruning_rate": graph.get("video_pruning_rate", 0.0),
        "requests_per_call": _one_number(bench.get("requests_per_call", 1)),
        "rounds": bench.get("rounds"),
        "ranks": parallel.get("ranks", 1),
        "assignment": parallel.get("assignment") if parallel.get("ranks", 1) > 1 else None,
    }
    return found | dict(resolved)


def _latency(found: Mapping[str, Any] | None, requests_per_call: float = 1) -> Json | None:
    if found is None:
        return None
    entry = dict(found)
    n = entry.pop("n")
    if "parallel" in entry:
        entry["sharing"] = entry.pop("parallel")
    return {**entry, "requests": round(n * requests_per_call), "calls": n}


def _improvement(found: Mapping[str, Any]) -> Json:
    ci95 = found["ci95"]
    return {
        "improvement_pct": found.get("improvement_pct"),
        "ci95": None if ci95 is None else [0.0 - ci95[1], 0.0 - ci95[0]],
        "noise_floor_pct": found["noise_floor_pct"],
        "verdict": found["verdict"],
    }


def _pair(base: str, series: str, found: Mapping[str, Any], slower: Mapping[str, Any] | None = None) -> Json:
    metrics = {name: _improvement(found[name]) for name in ("mean", "p50", "p99") if found.get(name)}
    return {"base": base, "series": series, **metrics, "slower": None if slower is None else _slower(slower)}


def _slower(found: Mapping[str, Any]) -> Json:
    return {"requests": found["n"], **{name: value for name, value in found.items() if name != "n"}}


def _one_number(given: Any) -> int | None:
    """Requests a call where all calls have the same number; None for a mix."""
    return 1 if given is None else int(given) if str(given).isdigit() else None


def _per_call(draft: Mapping[str, Any]) -> float:
    """Requests a call, in the mean where calls differ."""
    number = _one_number(draft["settings"]["bench"].get("requests_per_call", 1))
    workload = draft.get("workload") or {}
    return number if number is not None else workload["requests"] / workload["calls"]


def _bench(draft: Mapping[str, Any]) -> Json:
    per_call = _per_call(draft)
    graph = dict(draft["graph"])
    monolithic = graph.pop("monolithic", None)
    monolithic = None if monolithic is None else dict(monolithic)
    for section in filter(None, (graph, monolithic)):
        section["graphs"] = len(section["captured"])
    result: Json = {
        "latency": {mode: _latency(found, per_call) for mode, found in draft["summary"].items()},
        "graph": graph,
        "monolithic": monolithic,
        "correctness": draft["correctness"],
    }
    comparison = draft["comparison"] or {}
    if comparison:
        pairs = [_pair("eager", "graph", comparison, comparison["slower_than_eager"])]
        if "monolithic_against_eager" in comparison:
            pairs.append(_pair("eager", "monolithic", comparison["monolithic_against_eager"]))
            pairs.append(_pair("monolithic", "graph", comparison["two_paths_against_monolithic"]))
        result["comparison"] = {
            "requests": round(comparison["requests"] * per_call),
            "calls": comparison["requests"],
            **{name: comparison[name] for name in ("rounds", "unpaired_samples", "verdict", "verdict_reason")},
            "invalid_reasons": [comparison["verdict_reason"]] if comparison["verdict"] == "invalid" else [],
            "pairs": pairs,
        }
    return {"result": result}


def _compare(draft: Mapping[str, Any]) -> Json:
    per_call = _per_call(draft)
    found = draft["comparison"]
    comparison: Json = {
        name: found[name]
        for name in ("mode", "isolated", "reference", "invalid_reasons", "rounds", "unpaired_samples")
        if name in found
    }
    calls = found.get("requests", 0)
    comparison |= {"requests": round(calls * per_call), "calls": calls, "noise_floor": found.get("noise_floor_pct", {})}
    comparison |= {"contrasts": _contrasts(found), "speed_of_light_ms": found.get("speed_of_light_ms")}
    comparison["standings"] = [_standing(entry) for entry in found.get("standings", [])]
    advice = dict(draft["recommendation"])
    return {
        "result": {
            "candidates": [_candidate(row, draft, per_call) for row in draft["backends"]],
            "comparison": comparison,
            "recommendation": {"name": advice.pop("backend"), **advice},
        }
    }


_SERIES = {
    "eager": "plain/eager",
    "eager+compile": "compiled/eager",
    "graph": "plain/graph",
    "graph+compile": "compiled/graph",
}


def _contrasts(comparison: Mapping[str, Any]) -> list[Json]:
    pairs: dict[tuple[str, str], Json] = {}
    for found in comparison.get("contrasts", []):
        base, series = _SERIES[found["first"]], _SERIES[found["second"]]
        pair = pairs.setdefault((base, series), {"base": base, "series": series})
        delta = found["delta_pct"]
        pair[found["metric"]] = _improvement({**found, "improvement_pct": None if delta is None else 0.0 - delta})
    return list(pairs.values())


def _standing(entry: Mapping[str, Any]) -> Json:
    against = None
    if entry["verdict"] != "best" and not (entry["delta_pct"] == 0.0 and entry["ci95"] is None):
        against = _improvement({**entry, "improvement_pct": 0.0 - entry["delta_pct"]})
    return {"name": entry["backend"], "mode": entry["mode"], "mean_ms": entry["mean_ms"], "against_best": against}


def _candidate(row: Mapping[str, Any], draft: Mapping[str, Any], per_call: float) -> Json:
    modes = {
        mode: {
            **row["modes"][mode],
            "latency": _latency(_shared(row, mode), per_call),
            "error_vs_float32": (row.get("error_vs_float32") or {}).get(mode),
            "busy": (row.get("busy") or {}).get(mode),
        }
        for mode in ("eager", "graph")
    }
    gain = row["improvement"]
    graphs = None
    if row.get("use"):
        names = ("dropped", "pool_bytes", "buffer_bytes", "capture_s", "replay_ms", "gpu_busy_ms", "launch_gap")
        graphs = {
            **row["use"],
            **{name: row[name] for name in names},
            "policy": draft["settings"]["graph"]["packing"],
            "mode": draft["comparison"]["mode"],
            "graphs": row["captured"],
        }
    return {
        "name": row["requested"],
        **{name: row[name] for name in ("used", "implementation", "status", "reason", "plan_build_ms")},
        **modes,
        "gain": None if gain is None else _pair("eager", "graph", gain, row["slower_than_eager"]),
        "graphs": graphs,
        "dropped": row["dropped"],
        "compiled": compiled_of(row),
    }


def _shared(row: Mapping[str, Any], mode: str) -> Json | None:
    """A mode's latency with how its calls were shared among the ranks."""
    shared = row.get("parallel", {}).get(mode)
    return row[mode] if row[mode] is None or shared is None else {**row[mode], "parallel": shared}


def _micro(draft: Mapping[str, Any]) -> Json:
    environment = environment_of(draft["environment"]) | {"matrix_rate_tflops": draft["matrix_rate_tflops"]}
    result = {name: draft[name] for name in ("heads", "head_width", "dtype", "rows")}
    return {"environment": environment, "result": result}


def _profile(draft: Mapping[str, Any]) -> Json:
    names = ("call", "traced", "speed_of_light", "modes", "trace_files")
    return {"result": {name: draft[name] for name in names}}


_RESULTS = {
    "bench": _bench,
    "compare-backends": _compare,
    "compile-rows": _compare,
    "compare-backends-micro": _micro,
    "profile": _profile,
}
