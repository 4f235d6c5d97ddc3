"""The `bench` command's work: plan, load, capture, check, measure, record. Prints nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitgraph.errors import NothingReplayedError
from vitgraph.measure.calls import EncoderCall
from vitgraph.measure.preparation import EAGER_ALONE, PreparedBench, prepare_bench, shared_facts
from vitgraph.measure.progress import Progress
from vitgraph.measure.record_facts import correctness_facts, new_draft, replay_ms_of_path
from vitgraph.measure.setup import load, resolve_device, resolve_dtype
from vitgraph.planning.packing import EAGER_IS_FASTER
from vitgraph.records.attention_choices import choices_text
from vitgraph.records.draft import Draft
from vitgraph.records.kinds.bench import BenchComparison
from vitgraph.records.record import BenchRecord
from vitgraph.records.sample_table import EAGER, GRAPH, MONOLITHIC, Samples, SampleWriter
from vitgraph.records.sections import AttentionChoice, Latency
from vitgraph.records.store import SAMPLES_FILE, ResultFolder
from vitgraph.records.summary import CPU_REPLAY_REASON, compare_bench, latencies

if TYPE_CHECKING:
    import torch

    from vitgraph.graphs.manager import EncoderCudaGraphManager
    from vitgraph.measure.calls import CallInputs
    from vitgraph.measure.experiment import Experiment
    from vitgraph.measure.on_ranks import RanksOfRun
    from vitgraph.measure.series import Series
    from vitgraph.models.encoder import VisionEncoder
    from vitgraph.models.geometry import GeometryRule
    from vitgraph.ranks.group import ParallelGroup

__all__ = ["PreparedBench", "follow_bench", "prepare_bench", "run_bench"]

CUDA, CPU_REPLAY = "cuda", "cpu-replay"

_NOTHING_CAPTURED = {"captured": (), "dropped": (), "pool_bytes": 0, "buffer_bytes": 0, "capture_s": 0.0}


def run_bench(
    prepared: PreparedBench,
    folder: Path,
    command: Sequence[str],
    progress: Progress,
    group: ParallelGroup | None = None,
) -> BenchRecord:
    """Runs a prepared bench and saves its record in `folder`, whatever ends it.

    Args:
        prepared: What to run.
        folder: Where the record goes.
        command: The command as it was given.
        progress: Told about the work.
        group: The ranks that share the calls; this one is rank 0, and the others run `follow_bench`.

    Raises:
        UsageError: Results cannot be saved in `folder`; nothing was loaded yet.
        NothingReplayedError: No graph was captured, or none was replayed; the record is saved all the same.
        IncorrectOutputError: Replay and eager disagree; the record says so and holds no latency.
        VitgraphError: Any other reason why nothing could be measured.
    """
    draft = new_draft(prepared, command)
    with ExitStack() as stack:
        results = stack.enter_context(ResultFolder(folder, prepared.spec.run.overwrite))
        run = BenchRun(prepared, draft, progress, group, results)
        stack.enter_context(draft.saved_in(results, run.stopped))
        run.execute(stack.enter_context(SampleWriter(results)))
    record = draft.record()
    assert isinstance(record, BenchRecord)
    graph = record.result.graph
    if record.status == "complete" and not graph.replays and not prepared.is_eager_alone:
        if set(graph.misses_by_reason) != {EAGER_IS_FASTER}:
            raise NothingReplayedError(
                f"graph mode replayed nothing: all {graph.items} items went eager ({graph.misses_by_reason}); the "
                f"record is in {folder}"
            )
        # An answer, not a failure: what was asked for is the faster of the two.
        progress.note(
            f"no graph was replayed: the calibration predicts eager to be faster for all {graph.items} items, so both "
            "modes are eager here"
        )
    return record


def follow_bench(prepared: PreparedBench, group: ParallelGroup, progress: Progress) -> None:
    """A rank's part of `run_bench` where it is not rank 0: the same work, and no record.

    Raises:
        VitgraphError: This rank, or another one, failed.
    """
    BenchRun(prepared, new_draft(prepared, []), progress, group, None).execute(None)


class BenchRun:
    """One run in progress, or one rank's part of it; fills `draft` as facts become known."""

    def __init__(
        self,
        prepared: PreparedBench,
        draft: Draft,
        progress: Progress,
        group: ParallelGroup | None,
        folder: ResultFolder | None,
    ) -> None:
        self.prepared = prepared
        self.draft = draft
        self.progress = progress
        self.group = group
        self.ranks: RanksOfRun | None = None
        self.folder = folder
        self.is_measured = False
        self._managers: list[EncoderCudaGraphManager] = []

    def execute(self, writer: SampleWriter | None) -> None:
        """Runs it all.

        Args:
            writer: Takes the samples; None on ranks other than 0.
        """
        try:
            self._execute(writer)
        except KeyboardInterrupt as stop:
            failure = self.group.failure_behind_stop() if self.group is not None else None
            if failure is not None:
                raise failure from stop
            raise
        finally:
            self._release()

    def stopped(self) -> str:
        """What the run had come to where the user stops it."""
        after = "after the measuring, while graphs were timed alone"
        return f"stopped by the user {after if self.is_measured else 'before the measuring began'}"

    def _release(self) -> None:
        """Frees the graphs, once the device has done what a stop or a failure left under way.

        A rank's process ends with its run, and where another rank failed, its device may wait in a gather for ever.
        """
        if self.group is not None:
            return
        for manager in self._managers:
            # After a device error even releasing fails, and that error is on its way already.
            with suppress(RuntimeError):
                manager.clear()

    def _execute(self, writer: SampleWriter | None) -> None:
        from vitgraph.measure.calls import CallInputs
        from vitgraph.measure.experiment import Control, Experiment, rounds_over
        from vitgraph.measure.record_samples import SampleKeeper
        from vitgraph.measure.series import prepare_attention
        from vitgraph.measure.timing import CallTimer

        prepared, draft, spec = self.prepared, self.draft, self.prepared.spec
        encoder = self._open()
        device = encoder.device
        managers = self._capture_all(encoder)
        inputs = CallInputs(encoder, [*prepared.calls, *prepared.warmups], spec.model.seed)
        series = self._series(encoder, managers)
        self._check(encoder, series, inputs)
        own_calls = prepared.calls if self.ranks is None else self.ranks.own_calls(prepared.calls)
        prepare_attention(encoder, own_calls, inputs)
        if self.ranks is not None:
            self.ranks.wait_prepared()
        draft.environment |= encoder.attention.facts()
        if choices := encoder.attention.choices():
            self.progress.note(f"attention: {choices_text(tuple(map(AttentionChoice.model_validate, choices)))}")
        timer = CallTimer(device) if self.ranks is None else self.ranks.timer
        experiment = Experiment(series, inputs, timer, device, self.ranks)
        self.progress.phase("warming up", len(prepared.warmups))
        experiment.warm_up(prepared.warmups, self.progress.step)
        self._save_before_measuring()
        rounds, steps = spec.run.rounds, len(prepared.calls) * spec.run.rounds
        control = Control.of([EAGER], len(prepared.calls), rounds)
        self.progress.phase("measuring", steps)
        problems: list[str] = []
        keep = SampleKeeper(writer)
        try:
            experiment.measure(
                rounds_over(prepared.calls, rounds),
                steps,
                keep,
                control=control,
                tick=self.progress.step,
            )
            if self.ranks is not None:
                problems = self.ranks.after(experiment)
        finally:
            if writer is not None:
                self._summarize(experiment, keep.table(), problems)
        if experiment.is_interrupted:
            draft.end("interrupted", "stopped by the user while measuring")
            return
        self.is_measured = True
        if writer is not None and device.type == "cuda":
            # First what is done at once: a stop while replays are timed, which takes much longer, leaves it.
            self._speed_of_light(device, encoder.dtype)
            for name, manager in managers.items():
                self._diagnose(manager, inputs, own_calls, self._section(name))
        draft.end("complete")

    def _open(self) -> VisionEncoder:
        """Joins the other ranks, and loads the encoder."""
        from vitgraph.measure.environment import snapshot

        prepared, model = self.prepared, self.prepared.spec.model
        device = resolve_device(model.device) if self.group is None else self.group.device
        dtype = resolve_dtype(model.dtype, device)
        self.progress.phase("loading the encoder")
        load_encoder = load
        if self.group is not None:
            from vitgraph.measure.on_ranks import RanksOfRun

            assert prepared.assign is not None
            self.ranks = RanksOfRun(self.group, prepared.assign)
            self.ranks.agree(shared_facts(prepared))
            load_encoder = self.ranks.load
        encoder, facts = load_encoder(prepared.source, model, device=device, dtype=dtype)
        self.draft.environment = {**snapshot(device), **facts}
        if prepared.cost is not None:
            differences = prepared.cost.model.profile.differences(self.draft.environment)
            self.draft.environment["calibration_differences"] = differences
            for difference in differences:
                self.progress.note(difference)
        return encoder

    def _section(self, name: str) -> dict[str, Any]:
        """The part of the record that tells of a series' graphs."""
        section: dict[str, Any] = self.draft.result[name]
        return section

    def _capture_all(self, encoder: VisionEncoder) -> dict[str, EncoderCudaGraphManager]:
        """Captures the graphs of every series that has some; none where eager alone is measured."""
        from vitgraph.graphs.captured import reserve_together
        from vitgraph.graphs.manager import EncoderCudaGraphManager
        from vitgraph.measure.series import expect_calls
        from vitgraph.models.monolithic import MonolithicEncoder

        prepared, policy = self.prepared, self.prepared.spec.graph.packing
        managers: dict[str, EncoderCudaGraphManager] = {}
        if not prepared.is_eager_alone:
            managers[GRAPH] = EncoderCudaGraphManager(encoder, prepared.plan, policy=policy, cost=prepared.cost)
        if prepared.monolithic is not None:
            whole = MonolithicEncoder(encoder, prepared.monolithic.rule.max_crops)
            managers[MONOLITHIC] = EncoderCudaGraphManager(whole, prepared.monolithic.plan, policy=policy)
            reserve_together(list(managers.values()))
        expect_calls(encoder, managers[GRAPH], prepared.calls)
        self._managers += managers.values()
        for name, manager in managers.items():
            self._capture(manager, self._section(name), f"capturing {'' if name == GRAPH else f'{name} '}graphs")
        if self.ranks is not None:
            environment, graph = self.draft.environment, _NOTHING_CAPTURED | self.draft.result["graph"]
            held = {name: graph[name] for name in ("dropped", "pool_bytes", "buffer_bytes", "capture_s")}
            environment["ranks"] = self.ranks.meet(
                device_name=environment["device"],
                attn_backend=environment["attn_backend"],
                captured=len(graph["captured"]),
                **held,
            )
        return managers

    def _series(self, encoder: VisionEncoder, managers: Mapping[str, EncoderCudaGraphManager]) -> list[Series]:
        """What is measured beside one another."""
        from vitgraph.measure.series import BASELINE_SERIES, eager_series, graph_series, monolithic_series

        series = [eager_series(encoder), *map(graph_series, [managers[GRAPH]] if GRAPH in managers else [])]
        make = BASELINE_SERIES.get(self.prepared.spec.run.baseline)
        if make is not None:
            series.append(make(encoder))
        if MONOLITHIC in managers:
            series.append(monolithic_series(managers[MONOLITHIC]))
        return series if self.ranks is None else self.ranks.share(series, encoder)

    def _check(self, encoder: VisionEncoder, series: Sequence[Series], inputs: CallInputs) -> None:
        """Compares every series that replays with eager before anything is timed.

        Raises:
            IncorrectOutputError: An output is not finite, or farther from eager than the dtype's tolerance.
        """
        from vitgraph.measure.correctness import eager_reference, incorrect, largest_deviation, worst

        if self.prepared.is_eager_alone:
            return
        self.progress.phase("comparing replay with eager")
        reference = eager_reference(encoder, self.prepared.warmups or self.prepared.calls)
        found: dict[str, float | None] = {}
        limit = reference.limit
        try:
            for one in series:
                if one.manager is None:
                    continue
                encode = one.encode if self.ranks is None else self.ranks.waiting(one)
                deviation = largest_deviation(encode, reference, inputs)
                found[one.name] = deviation.distance
                if self.ranks is not None:
                    found[one.name] = worst(self.ranks.group.exchange(deviation.distance, "checked outputs", slow=True))
                limit = max(limit, deviation.limit)
                if not deviation.passes:
                    raise incorrect(one.name, deviation)
        finally:
            checked = len(reference.calls) if found else 0
            self.draft.result["correctness"] = correctness_facts(found, checked, limit)

    def _capture(self, manager: EncoderCudaGraphManager, section: dict[str, Any], phase: str) -> None:
        """Captures a manager's graphs, and tells of them in a section of the record."""
        self.progress.phase(phase, len(manager.plan.graph_keys()))
        try:
            manager.capture(lambda done, of, key: self.progress.step())
        finally:
            captured = [graph.as_dict() for graph in manager.graphs.values()]
            section |= {
                "mode": CUDA if manager.is_cuda else CPU_REPLAY,
                "graphs": len(captured),
                "captured": captured,
                "dropped": [dropped.as_dict() for dropped in manager.dropped],
                "pool_bytes": manager.pool_bytes,
                "buffer_bytes": manager.buffer_bytes,
                "capture_s": sum(graph["capture_ms"] for graph in captured) / 1e3,
            }
        for dropped in manager.dropped:
            self.progress.note(f"{phase}: budget {dropped.key.token_budget} was dropped: {dropped.reason}")

    def _save_before_measuring(self) -> None:
        """Rank 0 may be killed for another's sake; its samples then have a record that says what they are."""
        if self.folder is not None and self.ranks is not None:
            self.draft.end("error", f"the run ended while it was measuring; {SAMPLES_FILE} holds what it has")
            self.draft.save(self.folder)

    def _summarize(self, experiment: Experiment, samples: Samples, problems: Sequence[str]) -> None:
        from vitgraph.measure.environment import validity_problems
        from vitgraph.models.compile.compilation import compile_facts

        result, environment = self.draft.result, self.draft.environment
        reasons = [*validity_problems(experiment.gpu_states), *problems]
        if result["graph"].get("mode") == CPU_REPLAY:
            reasons.insert(0, CPU_REPLAY_REASON)
        result["latency"] = latencies(samples, 1 if self.group is None else self.group.size)
        if self.prepared.is_eager_alone:
            result["comparison"] = BenchComparison(invalid_reasons=tuple(reasons), verdict_reason=EAGER_ALONE)
        else:
            margin = self.prepared.spec.run.same_margin_pct
            result["comparison"] = compare_bench(samples, self.prepared.spec.model.seed, reasons, margin)
            result["graph"] |= experiment.counters[GRAPH].as_dict()
        if self.prepared.monolithic is not None:
            counters = experiment.counters[MONOLITHIC]
            result["monolithic"] |= self.prepared.monolithic.describe_counters(counters)
        environment["gpu_states"] += experiment.gpu_states
        if self.prepared.spec.model.compile:
            environment |= compile_facts()

    def _diagnose(
        self,
        manager: EncoderCudaGraphManager,
        inputs: CallInputs,
        calls: Sequence[EncoderCall],
        graph: dict[str, Any],
    ) -> None:
        """Times a manager's replays alone and its steps on the host, into its section of the record.

        Each figure goes there as soon as it is known, so that whatever ends this leaves those before it.
        """
        from vitgraph.measure.diagnose import (
            measure_call_overheads,
            measure_host_steps,
            measure_replays,
            most_used_graphs,
        )

        self.progress.phase("timing replays alone")
        rows = {
            (row["path"], row["token_budget"], row["segment_slots"], tuple(row["axis_key"])): row
            for row in graph["per_budget"]
        }
        try:
            for key, times in measure_replays(manager, inputs, most_used_graphs(manager, inputs, calls)):
                row = rows.get((key.path, key.token_budget, key.segment_slots, key.axis_key))
                if row is not None:
                    row.update(times)
        finally:
            self._derive_replay_times(graph)
        graph["call_overheads"] = []
        for overhead in measure_call_overheads(manager, inputs, calls):
            graph["call_overheads"].append(overhead)
        graph["host_steps_ms"] = measure_host_steps(manager, inputs, calls)

    def _derive_replay_times(self, graph: dict[str, Any]) -> None:
        """Fills `launch_gap` and the times of paths from the graphs that were timed."""
        timed = [row for row in graph["per_budget"] if row.get("launch_gap")]
        if timed:
            gaps, uses = [row["launch_gap"] for row in timed], [row["replays"] for row in timed]
            graph["launch_gap"] = float(np.average(gaps, weights=uses))
        requests = sum(len(call.requests) for call in self.prepared.calls)
        for row in graph["per_path"]:
            row["replay_ms"] = replay_ms_of_path(row["path"], graph["per_budget"], requests)

    def _speed_of_light(self, device: torch.device, dtype: torch.dtype) -> None:
        """Adds the arithmetic limit of the unpadded items: its mean, and how far each mode is from it."""
        from vitgraph.measure.timing import matrix_rate_flops

        rate = matrix_rate_flops(device, dtype)
        if not rate:
            return
        rule = self.prepared.source.rule()
        mean_flops = mean_request_flops(rule, self.prepared.calls)
        mean_ms = mean_flops / (rate * self.prepared.spec.parallel.ranks) * 1e3
        self.draft.environment["matrix_rate_tflops"] = rate / 1e12
        latency: dict[str, Latency] = self.draft.result["latency"]
        self.draft.result["latency"] = {
            name: found.model_copy(
                update={
                    "speed_of_light_ms": mean_ms,
                    "times_speed_of_light": None if found.mean_ms is None else found.mean_ms / mean_ms,
                }
            )
            for name, found in latency.items()
        }


def mean_request_flops(rule: GeometryRule, calls: Sequence[EncoderCall]) -> float:
    """Floating-point operations of a mean request, without padding."""
    flops = sum(rule.flops(item) for call in calls for item in call.items)
    return flops / sum(len(call.requests) for call in calls)
