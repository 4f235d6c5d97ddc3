"""Makes typed records of the dictionaries that commands fill while they measure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vitgraph.records.draft import compiled_of, environment_of
from vitgraph.records.record import RECORDS, Record

Json = dict[str, Any]

KINDS = {"tune": "tune-budgets", "calibration": "calibrate"}
_SHARED = ("status", "status_reason", "vitgraph_version", "created_at", "command", "samples_file")


def record_of(draft: Mapping[str, Any]) -> Record:
    """The record of a draft.

    Raises:
        pydantic.ValidationError: The draft breaks a rule of the format.
    """
    kind = KINDS.get(draft["kind"], draft["kind"])
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


def _verify(draft: Mapping[str, Any]) -> Json:
    models = [{name: value for name, value in row.items() if name != "failed_checks"} for row in draft["rows"]]
    return {"result": {"models": models}}


def _profile(draft: Mapping[str, Any]) -> Json:
    names = ("call", "traced", "speed_of_light", "modes", "trace_files")
    return {"result": {name: draft[name] for name in names}}


_SETTINGS = ("token_budgets", "max_vision_items_per_batch", "max_frames_per_batch", "packing")
_TIMES = ("mean_ms", "p50_ms", "p99_ms")


def _evaluation(found: Mapping[str, Any]) -> Json:
    entry: Json = {
        "settings": {name: found[name] for name in _SETTINGS},
        "latency": {name: found[name] for name in _TIMES},
        **{name: found[name] for name in ("score", "graphs", "memory_bytes", "capture_s", "is_within_limits")},
    }
    if "gain_over_eager_pct" in found:
        entry["against_eager"] = {
            "latency": _predicted(found),
            "improvement_pct": found["gain_over_eager_pct"],
            "slower_share": found["slower_than_eager_share"],
            **{f"closed_to_oracle_{name}": found[f"closed_to_oracle_{name}"] for name in ("mean", "median")},
        }
    return entry


def _predicted(found: Mapping[str, Any]) -> Json:
    return {**{name: found[name] for name in _TIMES}, "requests": found["n"]}


def _tune(draft: Mapping[str, Any]) -> Json:
    vllm, used = draft["vllm"], draft["profile"]
    environment = dict(used["environment"])
    model = dict(used["model"])
    baselines = {
        name: _predicted(found) if name in ("eager", "oracle") else _evaluation(found)
        for name, found in draft["baselines"].items()
    }
    result = {
        **{name: draft[name] for name in _TUNED},
        "best": _evaluation(draft["predicted"]),
        "runners_up": [_evaluation(found) for found in draft["runners_up"]],
        "pareto": [_evaluation(found) for found in draft["pareto"]],
        "error_text": draft["predicted"]["error_text"],
        "baselines": baselines,
        "vllm": {
            "verdict": vllm["verdict"],
            "best": _evaluation(vllm["predicted"]),
            "baselines": {name: _evaluation(found) for name, found in vllm["baselines"].items()},
            **{name: vllm[name] for name in ("compilation_config", "assumed_overheads")},
        },
        "beyond_vllm": draft["what_vllm_cannot_express"],
        "profile": {
            **{name: used[name] for name in ("label", "created_at", "is_synthetic", "is_cpu")},
            "environment": environment_of(environment | {n: v for n, v in model.items() if n not in _NAMES}),
        },
        "measured": None if draft["measured"] is None else _measured(draft["measured"], draft.get("samples")),
    }
    return {"result": result, "resolved": {"model": draft["model"], "row": model.get("row")}}


_NAMES = ("name", "row", "weights", "tower")


def _measured(found: Mapping[str, Any], _: Any) -> Json:
    entry = {name: value for name, value in found.items() if name not in ("rows", "strategies", "samples")}
    noise = found["request_noise_pct"]
    entry["strategies"] = {name: _strategy(name, of, noise, found) for name, of in found["strategies"].items()}
    return entry


def _strategy(name: str, found: Mapping[str, Any], noise: float | None, measured: Mapping[str, Any]) -> Json:
    entry: Json = {
        "latency": {
            **{time: found[time] for time in (*_TIMES, "max_ms")},
            "p90_ms": None,
            "std_ms": None,
            "outliers": 0,
            "p99_supported": found["is_p99_supported"],
            "requests": found["n"],
            "calls": measured["calls"],
        }
    }
    kept = [
        "graphs",
        "graphs_captured",
        "dropped",
        "memory_bytes",
        "capture_s",
        "predicted_mean_ms",
        "prediction_error",
    ]
    entry |= {key: found[key] for key in kept if key in found}
    if "mean_delta_pct" in found:
        entry["against_eager"] = _against_eager(name, found, noise, measured)
    return entry


def _against_eager(name: str, found: Mapping[str, Any], noise: float | None, measured: Mapping[str, Any]) -> Json:
    def gain(metric: str, ci95: Sequence[float] | None) -> Json | None:
        delta = found[f"{metric}_delta_pct"]
        if delta is None:
            return None
        low, high = ci95 or (0.0, 0.0)
        verdict = "undecided" if not ci95 else "faster" if high < 0 else "slower" if low > 0 else "undecided"
        verdict = "invalid" if measured["problems"] else verdict
        improvement = {"improvement_pct": 0.0 - delta, "ci95": ci95, "noise_floor_pct": None, "verdict": verdict}
        return _improvement(improvement)

    rows = measured["rows"]
    over = [row for row in rows if row[f"{name}_ms"] > row["eager_ms"] * 1.02]
    requests = sum(row["requests"] for row in rows)
    over_count = sum(row["requests"] for row in over)
    slow = [row for row in rows if noise is not None and row[f"{name}_ms"] > row["eager_ms"] * (1 + noise / 100)]
    count = None if noise is None else sum(row["requests"] for row in slow)
    slower = {
        "n": requests,
        "threshold_pct": noise,
        "count": count,
        "share": None if count is None or not requests else count / requests,
        "over_2pct_count": over_count,
        "over_2pct_share": over_count / requests if requests else None,
    }
    return {
        "base": "eager",
        "series": name,
        "mean": gain("mean", found["mean_ci95"]) or {"improvement_pct": None, "verdict": "undecided"},
        "p50": gain("p50", None),
        "p99": gain("p99", found["p99_ci95"]),
        "slower": _slower(slower),
    }


def _calibration(draft: Mapping[str, Any]) -> Json:
    model = dict(draft["model"])
    plans = [
        {
            **plan,
            "slot_tiers": [
                {"path": path, "token_budget": budget, "slots": slots} for path, budget, slots in plan["slot_tiers"]
            ],
        }
        for plan in draft["holdout_plans"]
    ]
    result = {name: draft[name] for name in _CALIBRATED} | {"holdout_plans": plans}
    result |= {"name": model["name"], "row": model.get("row"), "weights": model.get("weights", "random")}
    environment = environment_of({**draft["environment"], **{n: v for n, v in model.items() if n not in _NAMES}})
    resolved = {"model": model["name"], "row": model.get("row"), "compile": bool(model.get("compiled_blocks"))}
    return {"result": result, "environment": environment, "resolved": resolved}


_RESULTS = {
    "bench": _bench,
    "compare-backends": _compare,
    "compile-rows": _compare,
    "compare-backends-micro": _micro,
    "verify": _verify,
    "profile": _profile,
    "tune-budgets": _tune,
    "calibrate": _calibration,
}

_TUNED = """target objective limits verdict verdict_text error by_budget hits items waste misses search notes
compilation_config serve_line unseen by_requests_per_call list_for_all other_traffic""".split()
_STRATEGY = "graphs graphs_captured dropped memory_bytes capture_s predicted_mean_ms prediction_error".split()
_CALIBRATED = """max_tokens encoder replays eager calls copies captures memory holdout notes is_synthetic
elapsed_s""".split()
