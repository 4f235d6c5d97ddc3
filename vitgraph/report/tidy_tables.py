"""The tidy tables of an export: their documented columns, and their rows from saved runs, as CSV and Parquet.

One fact a row, one header row, fixed columns. What was not measured is an empty cell in CSV and null in Parquet.
"""

from __future__ import annotations

import io
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vitgraph.records.bench_record import RunRecord
from vitgraph.records.samples import SAMPLE_COLUMNS
from vitgraph.records.saved_runs import SavedRun
from vitgraph.report.claims import LAUNCH_GAP_MEANING, dtype_of
from vitgraph.report.csv_tables import monolithic_rows, per_budget_rows, per_path_rows, summary_rows
from vitgraph.report.files import csv_bytes
from vitgraph.report.paths_view import all_graphs

Row = Mapping[str, Any]
Kind = Literal["text", "integer", "number", "truth"]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a tidy table.

    Attributes:
        name: Its header.
        kind: `text`, `integer`, `number` or `truth`.
        unit: Unit of its values; empty where they have none.
        meaning: What it holds.
    """

    name: str
    kind: Kind
    unit: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Table:
    """A tidy table.

    Attributes:
        name: Name of its files.
        one_row: What a row stands for.
        columns: Its columns, in order.
        rows: Makes its rows from a saved run, without the column `run`.
        digits: Significant digits of its numbers in CSV; Parquet holds them whole.
        is_optional: It is of no use to most runs, and is left out where none of them has a row of it.
    """

    name: str
    one_row: str
    columns: tuple[Column, ...]
    rows: Callable[[SavedRun], Iterable[Row]]
    digits: int = 6
    is_optional: bool = False

    def of_runs(self, runs: Sequence[SavedRun]) -> list[Row]:
        """The rows of all runs, each with its run's name."""
        return [{"run": run.name, **row} for run in runs for row in self.rows(run)]


def table_csv(columns: Sequence[Column], rows: Iterable[Row], digits: int = 6) -> bytes:
    """A table as CSV in UTF-8; numbers with `digits` significant digits."""
    return csv_bytes([column.name for column in columns], rows, digits)


def parquet_bytes(columns: Sequence[Column], rows: Iterable[Row]) -> bytes:
    """A table as Parquet; each field carries its unit and meaning as metadata."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = {"text": pa.string(), "integer": pa.int64(), "number": pa.float64(), "truth": pa.bool_()}
    schema = pa.schema(
        pa.field(column.name, types[column.kind], metadata={"unit": column.unit, "meaning": column.meaning})
        for column in columns
    )
    rows = list(rows)
    arrays = [pa.array([row.get(column.name) for row in rows], type=types[column.kind]) for column in columns]
    content = io.BytesIO()
    pq.write_table(pa.Table.from_arrays(arrays, schema=schema), content)
    return content.getvalue()


def describe_columns(tables: Sequence[Table]) -> list[Row]:
    """One row a column of every table, for `columns.csv`."""
    return [
        {
            "table": table.name,
            "column": column.name,
            "kind": column.kind,
            "unit": column.unit,
            "meaning": column.meaning,
        }
        for table in tables
        for column in table.columns
    ]


def budgets_text(budgets: Mapping[str, Sequence[int]]) -> str:
    """Token budgets of the paths on one line; a single path goes without its name."""
    if list(budgets) == ["default"]:
        return " ".join(map(str, budgets["default"]))
    return "; ".join(f"{path}: {' '.join(map(str, values))}" for path, values in budgets.items())


def _run_rows(run: SavedRun) -> Iterable[Row]:
    record = run.record
    settings, environment, workload = record["settings"], record["environment"], record["workload"]
    comparison, correctness = record["comparison"] or {}, record["correctness"] or {}
    yield {
        **{name: record[name] for name in ("status", "status_reason", "created_at", "vitgraph_version")},
        "model": record.model_name,
        "load_format": settings["model"].get("load_format"),
        "dtype": dtype_of(record),
        "device": record.device_name,
        "backend_requested": record.backend_requested,
        "backend_used": record.backend_used,
        "torch": environment.get("libraries", {}).get("torch"),
        "workload": workload.get("name"),
        **{name: workload.get(name) for name in ("fingerprint", "requests", "items", "images", "videos")},
        "rounds": comparison.get("rounds"),
        "requests_per_call": settings["bench"]["requests_per_call"],
        **_graph_facts(record),
        "correctness": correctness.get("status"),
        "max_rel_l2": correctness.get("max_rel_l2"),
        "verdict": comparison.get("verdict"),
        "verdict_reason": comparison.get("verdict_reason"),
        "command": shlex.join(record["command"]),
    }


def _graph_facts(record: RunRecord) -> Row:
    graph, resolved = record["graph"] or {}, record["settings"]["resolved"]
    limits = ("max_vision_items_per_batch", "max_frames_per_batch")
    counted = (
        "hits",
        "misses",
        "hit_rate",
        "replays",
        "waste",
        "launch_gap",
        "capture_s",
        "pool_bytes",
        "buffer_bytes",
    )
    return {
        "graph_mode": graph.get("mode"),
        "packing": graph.get("policy"),
        "token_budgets": budgets_text(resolved["token_budgets"]),
        **{name: resolved[name] for name in limits},
        "graphs_captured": len(graph.get("captured", [])),
        "graphs_dropped": len(graph.get("dropped", [])),
        **{name: graph.get(name) for name in counted},
    }


def _miss_rows(run: SavedRun) -> Iterable[Row]:
    for reason, items in (run.record["graph"] or {}).get("misses_by_reason", {}).items():
        yield {"reason": reason, "items": items}


def _dropped_rows(run: SavedRun) -> Iterable[Row]:
    for entry in all_graphs(run.record["graph"] or {}, "dropped"):
        yield {**entry, "axis_key": "x".join(map(str, entry["axis_key"]))}


def _sample_rows(run: SavedRun) -> Iterable[Row]:
    for sample in run.samples:
        yield {name: getattr(sample, name) for name in SAMPLE_COLUMNS}


def _columns(*columns: tuple[str, Kind, str, str]) -> tuple[Column, ...]:
    return (_RUN, *(Column(*column) for column in columns))


_RUN = Column("run", "text", "", "name of the run: the end of its folder's path")
_GRAPH_KEY: tuple[tuple[str, Kind, str, str], ...] = (
    ("path", "text", "", "encoder path; `default` where a model has one, `monolithic` for a graph of both"),
    ("token_budget", "integer", "tokens", "output tokens that the graph can hold"),
    ("segment_slots", "integer", "segments", "attention segments that the graph can hold"),
    ("axis_key", "text", "", "key on the model's further capture axes, as `28x36`; empty without any"),
)

TABLES = (
    Table(
        "runs",
        "a run",
        _columns(
            ("status", "text", "", "`complete`, `interrupted` or `error`"),
            ("status_reason", "text", "", "why the run is incomplete"),
            ("created_at", "text", "", "start of the run, ISO 8601 in UTC"),
            ("vitgraph_version", "text", "", "version that measured"),
            ("model", "text", "", "model as given: preset, hub id or folder"),
            ("load_format", "text", "", "`auto` for checkpoint weights, `dummy` for random ones"),
            ("dtype", "text", "", "dtype of weights and activations"),
            ("device", "text", "", "device that was measured"),
            ("backend_requested", "text", "", "attention backend asked for; empty where it was left open"),
            ("backend_used", "text", "", "attention backend that ran"),
            ("torch", "text", "", "version of torch"),
            ("workload", "text", "", "name of the workload"),
            ("fingerprint", "text", "", "hash of the ordered item sizes; equal for equal requests"),
            ("requests", "integer", "requests", "requests of the workload"),
            ("items", "integer", "items", "images and videos in them"),
            ("images", "integer", "items", "images among the items"),
            ("videos", "integer", "items", "videos among the items"),
            ("rounds", "integer", "rounds", "times that the requests were measured in every mode"),
            ("requests_per_call", "integer", "requests", "requests that are encoded together"),
            ("graph_mode", "text", "", "`cuda`, or `cpu-replay` where no launch is saved"),
            ("packing", "text", "", "packing policy"),
            ("token_budgets", "text", "tokens", "budgets of the paths, ascending"),
            ("max_vision_items_per_batch", "integer", "items", "items that a replay may hold"),
            ("max_frames_per_batch", "integer", "frames", "video frames that a replay may hold; 0 for images only"),
            ("graphs_captured", "integer", "graphs", "graphs that were captured"),
            ("graphs_dropped", "integer", "graphs", "graphs that could not be captured"),
            ("hits", "integer", "items", "items all of whose non-empty paths were replayed"),
            ("misses", "integer", "items", "items with any eager path"),
            ("hit_rate", "number", "share", "hits over items"),
            ("replays", "integer", "replays", "graph replays of one round"),
            ("waste", "number", "share", "padding among the replayed rows"),
            ("launch_gap", "number", "ratio", LAUNCH_GAP_MEANING),
            ("capture_s", "number", "s", "time of all captures, warm-up included"),
            ("pool_bytes", "integer", "bytes", "memory of the pool that all graphs share"),
            ("buffer_bytes", "integer", "bytes", "memory of the static buffers that all graphs share"),
            ("correctness", "text", "", "`ok` or `incorrect`: graph against eager before anything was timed"),
            ("max_rel_l2", "number", "ratio", "largest relative L2 distance of graph from eager"),
            ("verdict", "text", "", "on the mean: `faster`, `slower`, `same`, `undecided` or `invalid`"),
            ("verdict_reason", "text", "", "why that verdict"),
            ("command", "text", "", "the command as it was given"),
        ),
        _run_rows,
    ),
    Table(
        "summary",
        "a run, mode and metric",
        _columns(
            ("mode", "text", "", "`eager`, `graph`, `monolithic`, or `hf` for the stock transformers forward"),
            ("metric", "text", "", "`mean`, `p50`, `p90`, `p99`, `max`, `std`, `gpu_mean` or `outliers`"),
            ("value", "number", "see `unit`", "the figure"),
            ("unit", "text", "", "`ms` a request, or `requests`"),
            (
                "n",
                "integer",
                "requests",
                "requests that the figure describes; below 300 a P99 is a maximum in disguise",
            ),
            ("delta_pct", "number", "%", "mode minus eager in percent of eager, negative = faster; graph modes only"),
            ("ci95_low_pct", "number", "%", "lower end of the 95 % interval of `delta_pct`"),
            ("ci95_high_pct", "number", "%", "upper end of the 95 % interval of `delta_pct`"),
            ("noise_floor_pct", "number", "%", "what eager differs from itself in the metric"),
            ("verdict", "text", "", "`faster`, `slower`, `same`, `undecided` or `invalid`"),
        ),
        lambda run: summary_rows(run.record),
    ),
    Table(
        "per_budget",
        "a run and graph that was captured or replayed",
        _columns(
            *_GRAPH_KEY,
            ("replays", "integer", "replays", "replays of one round"),
            ("items", "integer", "items", "items in those replays"),
            ("tokens", "integer", "tokens", "output tokens of those items"),
            ("fill", "number", "share", "rows of the replays that were used"),
            ("waste", "number", "share", "rows of the replays that were padding"),
            ("replay_ms", "number", "ms", "wall time of one replay alone, median"),
            ("gpu_busy_ms", "number", "ms", "time in which the GPU worked during a replay"),
            ("launch_gap", "number", "ratio", LAUNCH_GAP_MEANING),
            ("capture_ms", "number", "ms", "time of warm-up and capture"),
            ("pool_bytes", "integer", "bytes", "what the graph added to the shared pool"),
            ("buffer_bytes", "integer", "bytes", "static buffers that the graph uses, shared with the others"),
        ),
        lambda run: per_budget_rows(run.record["graph"] or {}),
    ),
    Table(
        "per_path",
        "a run, graph mode and encoder path, with one of path `all`",
        _columns(
            ("mode", "text", "", "`graph`, or `monolithic`, whose graphs hold every path"),
            ("path", "text", "", "encoder path; `all` for the sum"),
            ("items", "integer", "items", "items that have rows on the path"),
            ("hits", "integer", "items", "items whose rows on the path were replayed"),
            ("runs", "integer", "runs", "executions of the path, replayed or eager"),
            ("replays", "integer", "replays", "replays of one round"),
            ("tokens", "integer", "rows", "real output rows of the replays"),
            ("budget_tokens", "integer", "rows", "rows that the replays computed"),
            ("waste", "number", "share", "rows of the replays that were padding"),
            ("replay_ms", "number", "ms", "time of a mean request in replays of the path"),
        ),
        lambda run: per_path_rows(run.record["graph"] or {}),
    ),
    Table(
        "monolithic",
        "a run and metric of two paths against monolithic graphs",
        _columns(
            ("metric", "text", "", "`mean`, `p50` or `p99`"),
            ("n", "integer", "requests", "requests that it describes; below 300 a P99 is a maximum in disguise"),
            ("two_paths_ms", "number", "ms", "the metric with a graph for each path, a request"),
            ("monolithic_ms", "number", "ms", "the metric with one graph of both paths, a request"),
            (
                "delta_pct",
                "number",
                "%",
                "two paths minus monolithic in percent of monolithic, negative = two paths faster",
            ),
            ("ci95_low_pct", "number", "%", "lower end of the 95 % interval of `delta_pct`"),
            ("ci95_high_pct", "number", "%", "upper end of the 95 % interval of `delta_pct`"),
            ("noise_floor_pct", "number", "%", "what eager differs from itself in the metric"),
            ("verdict", "text", "", "`faster`, `slower`, `same`, `undecided` or `invalid`, of two paths"),
        ),
        lambda run: monolithic_rows(run.record),
        is_optional=True,
    ),
    Table(
        "misses",
        "a run and reason",
        _columns(
            ("reason", "text", "", "why items ran eagerly"),
            ("items", "integer", "items", "items missed for it; all reasons add up to the misses of the run"),
        ),
        _miss_rows,
    ),
    Table(
        "dropped",
        "a run and graph that could not be captured",
        _columns(*_GRAPH_KEY, ("reason", "text", "", "why it could not be captured")),
        _dropped_rows,
    ),
    Table(
        "samples",
        "a run, round, request and mode",
        _columns(
            ("round", "integer", "", "round of the run, from 0"),
            ("request", "integer", "", "index of the request, or of the call where requests are encoded together"),
            ("mode", "text", "", "`eager`, `graph`, `eager_repeat` (eager against itself), `hf` or `monolithic`"),
            ("position", "integer", "", "place in the interleaving of the modes, from 0"),
            ("wall_ms", "number", "ms", "wall time between two synchronisations, a request"),
            ("gpu_ms", "number", "ms", "time between device events, a request"),
            ("items", "integer", "items", "items of the request"),
            ("tokens", "integer", "tokens", "output tokens of the request"),
            ("input_rows", "integer", "rows", "rows of its pixel tensors"),
            ("hits", "integer", "items", "items that replayed on every path; 0 in modes without graphs"),
            ("misses", "integer", "items", "items with an eager path; 0 in modes without graphs"),
            ("replays", "integer", "replays", "graph replays of the call; 0 in modes without graphs"),
        ),
        _sample_rows,
        # A nanosecond in a time of seconds.
        digits=10,
    ),
)
"""The tables of an export, in the order of their description."""

COLUMNS_TABLE = (
    Column("table", "text", "", "table"),
    Column("column", "text", "", "column of that table"),
    Column("kind", "text", "", "`text`, `integer`, `number` or `truth`"),
    Column("unit", "text", "", "unit of its values"),
    Column("meaning", "text", "", "what it holds"),
)
