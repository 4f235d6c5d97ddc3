"""The `bench` command's work: plan, load, capture, check, measure, record. Prints nothing."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from vitgraph import __version__
from vitgraph.bench.calls import EncoderCall, make_calls
from vitgraph.bench.session import load, plan_graphs, planning_warnings, resolve_device, resolve_dtype, resolve_source
from vitgraph.config import BenchSpec
from vitgraph.errors import NothingReplayedError, VitgraphError
from vitgraph.models.registry import ModelSource
from vitgraph.planning.accounting import GraphCounters, count_calls
from vitgraph.planning.budgets import BudgetPlan
from vitgraph.planning.graph_tables import PackingCost
from vitgraph.planning.packing import pack_items
from vitgraph.records import CPU_REPLAY_REASON, RunRecord, build_comparison, build_summary
from vitgraph.result_files import refuse_to_replace
from vitgraph.samples import RUN_FILE, SAMPLES_FILE, Sample, SampleWriter
from vitgraph.tuning.shipped import packing_cost
from vitgraph.workloads.base import SkippedItem, Workload
from vitgraph.workloads.registry import build_workload

CUDA, CPU_REPLAY = "cuda", "cpu-replay"


class Progress(Protocol):
    """What the engine tells about its work; the command line shows it, tests collect it."""

    def phase(self, name: str, total: int | None = None) -> None:
        """A new phase with `total` steps begins."""

    def step(self) -> None:
        """One step of the phase is done."""

    def note(self, text: str) -> None:
        """Something that the user should know."""


@dataclass(slots=True)
class PreparedBench:
    """A bench that was planned without touching a device.

    Attributes:
        spec: The settings.
        source: The model.
        workload: The requests.
        calls: Encoder calls of the measured requests.
        warmups: Encoder calls of the warm-ups.
        skipped: Items left out, by the workload and by the processor.
        plan: Which graphs will exist.
        warnings: What the user should know first.
        cost: Predicted times of the calibration that was given, for packing.
    """

    spec: BenchSpec
    source: ModelSource
    workload: Workload
    calls: list[EncoderCall]
    warmups: list[EncoderCall]
    skipped: list[SkippedItem]
    plan: BudgetPlan
    warnings: list[str] = field(default_factory=list)
    cost: PackingCost | None = None

    def expected_counters(self) -> GraphCounters:
        """Hits, misses and waste that the packing predicts; exact unless a graph does not fit in memory."""
        policy = self.spec.graph.packing
        return count_calls([pack_items(call.specs, self.plan, policy, self.cost) for call in self.calls])

    def describe_workload(self) -> dict[str, Any]:
        """Facts of the workload, in the shape of run.json."""
        return _workload_facts(self)

    def describe(self) -> dict[str, Any]:
        """Resolved settings, plan and expected packing, for `--dry-run`."""
        return {
            "settings": self.spec.as_dict(),
            "resolved": dict(_resolved(self)),
            "workload": _workload_facts(self),
            "expected": self.expected_counters().as_dict(),
            "warnings": self.warnings,
        }


def prepare_bench(spec: BenchSpec) -> PreparedBench:
    """Everything that can be decided and refused before a device is touched; imports no torch."""
    source = resolve_source(spec.model)
    workload = build_workload(spec.workload)
    rule = source.rule()
    calls, refused = make_calls(workload.requests, rule, spec.run.requests_per_call)
    warmups, _ = make_calls(workload.warmups, rule, spec.run.requests_per_call) if workload.warmups else ([], [])
    plan = plan_graphs(rule, spec.graph, [item for call in calls for item in call.specs])
    warnings = planning_warnings(plan, spec.graph, [len(call.items) for call in calls])
    skipped = [*workload.skipped, *refused]
    cost = packing_cost(spec.graph.calibration, source.name) if spec.graph.calibration is not None else None
    return PreparedBench(spec, source, workload, calls, warmups, skipped, plan, warnings, cost)


def run_bench(prepared: PreparedBench, folder: Path, command: Sequence[str], progress: Progress) -> RunRecord:
    """Runs a prepared bench and saves its record in `folder`, whatever ends it.

    Raises:
        NothingReplayedError: No graph was captured, or none was replayed; the record is saved all the same.
        IncorrectOutputError: Replay and eager disagree; the record says so and holds no latency.
        VitgraphError: Any other reason why nothing could be measured.
    """
    if not prepared.spec.run.overwrite:
        refuse_to_replace(folder / RUN_FILE)
    record = _empty_record(prepared, command)
    run = _Run(prepared, record, folder, progress)
    with SampleWriter(folder, overwrite=prepared.spec.run.overwrite) as writer:
        try:
            run.execute(writer)
        except VitgraphError as error:
            record["status"], record["status_reason"] = "error", str(error)
            raise
        except KeyboardInterrupt:
            record["status"], record["status_reason"] = "interrupted", "stopped by the user before the measuring began"
            raise
        finally:
            saved = RunRecord(record)
            saved.save(folder, overwrite=prepared.spec.run.overwrite)
    if record["status"] == "complete" and not record["graph"]["replays"]:
        raise NothingReplayedError(
            f"graph mode replayed nothing: all {record['graph']['items']} items went eager "
            f"({record['graph']['misses_by_reason']}); the record is in {folder}"
        )
    return saved


class _Run:
    """One run in progress; fills `record` as facts become known."""

    def __init__(self, prepared: PreparedBench, record: dict[str, Any], folder: Path, progress: Progress) -> None:
        self.prepared = prepared
        self.record = record
        self.folder = folder
        self.progress = progress
        self.samples: list[Sample] = []

    def execute(self, writer: SampleWriter) -> None:
        from vitgraph.bench.calls import CallInputs
        from vitgraph.bench.runner import TOLERANCE, BenchOutcome, BenchRunner
        from vitgraph.environment import snapshot
        from vitgraph.graphs.manager import EncoderCudaGraphManager

        prepared, record, spec = self.prepared, self.record, self.prepared.spec
        device = resolve_device(spec.model.device)
        dtype = resolve_dtype(spec.model.dtype, device)
        self.progress.phase("loading the encoder")
        encoder, facts = load(prepared.source, spec.model, device=device, dtype=dtype)
        record["environment"] = {**snapshot(device), **facts}
        manager = EncoderCudaGraphManager(encoder, prepared.plan, policy=spec.graph.packing, cost=prepared.cost)
        self._capture(manager)
        inputs = CallInputs(encoder, [*prepared.calls, *prepared.warmups], spec.model.seed)
        runner = BenchRunner(encoder, manager, inputs, baseline=spec.run.baseline)
        outcome = BenchOutcome()
        self.progress.phase("comparing replay with eager")
        try:
            runner.check_outputs(prepared.warmups or prepared.calls, outcome)
        finally:
            record["correctness"] = {
                "checked": outcome.checked_calls,
                "max_rel_l2": outcome.max_rel_l2,
                "tolerance": TOLERANCE[dtype],
                "status": _correctness(outcome.max_rel_l2, TOLERANCE[dtype]),
            }
        runner.prepare_attention(prepared.calls)
        record["environment"]["attn_plan_build_ms"] = encoder.attention.plan_build_ms
        self.progress.phase("warming up", len(prepared.warmups))
        runner.warm_up(prepared.warmups, self.progress.step)

        def keep(sample: Sample) -> None:
            self.samples.append(sample)
            writer.write(sample)

        self.progress.phase("measuring", len(prepared.calls) * spec.run.rounds)
        try:
            runner.measure(prepared.calls, spec.run.rounds, keep, outcome, self.progress.step)
        finally:
            self._summarize(manager, outcome)
        if outcome.is_interrupted:
            record["status"], record["status_reason"] = "interrupted", "stopped by the user while measuring"
            return
        self._diagnose(manager, inputs)
        record["status"], record["status_reason"] = "complete", None

    def _capture(self, manager: Any) -> None:
        total = len(self.prepared.plan.graph_keys())
        self.progress.phase("capturing graphs", total)
        try:
            manager.capture(lambda done, of, key: self.progress.step())
        finally:
            captured = [graph.as_dict() for graph in manager.graphs.values()]
            self.record["graph"] |= {
                "mode": CUDA if manager.is_cuda else CPU_REPLAY,
                "captured": captured,
                "dropped": [dropped.as_dict() for dropped in manager.dropped],
                "pool_bytes": manager.pool_bytes,
                "buffer_bytes": manager.buffer_bytes,
                "capture_s": sum(graph["capture_ms"] for graph in captured) / 1e3,
            }
        for dropped in manager.dropped:
            self.progress.note(f"budget {dropped.key.token_budget} was dropped: {dropped.reason}")

    def _summarize(self, manager: Any, outcome: Any) -> None:
        from vitgraph.environment import validity_problems

        record = self.record
        reasons = validity_problems(outcome.gpu_states)
        if not manager.is_cuda:
            reasons.insert(0, CPU_REPLAY_REASON)
        record["summary"] = build_summary(self.samples)
        record["comparison"] = build_comparison(self.samples, self.prepared.spec.model.seed, reasons)
        record["graph"] |= outcome.counters.as_dict()
        record["environment"]["gpu_states"] = [
            None if state is None else {**state.values, "other_processes": state.other_processes}
            for state in outcome.gpu_states
        ]

    def _diagnose(self, manager: Any, inputs: Any) -> None:
        from vitgraph.bench.diagnostics import measure_call_overheads, measure_replays
        from vitgraph.bench.timing import matrix_rate_flops

        if not manager.is_cuda:
            return
        graph = self.record["graph"]
        self.progress.phase("timing replays alone")
        found = measure_replays(manager, inputs, self.prepared.calls)
        for row in graph["per_budget"]:
            for key, values in found.items():
                if (row["path"], row["token_budget"], row["segment_slots"], tuple(row["axis_key"])) == (
                    key.path,
                    key.token_budget,
                    key.segment_slots,
                    key.axis_key,
                ):
                    row |= values
        gaps = [
            (values["launch_gap"], row["replays"]) for row in graph["per_budget"] if (values := row).get("launch_gap")
        ]
        if gaps:
            graph["launch_gap"] = float(np.average([gap for gap, _ in gaps], weights=[uses for _, uses in gaps]))
        graph["call_overheads"] = measure_call_overheads(manager, inputs, self.prepared.calls)
        rate = matrix_rate_flops(manager.model.device, manager.model.dtype)
        if rate:
            self._speed_of_light(rate)

    def _speed_of_light(self, rate: float) -> None:
        """Adds the arithmetic limit of the unpadded items: its mean, and how far both modes are from it."""
        rule = self.prepared.source.rule()
        limits = [sum(rule.flops(item) for item in call.items) / call.requests for call in self.prepared.calls]
        mean_ms = float(np.mean(limits)) / rate * 1e3
        self.record["environment"]["matrix_rate_tflops"] = rate / 1e12
        for mode in self.record["summary"].values():
            mode["speed_of_light_ms"] = mean_ms
            mode["times_speed_of_light"] = mode["mean_ms"] / mean_ms


def _correctness(distance: float | None, tolerance: float) -> str:
    if distance is None:
        return "unchecked"
    return "ok" if distance <= tolerance else "incorrect"


def _empty_record(prepared: PreparedBench, command: Sequence[str]) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "kind": "bench",
        "status": "error",
        "status_reason": "the run ended before it measured anything",
        "vitgraph_version": __version__,
        "created_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": list(command),
        "settings": prepared.spec.as_dict() | {"resolved": _resolved(prepared)},
        "environment": {},
        "workload": _workload_facts(prepared),
        "summary": {},
        "comparison": {},
        "graph": {
            "mode": None,
            "policy": prepared.spec.graph.packing,
            **GraphCounters().as_dict(),
            "captured": [],
            "dropped": [],
            "pool_bytes": None,
            "buffer_bytes": None,
            "capture_s": None,
            "launch_gap": None,
            "call_overheads": None,
            "host_steps_ms": None,
        },
        "correctness": None,
        "samples_file": SAMPLES_FILE,
    }


def _workload_facts(prepared: PreparedBench) -> dict[str, Any]:
    workload = prepared.workload
    tokens = [call.tokens / call.requests for call in prepared.calls]
    items = [media for call in prepared.calls for media in call.media]
    return {
        "name": workload.name,
        "fingerprint": workload.fingerprint(),
        "requests": sum(call.requests for call in prepared.calls),
        "calls": len(prepared.calls),
        "items": len(items),
        "images": sum(media.frames == 1 for media in items),
        "videos": sum(media.frames > 1 for media in items),
        "skipped": [{"source": item.source, "reason": item.reason} for item in prepared.skipped],
        "provenance": dict(workload.provenance),
        "tokens_per_request": {f"p{q}": float(np.percentile(tokens, q)) for q in (5, 25, 50, 75, 95, 99)},
    }


def _resolved(prepared: PreparedBench) -> Mapping[str, Any]:
    plan = prepared.plan
    return {
        "architecture": prepared.source.architecture,
        "row": prepared.source.row.name,
        "config_source": prepared.source.config_source,
        "token_budgets": {path: list(budgets) for path, budgets in plan.path_budgets.items()},
        "max_vision_items_per_batch": plan.max_items,
        "max_frames_per_batch": plan.max_frames,
        "graphs": len(plan.graph_keys()),
    }
