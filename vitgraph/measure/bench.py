"""The `bench` command's work: load, capture, check, measure, record. Prints nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitgraph.errors import NothingReplayedError
from vitgraph.graphs.capture import reserve_together
from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.measure.calls import CallInputs, EncoderCall
from vitgraph.measure.correctness import eager_reference, incorrect, largest_deviation, worst
from vitgraph.measure.diagnose import Diagnosis
from vitgraph.measure.environment import snapshot
from vitgraph.measure.experiment import Control
from vitgraph.measure.preparation import EAGER_ALONE, PreparedBench, resolved_bench, workload_of
from vitgraph.measure.progress import Progress
from vitgraph.measure.run import MeasuredRun, captured_facts, clear_graphs
from vitgraph.measure.series import BASELINE_SERIES, Series, eager_series, expect_calls, graph_series, prepare_attention
from vitgraph.measure.setup import load
from vitgraph.models.compilation import compile_facts
from vitgraph.models.encoder import VisionEncoder
from vitgraph.models.two_path import MonolithicEncoder
from vitgraph.planning.accounting import GraphCounters
from vitgraph.planning.packing import EAGER_IS_FASTER
from vitgraph.ranks.group import ParallelGroup
from vitgraph.records.record import BenchRecord
from vitgraph.records.results import BenchComparison, BenchResult, Correctness
from vitgraph.records.sample_table import EAGER, GRAPH, MONOLITHIC, Sample, Samples
from vitgraph.records.sections import choices_text
from vitgraph.records.series import GraphFacts
from vitgraph.records.stats import compare_bench, latencies
from vitgraph.records.store import SAMPLES_FILE, Draft


def run_bench(
    prepared: PreparedBench,
    folder: Path,
    progress: Progress,
    group: ParallelGroup | None = None,
    command: Sequence[str] | None = None,
) -> BenchRecord | None:
    """Runs a prepared bench and saves its record in `folder`, whatever ends it.

    Args:
        group: The ranks that share the calls, each of which runs this.
        command: The command as it was given; None is this process's.

    Returns:
        The record; None on a rank other than 0, which does the same work and saves none.

    Raises:
        UsageError: Results cannot be saved in `folder`; nothing was loaded yet.
        NothingReplayedError: No graph was captured, or none was replayed; the record is saved all the same.
        IncorrectOutputError: Replay and eager disagree; the record says so and holds no latency.
        VitgraphError: Any other reason why nothing could be measured, or another rank failed.
    """
    run = BenchRun.of(prepared, progress, group)
    if command is not None:
        run.draft.note(command=tuple(command))
    record = run.record(folder)
    if record is None or record.status != "complete" or prepared.is_eager_alone or record.result.graph.replays:
        return record
    graph = record.result.graph
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


class BenchRun(MeasuredRun[BenchRecord]):
    """Graph mode, eager mode and the baselines of one encoder."""

    _encoder: VisionEncoder
    _managers: Mapping[str, EncoderCudaGraphManager] = {}
    _series: Sequence[Series] = ()

    @classmethod
    def of(cls, prepared: PreparedBench, progress: Progress, group: ParallelGroup | None = None) -> BenchRun:
        """A run that has not begun: its record says all that is decided without a device."""
        facts = GraphFacts(policy=prepared.spec.graph.packing)
        monolithic = prepared.monolithic
        record = BenchRecord(
            settings=prepared.spec.as_dict(),
            resolved=resolved_bench(prepared),
            workload=workload_of(prepared),
            samples_file=SAMPLES_FILE,
            result=BenchResult(
                graph=facts,
                monolithic=None if monolithic is None else facts.but(**monolithic.describe_counters(GraphCounters())),
            ),
        )
        return cls(prepared, Draft(record), progress, group)

    def open(self) -> CallInputs:
        encoder = self._encoder = self._load()
        self._capture_all(encoder)
        inputs = CallInputs(encoder, [*self.calls, *self.prepared.warmups], self.prepared.spec.model.seed)
        self._series = self._make_series(encoder)
        self._check(encoder, inputs)
        return inputs

    def _load(self) -> VisionEncoder:
        prepared, draft = self.prepared, self.draft
        self.progress.phase("loading the encoder")
        self.join_ranks()
        load_encoder = load if self.ranks is None else self.ranks.load
        encoder, facts = load_encoder(prepared.source, prepared.spec.model, device=self.device, dtype=self.dtype)
        environment = snapshot(self.device).but(encoder=facts)
        if prepared.cost is not None:
            environment = environment.but(calibration_differences=prepared.cost.model.profile.differences(environment))
        draft.note(environment=environment)
        for difference in environment.calibration_differences or ():
            self.progress.note(difference)
        return encoder

    def _capture_all(self, encoder: VisionEncoder) -> None:
        """Captures the graphs of every series that has some; none where eager alone is measured."""
        prepared, policy = self.prepared, self.prepared.spec.graph.packing
        managers: dict[str, EncoderCudaGraphManager] = {}
        if not prepared.is_eager_alone:
            managers[GRAPH] = EncoderCudaGraphManager(encoder, prepared.plan, policy=policy, cost=prepared.cost)
        if prepared.monolithic is not None:
            whole = MonolithicEncoder(encoder, prepared.monolithic.rule.max_crops)
            managers[MONOLITHIC] = EncoderCudaGraphManager(whole, prepared.monolithic.plan, policy=policy)
            reserve_together(list(managers.values()))
        expect_calls(encoder, [managers[GRAPH]] if GRAPH in managers else [], prepared.calls)
        self._managers = managers
        for name, manager in managers.items():
            self._capture(name, manager)
        environment, graph = self.draft.record.environment, self.draft.record.result.graph
        if self.ranks is not None and environment is not None and environment.encoder is not None:
            told = self.ranks.meet(
                device_name=environment.device,
                attn_backend=environment.encoder.attn_backend,
                captured=graph.graphs,
                **graph.model_dump(mode="json", include={"dropped", "pool_bytes", "buffer_bytes", "capture_s"}),
            )
            self.draft.note_environment(ranks=told)

    def _capture(self, name: str, manager: EncoderCudaGraphManager) -> None:
        """Captures a manager's graphs, and tells of them in its section of the record."""
        phase = f"capturing {'' if name == GRAPH else f'{name} '}graphs"
        self.progress.phase(phase, len(manager.plan.graph_keys()))
        try:
            manager.capture(lambda done, of, key: self.progress.step())
        finally:
            self._note_graphs(name, **captured_facts(manager))
        for dropped in manager.dropped:
            self.progress.note(f"{phase}: budget {dropped.key.token_budget} was dropped: {dropped.reason}")

    def _graphs(self, name: str) -> GraphFacts:
        """The part of the record that tells of a series' graphs."""
        facts: GraphFacts = getattr(self.draft.record.result, name)
        return facts

    def _note_graphs(self, name: str, **changes: Any) -> None:
        self.draft.note_result(**{name: self._graphs(name).but(**changes)})

    def _make_series(self, encoder: VisionEncoder) -> list[Series]:
        """What is measured beside one another."""
        series = [eager_series(encoder)]
        if GRAPH in self._managers:
            series.append(graph_series(self._managers[GRAPH]))
        make = BASELINE_SERIES.get(self.prepared.spec.run.baseline)
        if make is not None:
            series.append(make(encoder))
        if MONOLITHIC in self._managers:
            whole = self._managers[MONOLITHIC]
            series.append(Series(MONOLITHIC, whole.execute, whole, is_monolithic=True))
        return series if self.ranks is None else self.ranks.share(series, encoder)

    def _check(self, encoder: VisionEncoder, inputs: CallInputs) -> None:
        """Compares every series that replays with eager before anything is timed.

        Raises:
            IncorrectOutputError: An output is not finite, or farther from eager than the dtype's tolerance.
        """
        if self.prepared.is_eager_alone:
            return
        self.progress.phase("comparing replay with eager")
        reference = eager_reference(encoder, self.prepared.warmups or self.calls)
        found: dict[str, float | None] = {}
        limit = reference.limit
        try:
            for one in self._series:
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
            measured = [distance for distance in found.values() if distance is not None]
            is_right = all(distance <= limit for distance in measured)
            correctness = Correctness(
                checked=len(reference.calls) if found else 0,
                status="unchecked" if not measured else "ok" if is_right else "incorrect",
                tolerance=limit,
                max_rel_l2=found.get(GRAPH),
                monolithic_max_rel_l2=found.get(MONOLITHIC),
            )
            self.draft.note_result(correctness=correctness)

    def prepare(self, calls: Sequence[EncoderCall], inputs: CallInputs) -> None:
        environment = self.draft.record.environment
        prepare_attention(self._encoder, calls, inputs)
        if self.ranks is not None:
            # A rank may take long to compile or tune; the others must not give up on it in a timed call.
            self.ranks.group.exchange(None, "prepared attention", slow=True)
        assert environment is not None and environment.encoder is not None
        ran = environment.encoder.but(**self._encoder.attention.facts())
        self.draft.note_environment(encoder=ran)
        if ran.attn_choices:
            self.progress.note(f"attention: {choices_text(ran.attn_choices)}")

    def series(self) -> list[Series]:
        return list(self._series)

    def control(self) -> Control:
        return Control.of([EAGER], len(self.calls), self.prepared.spec.run.rounds)

    def summarize(
        self, samples: Samples, counters: Mapping[str, GraphCounters], invalid_reasons: Sequence[str]
    ) -> None:
        spec, environment = self.prepared.spec, self.draft.record.environment
        if self.prepared.is_eager_alone:
            comparison = BenchComparison(invalid_reasons=tuple(invalid_reasons), verdict_reason=EAGER_ALONE)
        else:
            comparison = compare_bench(samples, spec.model.seed, invalid_reasons, spec.run.same_margin_pct)
            self._note_graphs(GRAPH, **counters[GRAPH].as_dict())
        self.draft.note_result(latency=latencies(samples, spec.parallel.ranks), comparison=comparison)
        if self.prepared.monolithic is not None:
            self._note_graphs(MONOLITHIC, **self.prepared.monolithic.describe_counters(counters[MONOLITHIC]))
        encoder = environment.encoder if environment is not None else None
        if encoder is not None and encoder.compiled is not None:
            # Lengths that no sample call had may have been compiled for since.
            self.draft.note_environment(encoder=encoder.but(compiled=encoder.compiled.but(**compile_facts())))

    def diagnose(self, inputs: CallInputs, calls: Sequence[EncoderCall], samples: Sequence[Sample]) -> None:
        if self.device.type != "cuda":
            return
        # First what is done at once: a stop while replays are timed, which takes much longer, leaves it.
        self._speed_of_light()
        requests = sum(len(call.requests) for call in self.calls)
        for name, manager in self._managers.items():
            self.progress.phase("timing replays alone")
            for facts in Diagnosis(manager, inputs, calls).facts(self._graphs(name), requests):
                # Noted as soon as it is known, so that whatever ends this leaves it.
                self.draft.note_result(**{name: facts})

    def _speed_of_light(self) -> None:
        """Adds the arithmetic limit of the unpadded items: its mean, and how far each mode is from it."""
        mean_ms = self.speed_of_light_ms()
        if mean_ms is None:
            return
        latency = {
            name: found.but(
                speed_of_light_ms=mean_ms,
                times_speed_of_light=None if found.mean_ms is None else found.mean_ms / mean_ms,
            )
            for name, found in self.draft.record.result.latency.items()
        }
        self.draft.note_result(latency=latency)

    def release(self) -> None:
        clear_graphs(self._managers.values())
