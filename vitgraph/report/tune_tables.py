"""Prints what tuning, calibrating and planning found, and writes tuning's tables as CSV; all from their JSON forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from vitgraph.records.stats import P99_MIN_SAMPLES
from vitgraph.report.console import print_paths
from vitgraph.report.files import csv_bytes, write_files
from vitgraph.report.terminal import line
from vitgraph.report.units import (
    NO_VALUE,
    bytes_text,
    count_text,
    is_number,
    ms_text,
    number_text,
    share_text,
    signed_pct_text,
)

SETTINGS_FILE, BUDGETS_FILE = "settings.csv", "budgets.csv"
SETTINGS_COLUMNS = (
    "name",
    "packing",
    "max_vision_items_per_batch",
    "max_frames_per_batch",
    "graphs",
    "memory_bytes",
    "capture_s",
    "mean_ms",
    "p50_ms",
    "p99_ms",
    "gain_over_eager_pct",
    "slower_than_eager_share",
    "token_budgets",
)
BUDGET_COLUMNS = (
    "path",
    "token_budget",
    "segment_slots",
    "axis_key",
    "replays",
    "items",
    "tokens",
    "waste",
    "break_even_tokens",
)
NAMES = {
    "tuned": "tuned",
    "automatic": "automatic list",
    "seed_nine": "vLLM's nine",
    "eager": "eager",
    "oracle": "oracle",
}
_BUDGETS_LISTED = 24
_STYLES = {"use_graphs": "green", "no_graphs": "red", "measure_first": "yellow", "depends": "yellow"}


def render_tune(data: Mapping[str, Any], console: Console) -> None:
    """Prints a tuning result: verdict, latencies beside the baselines, settings, runners-up, budgets, misses, lines.

    Args:
        data: `TuneResult.as_dict()`, or the same from a file.
        console: Where to print.
    """
    workload = data["workload"].get("name", "workload")
    console.print(
        line(f"tune-budgets: {data['model']}, {workload}, for {data['target']}, objective {data['objective']}")
    )
    console.print(line(f"profile: {data['profile']['label']}, {data['profile']['created_at']}", "dim"))
    console.print(line(data["verdict_text"], f"bold {_STYLES[data['verdict']]}"))
    console.print(line(data["unseen"]["text"]))
    _print_by_requests(data, console)
    console.print()
    _print_latencies("Predicted, ms a request", _predicted_rows(data), console)
    console.print(line(data["predicted"]["error_text"], "dim"))
    if data["measured"]:
        console.print()
        _print_measured(data["measured"], console)
    console.print()
    _print_settings(data, console)
    _print_runners_up(data["runners_up"], console)
    _print_budgets(data["by_budget"], console)
    _print_misses(data["misses"], console)
    for note in data["notes"]:
        console.print(line(f"note: {note}"))
    _print_paste(data, console)


def _print_by_requests(data: Mapping[str, Any], console: Console) -> None:
    """The advice for each number of requests a call, and the one list that does best over all of them."""
    if not data["by_requests_per_call"]:
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title="By requests a call", title_justify="left")
    for column in ("requests a call", "gain", "slower", "verdict", "budgets", "one list for vLLM", "slower"):
        table.add_column(column, justify="right")
    for row, common in zip(data["by_requests_per_call"], data["list_for_all"], strict=True):
        table.add_row(
            str(row["requests_per_call"]),
            signed_pct_text(row["improvement_pct"]),
            share_text(row["slower_share"]),
            row["verdict"].replace("_", " "),
            str(len(row["best"]["token_budgets"])),
            signed_pct_text(common["improvement_pct"]),
            share_text(common["slower_share"]),
        )
    console.print(table)


def _predicted_rows(data: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return [("tuned", data["predicted"]), *data["baselines"].items()]


def _print_latencies(title: str, rows: Sequence[tuple[str, Mapping[str, Any]]], console: Console) -> None:
    supported = all(row["n"] >= P99_MIN_SAMPLES for _, row in rows if "n" in row)
    console.print(_latency_table(title, rows, supported))
    if not supported:
        console.print(line(f"* below {P99_MIN_SAMPLES} requests nearly the maximum", "dim"))


def _latency_table(title: str, rows: Sequence[tuple[str, Mapping[str, Any]]], supported: bool) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    tail = "P99" if supported else "P99*"
    for column in ("mean", "P50", tail, "gain", "slower", "graphs", "GiB", "capt. s"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, row in rows:
        table.add_row(
            NAMES.get(name, name),
            ms_text(row["mean_ms"]),
            ms_text(row["p50_ms"]),
            ms_text(row["p99_ms"]),
            signed_pct_text(row.get("gain_over_eager_pct")),
            share_text(row.get("slower_than_eager_share")),
            str(row["graphs"]) if "graphs" in row else NO_VALUE,
            number_text(row["memory_bytes"] / 2**30, 2) if is_number(row.get("memory_bytes")) else NO_VALUE,
            number_text(row["capture_s"], 1) if is_number(row.get("capture_s")) else NO_VALUE,
        )
    return table


def _print_measured(measured: Mapping[str, Any], console: Console) -> None:
    rows = []
    for name, row in measured["strategies"].items():
        gain = None if row.get("mean_delta_pct") is None else -row["mean_delta_pct"]
        shown = {**row, "gain_over_eager_pct": gain, "slower_than_eager_share": row.get("slower_share")}
        rows.append((name, shown))
    _print_latencies(f"Measured on {count_text(measured['calls'], 'call')}, ms a request", rows, console)
    noise = measured["request_noise_pct"]
    threshold = "not known from so few repeats" if noise is None else f"{number_text(noise, 1)}%"
    console.print(
        line(
            "closed from the automatic list to the oracle: "
            f"mean {share_text(measured['closed']['mean'])}, median {share_text(measured['closed']['median'])}; "
            f"slower = beyond the noise of a request, {threshold}"
        )
    )
    tuned = measured["strategies"].get("tuned", {})
    error = tuned.get("prediction_error", {})
    if error.get("median_pct") is not None:
        console.print(
            line(
                f"predicted mean {ms_text(tuned['predicted_mean_ms'])} ms, measured {ms_text(tuned['mean_ms'])} ms; "
                f"median error of a call {error['median_pct']:.1f}%, P90 {error['p90_pct']:.1f}%"
            )
        )
    for problem in measured["problems"]:
        console.print(line(f"invalid: {problem}", "red"))


def _print_settings(data: Mapping[str, Any], console: Console) -> None:
    best, search = data["best"], data["search"]
    facts = Table.grid(padding=(0, 2))
    facts.add_row("budgets", f"{len(best['token_budgets'])}: {budgets_text(best['token_budgets'])}")
    facts.add_row("items / frames a replay", limits_text(best))
    facts.add_row("packing", best["packing"])
    facts.add_row("hits", f"{data['hits']} of {data['items']} items, waste {share_text(data['waste'])}")
    how = "all settings tried" if search["is_exhaustive"] else "exact list" if search["is_exact"] else "best found"
    facts.add_row("search", f"{how}, {count_text(search['evaluations'], 'evaluation')}")
    console.print(facts)


def _print_runners_up(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    if not rows:
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title="Runners-up", title_justify="left")
    for column in ("packing", "items / frames", "graphs", "budgets", "mean", "P99", "memory"):
        table.add_column(column, justify="left" if column == "packing" else "right")
    for row in rows:
        budgets = row["token_budgets"]
        table.add_row(
            row["packing"],
            limits_text(row),
            str(row["graphs"]),
            f"{len(budgets)}: {budgets[0]} to {budgets[-1]}",
            ms_text(row["mean_ms"]),
            ms_text(row["p99_ms"]),
            bytes_text(row["memory_bytes"]),
        )
    console.print()
    console.print(table)


def _print_budgets(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    if not rows:
        console.print(line("No replay: every item is left to eager."))
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title="Budgets in use", title_justify="left")
    has_times = "break_even_tokens" in rows[0]
    for column in ("budget", "slots", "replays", "items", "waste", *(("one image faster from",) if has_times else ())):
        table.add_column(column, justify="right")
    shown = sorted(rows, key=lambda row: -row["replays"])[:_BUDGETS_LISTED]
    for row in sorted(shown, key=lambda row: (row["path"], row["token_budget"], row["segment_slots"])):
        from_tokens = row.get("break_even_tokens")
        break_even = "never" if from_tokens is None else count_text(from_tokens, "token")
        table.add_row(
            str(row["token_budget"]) if row["path"] == "default" else f"{row['path']} {row['token_budget']}",
            str(row["segment_slots"]),
            str(row["replays"]),
            str(row["items"]),
            share_text(row["waste"]),
            *((break_even,) if has_times else ()),
        )
    console.print()
    console.print(table)
    if len(rows) > len(shown):
        console.print(line(f"and {len(rows) - len(shown)} more, used less", "dim"))


def _print_misses(misses: Sequence[Mapping[str, Any]], console: Console) -> None:
    for row in misses:
        sizes = f"{row['smallest_tokens']} to {row['largest_tokens']} tokens" if "smallest_tokens" in row else ""
        share = f" ({share_text(row['share'])})" if "share" in row else ""
        console.print(line(f"misses: {count_text(row['items'], 'item')}{share}, {sizes}: {row['text']}"))


def _print_paste(data: Mapping[str, Any], console: Console) -> None:
    beyond = data["what_vllm_cannot_express"]
    console.print()
    if beyond:
        console.print(
            line(
                f"vLLM's manager lacks: {'; '.join(beyond['points'])}. Its own best is predicted at "
                f"{ms_text(beyond['mean_ms'])} ms, {signed_pct_text(beyond['loss_pct'])} against the settings above."
            )
        )
    for row in data["other_traffic"]:
        console.print(line(row["text"]))
    if data["serve_line"] is None:
        console.print(line("Nothing to paste: no list for vLLM is sure to be faster than eager on these calls."))
        return
    if data["vllm"]["verdict"] == "no_graphs":
        console.print(line("For vLLM: no encoder graphs, its manager would not be faster than eager on this traffic."))
    console.print(line(f"--compilation-config '{data['compilation_config']}'"), soft_wrap=True)
    console.print(line(data["serve_line"]), soft_wrap=True)


# -- calibrate and plan ------------------------------------------------------------------------------------------------


def render_profile(summary: Mapping[str, Any], console: Console) -> None:
    """Prints `describe_profile`: the curve, empty slots, overheads, memory and the model's error."""
    console.print(line(f"calibration: {summary['label']}, {number_text(summary['elapsed_s'], 0)} s", "bold"))
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("budget", "slots", "tokens", "replay ms", "eager ms", "eager P10 to P90"):
        table.add_column(column, justify="right")
    for row in summary["curve"]:
        spread = NO_VALUE
        if row["eager_low_ms"] is not None:
            spread = f"{ms_text(row['eager_low_ms'])} to {ms_text(row['eager_high_ms'])}"
        table.add_row(
            str(row["token_budget"]),
            str(row["segment_slots"]),
            str(row["tokens"]),
            ms_text(row["replay_ms"]),
            ms_text(row["eager_ms"]),
            spread,
        )
    console.print(table)
    facts = Table.grid(padding=(0, 2))
    small, large = summary["empty_slots_budgets"]
    levels = [row for row in summary["empty_slots"] if row["slots"]]
    facts.add_row(
        "empty slots",
        "; ".join(
            f"{row['slots']:g}: +{ms_text(row['at_small_budget_ms'])} ms at {small:g} tokens, "
            f"+{ms_text(row['at_large_budget_ms'])} ms at {large:g}"
            for row in levels
        )
        or "not measured",
    )
    overheads = summary["overheads"]
    facts.add_row(
        "manager",
        f"{ms_text(overheads['call_ms'])} ms a call, {ms_text(overheads['replay_ms'])} a replay, "
        f"{ms_text(overheads['item_ms'])} an item, {ms_text(1e3 * overheads['token_ms'])} a thousand tokens, "
        f"{ms_text(overheads['miss_ms'])} an eager call",
    )
    for row in summary["memory"]:
        facts.add_row(
            f"budgets up to {row['max_budget']}",
            f"pool {bytes_text(row['pool_bytes'])}, buffers {bytes_text(row['buffer_bytes'])}, "
            f"{count_text(row['graphs'], 'graph')}",
        )
    facts.add_row("capture", f"{number_text(summary['capture_ms'], 0)} ms a graph")
    console.print(facts)
    console.print(line(summary["error_text"]))
    for note in summary["notes"]:
        console.print(line(f"note: {note}"))


def refused_text(data: Mapping[str, Any]) -> str:
    """Of a plan: how many of the workload's items were left out; empty where none was."""
    workload = data.get("workload") or {}
    refused = len(workload.get("skipped", ()))
    return f"{refused} refused of {workload['items_brought']} items, " if refused else ""


def render_explanation(data: Mapping[str, Any], console: Console) -> None:
    """Prints `explain_plan` (one call) or `explain_workload`."""
    if "batches" in data:
        _print_batches(data, console)
    counts = data["counts"]
    console.print(
        line(
            f"{data['policy']}: {counts['hits']} hits, {counts['misses']} misses, {refused_text(data)}"
            f"{counts['replays']} replays, "
            f"waste {share_text(counts['waste'])}"
        )
    )
    print_paths(counts, console)
    if "batches" not in data:
        _print_budgets(counts["per_budget"], console)
        _print_misses(data["misses"], console)
    _print_prediction(data["predicted"], console)


def _print_batches(data: Mapping[str, Any], console: Console) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("items", "tokens", "graph", "waste", "predicted ms", "why not"):
        table.add_column(column, justify="left" if column in ("items", "why not") else "right")
    for batch in data["batches"]:
        for number, run in enumerate(batch["runs"]):
            graph = "eager" if run["token_budget"] is None else f"{run['token_budget']} / {run['segment_slots']}"
            table.add_row(
                ", ".join(map(str, batch["items"])) if number == 0 else "",
                str(run["tokens"]),
                graph if run["path"] == "default" else f"{run['path']} {graph}",
                share_text(run["waste"]),
                ms_text(batch["replay_ms"]) if number == 0 else "",
                run["miss_text"] or "",
            )
    console.print(table)


def _print_prediction(predicted: Mapping[str, Any] | None, console: Console) -> None:
    if predicted is None:
        console.print(line("no predicted times: no calibration was given", "dim"))
        return
    if "graph_ms" in predicted:
        text = f"predicted {ms_text(predicted['graph_ms'])} ms, eager {ms_text(predicted['eager_ms'])} ms"
    else:
        graph, eager = predicted["graph"], predicted["eager"]
        text = (
            f"predicted mean {ms_text(graph['mean_ms'])} ms, P99 {ms_text(graph['p99_ms'])} ms; eager "
            f"{ms_text(eager['mean_ms'])} and {ms_text(eager['p99_ms'])} ms; "
            f"{share_text(predicted['slower_than_eager_share'])} of the requests slower than eager"
        )
    console.print(line(text))
    console.print(line(predicted["error_text"], "dim"))


# -- text and files ----------------------------------------------------------------------------------------------------


def budgets_text(budgets: Sequence[int]) -> str:
    """All budgets in a line."""
    return ", ".join(map(str, budgets))


def limits_text(row: Mapping[str, Any]) -> str:
    """Items and frames of some settings."""
    return f"{row['max_vision_items_per_batch']} / {row['max_frames_per_batch'] or 'image-only'}"


def write_tune_csv(data: Mapping[str, Any], folder: Path, *, overwrite: bool = False) -> list[Path]:
    """Writes `settings.csv` (tuned, baselines, runners-up, Pareto front) and `budgets.csv` (budgets in use).

    Returns:
        The files.

    Raises:
        UsageError: A file exists and `overwrite` is off.
        RecordFileError: A file could not be written.
    """
    return write_files({folder / name: content for name, content in tune_csv_files(data).items()}, overwrite)


def tune_csv_files(data: Mapping[str, Any]) -> dict[str, bytes]:
    """The tables by file name."""
    rows = [{"name": name, **row} for name, row in _predicted_rows(data)]
    rows += [{"name": "runner_up", **row} for row in data["runners_up"]]
    rows += [{"name": "pareto", **row} for row in data["pareto"]]
    tables = {SETTINGS_FILE: (SETTINGS_COLUMNS, rows), BUDGETS_FILE: (BUDGET_COLUMNS, data["by_budget"])}
    # Predicted bytes have a fraction; nine digits keep them exact to a few bytes.
    return {name: csv_bytes(columns, values, digits=9) for name, (columns, values) in tables.items()}
