"""A typed record and a document of every kind, made up or stored, for the tests of reports."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import made_up_comparison
from made_up_profile import made_up_profile
from saved_run_folders import EXAMPLE, scale, set_field, write_run

from vitgraph.records.record import BenchRecord, CompareRecord, MicroRecord, ProfileRecord, Record, VerifyRecord
from vitgraph.records.results import MicroRow, crossings
from vitgraph.records.two_runs import SavedRun, compare_sides, open_runs
from vitgraph.report.document import Document
from vitgraph.report.documents import document_of
from vitgraph.report.views.bench import bench_document
from vitgraph.report.views.machine import doctor_document, models_document
from vitgraph.report.views.plan import explanation_document, workload_document
from vitgraph.report.views.runs import runs_document, two_runs_document

FAULT = "relative L2 0.5 from eager, above 1e-05: item 0 [odd], budget 64"


@cache
def saved_run(folder: Path = EXAMPLE) -> SavedRun:
    """The stored example run, or another, opened."""
    return open_runs([folder])[0]


def changed(record: Record, changes: Mapping[str, Any]) -> Any:
    """A record with other values, by their dotted paths."""
    data = json.loads(record.model_dump_json())
    for path, value in changes.items():
        *parents, name = path.split(".")
        place = data
        for parent in parents:
            place = place[int(parent) if parent.isdigit() else parent]
        place[int(name) if name.isdigit() else name] = value
    return type(record).model_validate(data)


def bench_record(**changes: Any) -> BenchRecord:
    """The stored example with other values; `__` stands for a dot."""
    return changed(saved_run().record, {path.replace("__", "."): value for path, value in changes.items()})


def bench_report(**changes: Any) -> Document:
    return bench_document(bench_record(**changes), saved_run().samples)


ON_A_CPU = {
    "result__graph__mode": "cpu-replay",
    "environment__device": "CPU",
    "result__comparison__verdict": "invalid",
    "result__comparison__verdict_reason": "replay on a CPU saves no launches; no speed-up is claimed here",
}
NOTHING_MEASURED = {
    "status": "error",
    "status_reason": "out of memory: 80 GiB needed",
    "result": {"graph": {"policy": "greedy"}},
    "environment__encoder": None,
}


def micro_record() -> MicroRecord:
    def row(backend: str, **other: Any) -> dict[str, Any]:
        found = {"backend": backend, "implementation": f"{backend.lower()} 1", "status": "ok", "sweep": "length"}
        found |= {"segment_length": 400, "segments": 8, "slots": 8, "rows": 3200, "timed_as": "graph"}
        found |= {"milliseconds": 0.0661, "first_call_ms": 3.0, "relative_error": 2e-3}
        return found | {"limit_ms": 0.0075, "limit_share": 0.1135} | other

    gone = {"backend": "GONE", "status": "unsupported", "reason": "needs an AMD GPU"}
    slots = {"sweep": "slots", "segments": 1, "slots": 64}
    rows = [row("FAST"), row("FAST", **slots, milliseconds=0.02), row("SLOW", timed_as="eager", milliseconds=0.09)]
    rows += [row("SLOW", **slots, status="incorrect", reason="relative error nan"), gone]
    rows += [row("FAST", segment_length=64, milliseconds=0.02), row("SLOW", segment_length=64, milliseconds=0.01)]
    result = {"heads": 16, "head_width": 72, "dtype": "bfloat16", "rows": rows}
    result["crossings"] = [one.model_dump() for one in crossings(list(map(MicroRow.model_validate, rows)))]
    environment = {"device": "NVIDIA H200", "device_type": "cuda", "python": "3.11", "platform": "Linux", "cpu": "x"}
    environment |= {"libraries": {}, "matrix_rate_tflops": 788.2}
    resolved = {"model": "some-model"}
    complete = {"status": "complete", "status_reason": None, "created_at": "2026-01-01T00:00:00+00:00"}
    return MicroRecord.model_validate(
        {**complete, "command": ["vitgraph"], "resolved": resolved, "environment": environment, "result": result}
    )


def verify_record(*models: dict[str, Any]) -> VerifyRecord:
    return VerifyRecord.model_validate({"status": "complete", "status_reason": None, "result": {"models": models}})


def verified(name: str, **changes: Any) -> dict[str, Any]:
    checks = [
        {"name": "predicted_tokens", "status": "ok", "detail": "9 sizes"},
        {"name": "every_graph", "status": "ok", "max_rel_l2": 2e-7, "compared": 12, "detail": "6 graphs"},
    ]
    found = {"architecture": "SomeArchitecture", "row": "some_row", "preset": name, "device": "cpu"}
    found |= {"dtype": "float32", "backend_requested": "auto", "backend_used": "TORCH_SDPA", "status": "ok"}
    found |= {"max_rel_l2": 2e-7, "tolerance": 1e-5, "checks": checks, "graphs_captured": 6, "calls": 200}
    return found | {"items": 431, "seconds": 3.25} | changes


def broken_checks() -> list[dict[str, Any]]:
    first, second = verified("x")["checks"]
    return [first, second | {"status": "failed", "failures": 3, "detail": FAULT}]


def verify_report() -> Document:
    broken = verified("model-b", status="failed", max_rel_l2=0.5, checks=broken_checks(), graphs_dropped=2)
    ended = {"status": "error", "tolerance": None, "max_rel_l2": None, "checks": [], "seconds": None}
    error = verified("model-c", **ended, error="OutOfMemoryError: CUDA out of memory")
    return document_of(verify_record(verified("model-a"), broken, error))


def profile_record(**changes: Any) -> ProfileRecord:
    """A made-up profile with other values; `__` stands for a dot."""
    found = made_up_profile()
    result = {name: found[name] for name in ("call", "traced", "speed_of_light", "modes", "trace_files")}
    record = ProfileRecord.model_validate(
        {
            "status": "complete",
            "status_reason": None,
            "created_at": "2026-01-01T00:00:00+00:00",
            "command": ["vitgraph"],
            "resolved": {"model": "org/some-tower"},
            "result": result,
            "environment": {"device": "NVIDIA H200", "device_type": "cuda"},
        }
    )
    return changed(record, {path.replace("__", "."): value for path, value in changes.items()})


def comparison_record(**options: Any) -> CompareRecord:
    """A made-up backend comparison."""
    record = made_up_comparison.make_record(**options)
    return changed(record, {"resolved.packing": "greedy", "resolved.rounds": 1})


def compare_report(**options: Any) -> Document:
    return document_of(comparison_record(**options))


def workload_report() -> Document:
    from vitgraph.models.registry import resolve_model
    from vitgraph.workloads.base import MediaItem, SkippedItem, Workload, number_requests
    from vitgraph.workloads.inspect import inspect_workload

    sizes = [(336, 336), (336, 336), (640, 480), (1280, 720), (1920, 1080), (300, 900), (64, 64), (5000, 3000)]
    groups: list[tuple[MediaItem, ...]] = [(MediaItem(*size),) for size in sizes]
    groups[0] = (*groups[0], MediaItem(640, 360, 120, fps=30.0))
    skipped = (SkippedItem("photos#9", "PIL cannot decode the image [truncated]"),)
    workload = Workload("few [sizes]", number_requests(groups), skipped=skipped, provenance={"statement": "Made up."})
    names = ("qwen3-vl-30b-a3b", "gemma-3-4b")
    found = inspect_workload(
        workload, {name: (resolve_model(name).row.name, resolve_model(name).rule()) for name in names}
    )
    return workload_document(found.facts, found.sizes, found.tokens)


def plan_report() -> Document:
    from synthetic import image, plan_of, synthetic_profile, video

    from vitgraph.predict.cost_model import CostModel
    from vitgraph.predict.targets import TARGETS, VITGRAPH, TargetCost
    from vitgraph.tuning.explain import explain_plan

    cost = TargetCost(CostModel(synthetic_profile()), TARGETS[VITGRAPH])
    return explanation_document(explain_plan([image(100), video(4, 20)], plan_of([128], 2), "greedy", cost))


def two_runs_report(folder: Path, **factors: float) -> Document:
    second = write_run(folder, set_field("resolved", "packing", value="greedy-defer"), scale(**factors))
    return two_runs_document(compare_sides(*([run] for run in open_runs([EXAMPLE, second]))))


def runs_report(folder: Path) -> Document:
    def cpu(record: dict[str, Any]) -> None:
        record["result"]["graph"]["mode"] = "cpu-replay"
        record["environment"] |= {"device": "CPU"}

    return runs_document([saved_run(), open_runs([write_run(folder / "cpu", cpu, requests=20)])[0]])


def models_report() -> Document:
    run = {"device": "H200", "backend": "FLASH_ATTN", "compiled": False, "max_rel_l2": 0.013}
    entry = {
        "row": "some_row",
        "tower": "some tower",
        "models": "Some-VL",
        "image": True,
        "video": False,
        "encoder": "module:SomeEncoder",
    }
    entry |= {"paths": {"global": 16, "local": 1}, "axes": {}, "presets": ["some-2b", "some-7b"], "verified": [run]}
    return models_document([entry])


def doctor_report() -> Document:
    gpu = {"index": 0, "name": "NVIDIA H200", "compute_capability": "9.0", "free_bytes": 100 << 30}
    gpu |= {"total_bytes": 140 << 30, "throttled_by": []}
    gpu |= dict.fromkeys(("sm_clock_mhz", "max_sm_clock_mhz"), 1980.0)
    gpu |= {"power_draw_w": None, "power_limit_w": 700.0, "temperature_c": 34.0, "other_processes": 2}
    backend = {"name": "FLASHINFER", "unavailable_reason": "no cudnn [here]", "is_capture_safe": True}
    return doctor_document(
        {
            "vitgraph": "0.1.0",
            "python": "3.11.9",
            "platform": "Linux",
            "cpu_count": 8,
            "driver": "570.1",
            "torch": "2.11",
            "torch_problem": None,
            "cuda": "13.0",
            "hip": None,
            "backends_problem": None,
            "memory": {"available_bytes": 10 << 30, "total_bytes": 16 << 30},
            "hub": {"endpoint": "https://huggingface.co", "reachable": False, "reason": "HF_HUB_OFFLINE is set"},
            "gpus": [gpu],
            "libraries": [{"name": "torch", "installed": "2.11", "wanted": ">=2.11", "fits": True}],
            "backends": [backend | {"head_widths": "any", "generations": None}],
            "can_run": ["graph and eager mode on NVIDIA H200"],
            "advice": ["install cudnn for FLASHINFER"],
        }
    )


REPORTS: dict[str, Callable[[Path], Document]] = {
    "bench": lambda folder: bench_report(),
    "bench-cpu": lambda folder: bench_report(**ON_A_CPU),
    "bench-failed": lambda folder: bench_document(bench_record(**NOTHING_MEASURED)),
    "runs": runs_report,
    "two-runs": lambda folder: two_runs_report(folder / "deferred", graph=0.96, eager=1.01),
    "compare-backends": lambda folder: compare_report(),
    "compare-micro": lambda folder: document_of(micro_record()),
    "profile": lambda folder: document_of(profile_record()),
    "verify": lambda folder: verify_report(),
    "workload": lambda folder: workload_report(),
    "plan": lambda folder: plan_report(),
    "doctor": lambda folder: doctor_report(),
    "models": lambda folder: models_report(),
}
"""How a report of each kind is made, in a folder of its own."""


@cache
def report(kind: str) -> Document:
    """The report of a kind, made once."""
    with TemporaryDirectory() as folder:
        return REPORTS[kind](Path(folder))
