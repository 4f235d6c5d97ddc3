"""What `python results/make_page.py` makes from this folder of records: its page, and what was verified."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vitgraph.records.candidates import derive_results
from vitgraph.records.record import (
    BenchRecord,
    CalibrateRecord,
    CompareRecord,
    MicroRecord,
    ProfileRecord,
    Record,
    TuneRecord,
    VerifyRecord,
)
from vitgraph.records.sample_table import Samples, read_samples
from vitgraph.records.series import Improvement, Latency
from vitgraph.records.stats import compare_bench
from vitgraph.records.store import RUN_FILE, beside, iter_records, read_record, write_atomically
from vitgraph.specs.parts import SAME_MARGIN_PCT

PAGE = "README.md"
ROOT = Path(__file__).parent
VERIFIED = ROOT.parent / "vitgraph" / "models" / "verified.json"
"""What `vitgraph models` says of each row, for people who have no folder of records."""
INTRODUCTION = """# Results

Made from the records by `python results/make_page.py`; what they mean, under which conditions they were
measured and what was tried besides: [what was tried](../docs/what-was-tried.md). `vitgraph export FOLDER` shows a
record again, with its tables and plots. Means are milliseconds a request; positive gains are faster, with the ends of
their 95 % interval. Intervals and verdicts of benches and comparisons are those of today's rule, from the kept samples.
"""
Row = tuple[str, ...]


def page(root: Path) -> str:
    """The page of all records below a folder, a table a kind."""
    files = [*iter_records(root), *sorted(root.rglob("calibration.json"))]
    records = [(_place(file, root), read_record(file)) for file in files]
    parts = [INTRODUCTION]
    for kind, (title, headers, row) in _TABLES.items():
        rows = [(f"[{place}]({place})", *row(record)) for place, record in records if isinstance(record, kind)]
        if rows:
            parts.append(f"## {title}\n\n{_table(('Folder', *headers), rows)}")
    return "\n".join(parts)


def _place(file: Path, root: Path) -> str:
    return str((file.parent if file.name == RUN_FILE else file).relative_to(root))


def _table(headers: Sequence[str], rows: Sequence[Row]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _conditions(record: Record) -> Row:
    run, workload = record.resolved, record.workload
    if run is None:
        return "", "", ""
    how = ["compiled" if run.compile else "", run.packing or "", f"{run.ranks} GPUs" if run.ranks > 1 else ""]
    requests = "" if workload is None else f"{workload.name}, {workload.requests}"
    return run.model, requests, ", ".join(filter(None, how))


def _ms(latency: Latency | None) -> str:
    return "-" if latency is None or latency.mean_ms is None else f"{latency.mean_ms:.2f}"


def _gain(found: Improvement | None) -> str:
    if found is None or found.improvement_pct is None:
        return "-"
    ends = "" if found.ci95 is None else f" ({found.ci95[0]:+.1f} … {found.ci95[1]:+.1f})"
    return f"{found.improvement_pct:+.1f} %{ends}"


def _bench(record: Any) -> Row:
    result = record.result
    pair = result.comparison.pair("eager", "graph")
    means = {name: _ms(result.latency.get(name)) for name in ("eager", "graph", "monolithic")}
    gain = "-" if pair is None else _gain(pair.mean)
    return *_conditions(record), *means.values(), gain, result.comparison.verdict


def _compare(record: Any) -> Row:
    found = [f"{row.name} {_ms(row.eager.latency)} → {_ms(row.graph.latency)}" for row in record.result.candidates]
    advice = record.result.recommendation
    best = "" if advice.name is None else f"{advice.name}, {advice.mode}: {advice.sure}"
    return *_conditions(record)[:2], "; ".join(found), best


def _micro(record: Any) -> Row:
    rows = record.result.rows
    backends = ", ".join(dict.fromkeys(row.implementation or row.backend for row in rows))
    return record.resolved.model, f"{record.result.heads} x {record.result.head_width}", backends, str(len(rows))


def _tune(record: Any) -> Row:
    measured = record.result.measured
    of = {} if measured is None else measured.strategies
    names = ("eager", "automatic", "seed_nine", "tuned", "oracle")
    means = [_ms(of[name].latency) if name in of else "-" for name in names]
    return record.resolved.model, "-" if measured is None else str(measured.calls), *means, record.result.verdict


def _profile(record: Any) -> Row:
    result = record.result
    if result is None:
        return _conditions(record)[0], "", "", "", "", ""
    sizes = dict.fromkeys(f"{width}x{height}" for width, height, _ in result.call.items)
    call = f"{len(result.call.items)} x {', '.join(sizes)}"
    eager, graph = (result.modes[name] for name in ("eager", "graph"))
    limit = "-" if result.speed_of_light is None else f"{result.speed_of_light.total_ms:.2f}"
    times = [f"{value:.2f}" for value in (eager.wall_ms, graph.wall_ms, graph.busy_ms)]
    return _conditions(record)[0], call, *times, limit


def _verify(record: Any) -> Row:
    models = record.result.models
    distances = [model.max_rel_l2 for model in models if model.max_rel_l2 is not None]
    passed = sum(model.status == "ok" for model in models)
    largest = f"{100 * max(distances):.1f} %" if distances else "-"
    return f"{passed} of {len(models)}", ", ".join(str(model.preset) for model in models), largest


def _calibration(record: Any) -> Row:
    result = record.result
    return result.name, str(len(result.replays)), str(len(result.eager)), str(len(result.holdout))


_TABLES: dict[type[Record], tuple[str, Row, Callable[[Any], Row]]] = {
    BenchRecord: (
        "Graphs against eager",
        ("Model", "Workload, requests", "How", "Eager", "Graph", "Monolithic", "Gain", "Verdict"),
        _bench,
    ),
    CompareRecord: (
        "Backends, and blocks compiled or not",
        ("Model", "Workload, requests", "Eager → graph", "Best"),
        _compare,
    ),
    MicroRecord: ("Attention alone", ("Model", "Heads x width", "Backends", "Cases"), _micro),
    TuneRecord: (
        "Tuned settings",
        ("Model", "Calls", "Eager", "Automatic", "Nine budgets", "Tuned", "Oracle", "Predicted"),
        _tune,
    ),
    ProfileRecord: (
        "Where a call's time goes, ms",
        ("Model", "Call", "Eager", "Replay", "GPU busy", "Limit"),
        _profile,
    ),
    VerifyRecord: ("Verified", ("Passed", "Models", "Largest distance from eager"), _verify),
    CalibrateRecord: ("Calibrations", ("Model", "Replays", "Eager calls", "Calls held out"), _calibration),
}


def judged_again(record: Record, samples: Samples) -> Any:
    """The result of a bench or a comparison with what the rule of today says of its samples."""
    settings: dict[str, Any] = dict(record.settings)
    # Runs that were not asked for a margin had this one.
    seed, margin_pct = settings["model"]["seed"], settings.get("run", {}).get("same_margin_pct", SAME_MARGIN_PCT)
    if isinstance(record, CompareRecord):
        ranks = record.resolved.ranks if record.resolved is not None else 1
        return derive_results(record.result, samples, seed, ranks, margin_pct)
    assert isinstance(record, BenchRecord)
    before = record.result.comparison
    return record.result.but(comparison=compare_bench(samples, seed, before.invalid_reasons, margin_pct))


def renew(file: Path) -> None:
    """Writes a record's result again where the rule of today says something else."""
    record = read_record(file)
    if not isinstance(record, BenchRecord | CompareRecord) or record.samples_file is None:
        return
    found = judged_again(record, read_samples(beside(file, record.samples_file)))
    if found != record.result:
        content = {**json.loads(file.read_bytes()), "result": found.model_dump(mode="json")}
        write_atomically(file, f"{json.dumps(content, indent=1)}\n".encode())


def verified(root: Path) -> dict[str, list[dict[str, Any]]]:
    """The newest verification of each row on a GPU, whose checks all passed, by backend and whether it was compiled."""
    found: dict[tuple[str, str, bool], dict[str, Any]] = {}
    records = [(_place(file, root), read_record(file)) for file in iter_records(root)]
    passed = [(place, record) for place, record in records if isinstance(record, VerifyRecord)]
    for place, record in sorted(passed, key=lambda one: one[1].created_at):
        for model in record.result.models:
            if record.environment is None or model.status != "ok" or model.ranks > 1 or model.row is None:
                continue
            compiled = bool(model.compiled_blocks)
            found[model.row, str(model.backend_requested), compiled] = {
                "device": str(record.environment.device).removeprefix("NVIDIA "),
                "preset": model.preset,
                "dtype": model.dtype,
                "backend": model.backend_requested,
                "compiled": compiled,
                "max_rel_l2": model.max_rel_l2,
                "calls": model.calls,
                "date": str(record.created_at)[:10],
                "record": place,
            }
    rows: dict[str, list[dict[str, Any]]] = {}
    for (row, _, _), run in sorted(found.items()):
        rows.setdefault(row, []).append(run)
    return rows


def main() -> None:
    """Judges the records of a folder by the rule of today, and writes its page and what was verified in it."""
    for file in iter_records(ROOT):
        renew(file)
    (ROOT / PAGE).write_text(page(ROOT), encoding="utf-8")
    VERIFIED.write_text(json.dumps({"rows": verified(ROOT)}, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"wrote {ROOT / PAGE} and {VERIFIED}\n")


if __name__ == "__main__":
    main()
