"""Sections of a run's HTML page: latency, charts, hits and waste, memory of each graph, checks, environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vitgraph.records.bench_record import RunRecord
from vitgraph.records.samples import EAGER, GRAPH, MONOLITHIC, compared_modes, request_times
from vitgraph.records.saved_runs import SavedRun
from vitgraph.report import svg_charts
from vitgraph.report.claims import IMPROVEMENT_NOTE, LAUNCH_GAP_MEANING, backend_text, claim_of, dtype_of, workload_name
from vitgraph.report.html_parts import Markup, claim_cell, details, escape, facts, table
from vitgraph.report.paths_view import (
    MONOLITHIC_HEADERS,
    MONOLITHIC_TITLE,
    PATH_HEADERS,
    PATHS_NOTE,
    PATHS_TITLE,
    all_graphs,
    has_monolithic,
    monolithic_claims,
    monolithic_rows,
    path_rows,
)
from vitgraph.report.tidy_tables import budgets_text
from vitgraph.report.units import (
    NO_VALUE,
    bytes_text,
    count_text,
    is_number,
    ms_text,
    number_text,
    ratio_text,
    share_text,
)

_ROWS_SHOWN = 24
MODE_LABELS = {"eager": "Eager", "graph": "Graph", "monolithic": "Monolithic graph", "hf": "Transformers"}


def claim_cells(record: RunRecord) -> tuple[Markup, Markup]:
    """The mean and P99 improvements of a run as cells of a table."""
    mean, tail = claim_of(record, "mean"), claim_of(record, "p99")
    return claim_cell(mean.headline, mean.note), claim_cell(tail.headline, tail.note)


def capture_text(graph: Mapping[str, Any]) -> str:
    """How many graphs were captured, and in what time."""
    seconds = f" in {number_text(graph['capture_s'], 2)} s" if is_number(graph.get("capture_s")) else ""
    return f"{count_text(len(graph.get('captured', [])), 'graph')}{seconds}"


def latency_section(record: RunRecord) -> str:
    """Improvements, and the latency of each mode; nothing where nothing was measured."""
    comparison, summary = record["comparison"] or {}, record["summary"]
    if not summary:
        return ""
    parts = ["<h2>Latency</h2>"]
    if comparison.get("requests"):
        named = ("Backend", "Mean latency improvement", "P99 latency improvement")
        parts.append(table(named, [(backend_text(record), *claim_cells(record))], numeric_from=len(named)))
        parts.append(f'<p class="note">{IMPROVEMENT_NOTE}</p>')
    columns = ("mean", "p50", "p90", "p99", "max", "std", "gpu_mean")
    rows: list[tuple[str, ...]] = []
    for mode, entry in summary.items():
        cells = [
            NO_VALUE if name == "p99" and not entry["p99_supported"] else ms_text(entry[f"{name}_ms"])
            for name in columns
        ]
        limit = ratio_text(entry.get("times_speed_of_light"))
        rows.append((MODE_LABELS[mode], *cells, limit, str(entry["n"]), str(entry["outliers"])))
    latencies = ("Mean", "P50", "P90", "P99", "Max", "Std", "GPU mean")
    headers = ("ms a request", *latencies, "Speed of light", "Requests", "Outliers kept")
    parts.append(table(headers, rows))
    floors = [
        f"{name.upper() if name != 'mean' else name} ±{number_text(comparison[name]['noise_floor_pct'], 2)}%"
        for name in ("mean", "p50", "p99")
        if comparison and is_number(comparison[name]["noise_floor_pct"])
    ]
    if floors:
        parts.append(f'<p class="note">Noise floor (eager against eager): {", ".join(floors)}.</p>')
    return "".join(parts)


def monolithic_section(record: RunRecord) -> str:
    """Two paths beside one graph of both; nothing where that was not measured."""
    if not has_monolithic(record):
        return ""
    claims = "".join(f"<p>{escape(claim)}</p>" for claim in monolithic_claims(record))
    return f"<h2>{MONOLITHIC_TITLE}</h2>{table(MONOLITHIC_HEADERS, monolithic_rows(record))}{claims}"


def charts_section(run: SavedRun) -> str:
    """Latency by tokens and its distribution; nothing without requests measured in both modes."""
    pair = request_times(run.samples, compared_modes(run.samples))
    if not pair.requests:
        return ""
    rows = {sample.request: sample for sample in run.samples if sample.mode == GRAPH}
    tokens = np.array([rows[request].tokens for request in pair.requests], dtype=np.float64)
    misses = np.array([rows[request].misses for request in pair.requests], dtype=np.float64)
    budgets = sorted({entry["token_budget"] for entry in (run.record["graph"] or {}).get("captured", [])})
    series = [svg_charts.Series(mode, mode, pair.times[mode]) for mode in pair.times]
    return (
        '<div class="charts">'
        + svg_charts.latency_by_tokens(
            tokens, pair.times[EAGER], pair.times[GRAPH], misses, budgets, pair.times.get(MONOLITHIC)
        )
        + svg_charts.latency_distribution(series)
        + "</div>"
    )


def hits_section(record: RunRecord) -> str:
    """Hits, misses by reason, and what was replayed with each graph."""
    graph = record["graph"] or {}
    if not graph.get("items"):
        return ""
    reasons = sorted(graph["misses_by_reason"].items(), key=lambda pair: (-pair[1], pair[0]))
    outcomes = [("hit", graph["hits"])]
    outcomes += [(f"miss: {name.replace('_', ' ')}", count) for name, count in reasons if count]
    figures = [svg_charts.outcome_bars(outcomes)]
    replayed = [entry for entry in all_graphs(graph, "per_budget") if entry["replays"]]
    if replayed:
        figures.append(svg_charts.budget_bars(*_budget_totals(replayed)))
    parts = ["<h2>Hits and waste by token budget</h2>", f'<div class="charts">{"".join(figures)}</div>']
    paths = path_rows(graph)
    if paths:
        parts.append(f'<h3>{PATHS_TITLE}</h3>{table(PATH_HEADERS, paths)}<p class="note">{PATHS_NOTE}</p>')
    if graph.get("partial_hits"):
        parts.append(f"<p>{graph['partial_hits']} of the misses had some path replayed.</p>")
    if replayed:
        rows = [
            (
                *_graph_cells(entry),
                str(entry["replays"]),
                str(entry["items"]),
                share_text(1 - entry["waste"]),
                share_text(entry["waste"]),
                ms_text(entry.get("replay_ms")),
                ratio_text(entry.get("launch_gap")),
            )
            for entry in replayed
        ]
        headers = ("Graph", "Slots", "Replays", "Items", "Fill", "Waste", "Replay ms", "Launch gap")
        parts.append(_folded(table(headers, rows), len(rows)))
    else:
        parts.append("<p>Nothing was replayed.</p>")
    return "".join(parts)


def _folded(content: str, graphs: int) -> str:
    """A table of graphs; a long one is for the reader to open, and an empty one is left out."""
    if not graphs:
        return ""
    return content if graphs <= _ROWS_SHOWN else details(f"All {graphs} graphs", content)


def _budget_totals(replayed: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[int], list[float]]:
    """Names, items and waste in percent of each path and budget, its slots and axis keys together."""
    totals: dict[tuple[str, int], list[int]] = {}
    for entry in replayed:
        total = totals.setdefault((entry["path"], entry["token_budget"]), [0, 0, 0])
        for place, name in enumerate(("replays", "items", "tokens")):
            total[place] += entry[name]
    keys = sorted(totals)
    waste = [100 * (1 - totals[key][2] / (totals[key][0] * key[1])) for key in keys]
    return [_graph_name(*key) for key in keys], [totals[key][1] for key in keys], waste


def _graph_name(path: str, token_budget: int) -> str:
    return str(token_budget) if path == "default" else f"{path} {token_budget}"


def _graph_cells(entry: Mapping[str, Any]) -> tuple[str, str]:
    axis = f", {'×'.join(map(str, entry['axis_key']))}" if entry["axis_key"] else ""
    return f"{_graph_name(entry['path'], entry['token_budget'])}{axis}", str(entry["segment_slots"])


def memory_section(record: RunRecord) -> str:
    """Memory and capture time of each graph, and the graphs that could not be captured."""
    graph = record["graph"] or {}
    captured, left_out = all_graphs(graph, "captured"), all_graphs(graph, "dropped")
    if not captured and not left_out:
        return ""
    uses = {_graph_cells(entry): entry["replays"] for entry in all_graphs(graph, "per_budget")}
    rows = [
        (
            *_graph_cells(entry),
            bytes_text(entry["pool_bytes"]),
            bytes_text(entry["buffer_bytes"]),
            number_text(entry["capture_ms"], 1),
            str(uses.get(_graph_cells(entry), 0)),
        )
        for entry in captured
    ]
    headers = ("Graph", "Slots", "Pool added", "Buffers used", "Capture ms", "Replays")
    pool, buffers = (bytes_text(graph.get(name)) for name in ("pool_bytes", "buffer_bytes"))
    total = f"Total: graph pool {pool}, shared buffers {buffers}, {capture_text(graph)}."
    dropped = "".join(
        f"<p>Not captured: {escape(_graph_cells(entry)[0])} ({count_text(entry['segment_slots'], 'slot')}): "
        f"{escape(entry['reason'])}</p>"
        for entry in left_out
    )
    return f"<h2>Memory of each graph</h2><p>{escape(total)}</p>{_folded(table(headers, rows), len(rows))}{dropped}"


def checks_section(record: RunRecord) -> str:
    """Correctness, launch gap, call overhead, skipped inputs."""
    correctness, graph = record["correctness"], record["graph"] or {}
    rows: list[tuple[str, object]] = []
    if correctness is None:
        rows.append(("Correctness", "not checked"))
    else:
        limits = (
            f"{value:.1e}" if is_number(value) else NO_VALUE
            for value in (correctness["max_rel_l2"], correctness["tolerance"])
        )
        distance, tolerance = limits
        rows.append(
            (
                "Correctness",
                f"{correctness['status']}: graph against eager on {count_text(correctness['checked'], 'call')} before "
                f"anything was timed, largest relative L2 distance {distance}, tolerance {tolerance}",
            )
        )
    if is_number(graph.get("launch_gap")):
        rows.append(("Launch gap", f"{ratio_text(graph['launch_gap'])}, {LAUNCH_GAP_MEANING}"))
    for call in (graph.get("call_overheads") or [])[:1]:
        shape = f"{count_text(call['items'], 'item')}, {count_text(call['tokens'], 'token')}"
        whole, replays, rest = (ms_text(call[name]) for name in ("call_ms", "replays_ms", "overhead_ms"))
        text = (
            f"{rest} ms outside the replays of the most frequent call ({shape}: whole {whole} ms, replays {replays} ms)"
        )
        rows.append(("Call overhead", text))
    skipped = record["workload"].get("skipped", [])
    if skipped:
        rows.append(("Skipped inputs", f"{len(skipped)}, first: {skipped[0]['source']}: {skipped[0]['reason']}"))
    return f"<h2>Checks</h2>{facts(rows)}"


def environment_section(record: RunRecord) -> str:
    """What the figures were measured on and with."""
    environment, workload, settings = record["environment"], record["workload"], record["settings"]
    state = environment.get("gpu_state") or {}
    memory, rate = environment.get("gpu_memory_bytes"), environment.get("matrix_rate_tflops")
    libraries = environment.get("libraries", {})
    media = ", ".join(count_text(workload[f"{name}s"], name) for name in ("image", "video") if f"{name}s" in workload)
    rows = [
        ("Device", record.device_name),
        ("GPU memory", bytes_text(memory) if memory else None),
        (
            "Driver, CUDA, cuDNN",
            _joined(state.get("driver_version"), environment.get("cuda"), environment.get("cudnn")),
        ),
        ("Power limit", f"{state['power.limit']} W" if state.get("power.limit") else None),
        ("While measuring", _states_text(environment.get("gpu_states") or [])),
        ("Matrix rate", f"{number_text(rate, 0)} TFLOP/s measured" if rate else None),
        ("Attention", _joined(*dict.fromkeys((backend_text(record), environment.get("attn_implementation"))))),
        ("Dtype", dtype_of(record)),
        ("Libraries", _joined(*(f"{name} {version}" for name, version in libraries.items() if version))),
        ("Python, platform", _joined(environment.get("python"), environment.get("platform"))),
        ("vitgraph", record["vitgraph_version"]),
        ("Workload", f"{workload_name(record)}, fingerprint {workload.get('fingerprint')}"),
        ("Items", f"{workload['items']}{f': {media}' if media else ''}"),
        ("Where they come from", workload["provenance"].get("statement")),
        ("Token budgets", budgets_text(settings["resolved"]["token_budgets"])),
    ]
    return f"<h2>Environment</h2>{facts(rows)}"


def _joined(*parts: object) -> str:
    return ", ".join(str(part) for part in parts if part)


def _states_text(states: Sequence[Mapping[str, Any] | None]) -> str | None:
    """Ranges of what the driver reported while measuring; None without a reading."""
    readings = [state for state in states if state]
    parts = []
    for name, label, unit in (
        ("clocks.sm", "SM clock", "MHz"),
        ("temperature.gpu", "temperature", "°C"),
        ("power.draw", "power", "W"),
    ):
        values = [float(state[name]) for state in readings if _is_float(state.get(name))]
        if values:
            parts.append(f"{label} {min(values):.0f} to {max(values):.0f} {unit}")
    capped = sum(state.get("clocks_event_reasons.sw_power_cap") == "Active" for state in readings)
    if capped:
        parts.append(f"held by the power limit in {capped} of {len(readings)} readings")
    return ", ".join(parts) or None


def _is_float(text: Any) -> bool:
    try:
        float(text)
    except (TypeError, ValueError):
        return False
    return True
