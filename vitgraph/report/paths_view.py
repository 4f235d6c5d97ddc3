"""What a record says of encoder paths, as cells for terminal and page: each path's share, and one graph of both.

Improvements are positive where the mode named first is faster, as everywhere in reports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vitgraph.records.bench_record import RunRecord
from vitgraph.records.samples import EAGER, GRAPH, MONOLITHIC
from vitgraph.records.stats import P99_MIN_SAMPLES
from vitgraph.report.claims import interval_text
from vitgraph.report.units import (
    NO_VALUE,
    NOT_MEASURED,
    bytes_text,
    count_text,
    is_number,
    ms_text,
    number_text,
    share_text,
    signed_pct_text,
)

Cells = tuple[str, ...]

PATHS_TITLE = "Encoder paths"
PATH_HEADERS = ("Path", "Items", "Hits", "Runs", "Replays", "Rows used", "Computed", "Waste", "Replay ms")
PATHS_NOTE = "Hits: items whose rows on the path were replayed. Replay ms: in replays of the path, a mean request."
MONOLITHIC_TITLE = "Two paths against one monolithic graph"
MONOLITHIC_HEADERS = ("", "Eager", "Two paths", "Monolithic")


def path_rows(graph: Mapping[str, Any]) -> list[Cells]:
    """One row an encoder path, under `PATH_HEADERS`; none where the model has one path.

    Args:
        graph: The `graph` section of a record, or expected counters of the same shape.

    Returns:
        The cells. The time of a path of which some graph was not timed is said not to be measured; where no graph was
        to be timed, as on a CPU, it is a dash.
    """
    paths = graph.get("per_path", [])
    if all(row["path"] == "default" for row in paths):
        return []
    return [
        (
            row["path"],
            *(str(row[name]) for name in ("items", "hits", "runs", "replays")),
            *(f"{row[name]:,}" for name in ("tokens_replayed", "budget_tokens_replayed")),
            share_text(row["waste"]),
            _replay_text(row),
        )
        for row in paths
    ]


def _replay_text(row: Mapping[str, Any]) -> str:
    was_wanted = "replay_ms" in row
    return NOT_MEASURED if was_wanted and row["replay_ms"] is None else ms_text(row.get("replay_ms"))


def all_graphs(graph: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Entries of `per_budget`, `captured` or `dropped`; those of monolithic graphs come under the path `monolithic`."""
    own = [{**entry, "path": MONOLITHIC} for entry in graph.get("monolithic", {}).get(name, [])]
    return [*graph.get(name, []), *own]


def has_monolithic(record: RunRecord) -> bool:
    """Whether monolithic graphs were measured, in all compared modes at least once."""
    return "two_paths_against_monolithic" in (record["comparison"] or {}) and bool(record["comparison"]["requests"])


def monolithic_rows(record: RunRecord) -> list[Cells]:
    """Eager, two paths and the monolithic graph side by side, under `MONOLITHIC_HEADERS`."""
    graphs = (record["graph"], record["graph"]["monolithic"])
    return [*_latency_rows(record), *_graph_rows(*graphs)]


def _latency_rows(record: RunRecord) -> list[Cells]:
    summary, comparison = record["summary"], record["comparison"]
    entries = [summary[mode] for mode in (EAGER, GRAPH, MONOLITHIC)]
    has_p99 = entries[0]["p99_supported"]
    tail, tail_label = ("p99_ms", "P99") if has_p99 else ("max_ms", f"Max (n<{P99_MIN_SAMPLES})")
    rows: list[Cells] = [
        (f"{label}, ms a request", *(ms_text(entry[name]) for entry in entries))
        for name, label in (("mean_ms", "Mean"), ("p50_ms", "P50"), (tail, tail_label))
    ]
    against = (comparison, comparison["monolithic_against_eager"])
    for metric, label in (("mean", "Mean"), ("p50", "P50")):
        rows.append((f"{label} improvement", NO_VALUE, *(_improvement(record, side[metric]) for side in against)))
    if has_p99:
        cells = [_improvement(record, side["p99"]) for side in against]
    else:
        cells = [signed_pct_text(_faster_pct(entries[0][tail], entry[tail])) for entry in entries[1:]]
    return [*rows, (f"{tail_label} improvement", NO_VALUE, *cells)]


def _improvement(record: RunRecord, difference: Mapping[str, Any]) -> str:
    verdict = "" if record.is_cpu_replay else f", {difference['verdict']}"
    return f"{signed_pct_text(difference['improvement_pct'])}{verdict}"


def _faster_pct(base: float, other: float) -> float | None:
    return 100 * (1 - other / base) if base else None


def _graph_rows(two_paths: Mapping[str, Any], monolithic: Mapping[str, Any]) -> list[Cells]:
    sides = (two_paths, monolithic)
    waste: dict[str, list[str]] = {}
    for place, parts in enumerate((two_paths["per_path"], monolithic["parts"])):
        for row in parts:
            waste.setdefault(row["path"], [NO_VALUE, NO_VALUE])[place] = share_text(row["waste"])
    named: list[tuple[str, Sequence[str]]] = [
        ("Hits", [f"{graph['hits']} of {graph['items']}" for graph in sides]),
        ("Replays", [str(graph["replays"]) for graph in sides]),
        ("Rows used", [f"{graph['tokens_replayed']:,}" for graph in sides]),
        ("Rows computed", [f"{graph['budget_tokens_replayed']:,}" for graph in sides]),
        ("Waste", [share_text(graph["waste"]) for graph in sides]),
        *((f"Waste, {path}", cells) for path, cells in waste.items()),
        ("Graphs", [str(len(graph["captured"])) for graph in sides]),
        ("Graph pool", [bytes_text(graph["pool_bytes"]) for graph in sides]),
        ("Buffers", [bytes_text(graph["buffer_bytes"]) for graph in sides]),
        ("Capture, s", [number_text(graph["capture_s"], 2) for graph in sides]),
    ]
    return [(label, NO_VALUE, *cells) for label, cells in named]


def monolithic_claims(record: RunRecord) -> list[str]:
    """What the monolithic graph is, and what two paths are worth against it, in sentences."""
    resolved = record["settings"]["resolved"]["monolithic"]
    what = (
        f"The monolithic graph computes a global view and {count_text(resolved['max_crops'], 'crop')} of every image, "
        f"{resolved['item_tokens']} rows; rows that the image does not have are waste."
    )
    summary, difference = record["summary"], record["comparison"]["two_paths_against_monolithic"]
    parts = []
    for metric, label in (("mean", "mean"), ("p50", "P50"), ("p99", "P99")):
        improvement, ci95 = difference[metric]["improvement_pct"], difference[metric]["ci95"]
        if metric == "p99" and not summary[GRAPH]["p99_supported"]:
            label, ci95 = f"max (n<{P99_MIN_SAMPLES})", None
            improvement = _faster_pct(summary[MONOLITHIC]["max_ms"], summary[GRAPH]["max_ms"])
        is_claimed = ci95 is not None and difference[metric]["verdict"] != "invalid"
        parts.append(f"{label} {signed_pct_text(improvement)}{f' ({interval_text(ci95)})' if is_claimed else ''}")
    verdict = "not a GPU" if record.is_cpu_replay else difference["mean"]["verdict"]
    correctness = (record["correctness"] or {}).get("monolithic_max_rel_l2")
    checked = (
        [f"Monolithic outputs against eager: largest relative L2 difference {correctness:.1e}."]
        if is_number(correctness)
        else []
    )
    return [what, f"Two paths against the monolithic graph: {', '.join(parts)}: {verdict}.", *checked]
