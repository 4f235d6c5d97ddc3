"""`vitgraph tune-budgets`: searches settings for a workload with a cost profile, and measures the winner."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vitgraph.commands.shell import Shown, check_run, dry_run, is_on_gpu, shown_record
from vitgraph.measure.progress import Progress
from vitgraph.records.record import TuneRecord
from vitgraph.records.sections import Resolved
from vitgraph.records.store import SAMPLES_FILE, RecordFileError, ResultFolder, new_folder
from vitgraph.specs import TuneSpec

if TYPE_CHECKING:
    from vitgraph.measure.calls import EncoderCall
    from vitgraph.measure.preparation import PreparedBench
    from vitgraph.predict.profile import CalibrationProfile
    from vitgraph.tuning.advice import Advice
    from vitgraph.tuning.objective import Limits, Objective


def tune_budgets(spec: TuneSpec, progress: Progress) -> Shown:
    """Find the budgets, item and frame limits and packing that suit a workload, or say that eager is better.

    Reads a profile of `vitgraph calibrate` (or of the ones that come with vitgraph); where a GPU is there, the winner
    is then measured beside the automatic list, the documented nine budgets and eager.
    """
    from vitgraph.measure.preparation import prepare_bench
    from vitgraph.report.documents import write_derived

    check_goals(spec)
    bench = spec.bench
    prepared = prepare_bench(bench)
    profile = profile_for(spec, prepared)
    folder, overwrite = bench.run.output_dir or new_folder("tune", bench.model.model), bench.run.overwrite
    check_run(bench.model, None, folder, overwrite=overwrite)
    if spec.shell.dry_run:
        return dry_run(spec, f"would tune for {len(prepared.calls)} calls of {prepared.source.name}")
    with ResultFolder(folder, overwrite) as results:
        record, failure = tune(spec, prepared, profile, results, progress)
        write_derived(folder, progress.note)
    return shown_record(record, folder if failure is None else None, failure)


def check_goals(spec: TuneSpec) -> tuple[Objective, Limits]:
    """What is minimised, and within which limits.

    Raises:
        UsageError: An objective that is none.
    """
    from vitgraph.tuning.objective import Limits, Objective

    memory = None if spec.max_graph_memory is None else spec.max_graph_memory * 2**30
    return Objective.parse(spec.objective), Limits(
        spec.max_graphs, memory, spec.max_capture_time, spec.max_slower_share
    )


def profile_for(spec: TuneSpec, prepared: PreparedBench) -> CalibrationProfile:
    """The calibration that is named, or the one of this tower that comes with vitgraph.

    Raises:
        UsageError: There is none.
    """
    from vitgraph.predict.find_profile import find_profile

    model = spec.bench.model
    wanted = {"dtype": model.dtype, "attn_backend": model.attn_backend, "compile": model.compile}
    return find_profile(spec.bench.graph.calibration, prepared.source, wanted)


def tune(
    spec: TuneSpec, prepared: PreparedBench, profile: CalibrationProfile, results: ResultFolder, progress: Progress
) -> tuple[TuneRecord, RecordFileError | None]:
    """Searches, measures the winner where a GPU is there, and saves the record; a stop keeps what there is.

    Returns:
        The record, and why it could not be saved.
    """
    from vitgraph.measure.preparation import refusal_notes, workload_of
    from vitgraph.tuning.advice import tune_budgets as search

    goal, limits = check_goals(spec)
    factor, *said = _host(spec, profile)
    advice = search(
        prepared.calls,
        prepared.source,
        profile,
        max_call_tokens=spec.bench.graph.max_call_tokens,
        objective=goal,
        limits=limits,
        target=spec.target,
        workload_name=prepared.workload.name,
        regroup=_regroup(spec, prepared),
        share=spec.search_share,
        seed=spec.bench.workload.seed,
        doubts=[*filter(None, [profile.compile_doubt(spec.bench.model.compile)])],
        host_factor=factor,
    )
    advice.note(*said)
    advice.note(*refusal_notes(prepared.source.name, prepared.calls, prepared.skipped))
    record = TuneRecord(
        status="complete",
        status_reason=None,
        settings={"tune": spec.as_dict()},
        resolved=Resolved(model=prepared.source.name, row=profile.row),
        workload=workload_of(prepared),
        result=advice.result,
    )
    save = TuningSaver(results, record, advice)
    save()
    if spec.verifies and is_on_gpu(spec.bench.model.device):
        try:
            _measure(spec, prepared, profile, advice, save, progress)
        except KeyboardInterrupt:
            # The prediction is there, and perhaps some of the measurement.
            save.is_stopped = True
    elif spec.verifies:
        progress.note("no GPU here: the result is predicted, with the model's error, and not measured")
    return save(), save.failure


def _host(spec: TuneSpec, profile: CalibrationProfile) -> tuple[float, str]:
    """How many times as long as the profile's host the one to serve on takes, and what is known of it."""
    if not (spec.verifies and is_on_gpu(spec.bench.model.device)):
        return 1.0, "eager is predicted as on the profile's host; measuring on a GPU compares its host with that first"
    from vitgraph.measure.setup import resolve_device
    from vitgraph.predict.doubt import host_factor
    from vitgraph.tuning.host_watch import host_layer_us

    return host_factor(profile.host, host_layer_us(resolve_device(spec.bench.model.device)))


def _regroup(spec: TuneSpec, prepared: PreparedBench) -> Callable[[int], list[EncoderCall]] | None:
    """Makes calls of other numbers of requests; None where somebody said which requests a call has."""
    from vitgraph.measure.calls import make_calls

    requests = prepared.workload.requests
    is_chosen = spec.bench.run.requests_per_call is not None or spec.bench.traffic.request_rate is not None
    if is_chosen or any(request.call is not None for request in requests):
        return None
    return lambda size: make_calls(requests, prepared.source.rule(), size)[0]


def _measure(
    spec: TuneSpec,
    prepared: PreparedBench,
    profile: CalibrationProfile,
    advice: Advice,
    save: Callable[[], object],
    progress: Progress,
) -> None:
    from vitgraph.attention.registry import unavailable_backends
    from vitgraph.measure.environment import snapshot
    from vitgraph.measure.setup import load, resolve_device, resolve_dtype
    from vitgraph.predict.targets import VLLM
    from vitgraph.tuning.judge import verify_tuning

    device = resolve_device(spec.bench.model.device)
    progress.phase("loading the encoder")
    engine = advice.result.vllm.attn_backend if spec.target == VLLM else None
    model = profile.measured_spec(spec.bench.model, unavailable_backends(device), engine)
    encoder, ran = load(prepared.source, model, device=device, dtype=resolve_dtype(model.dtype, device))
    for difference in profile.differences(snapshot(device).but(encoder=ran)):
        progress.note(difference)
        advice.note(difference)
    verify_tuning(
        encoder,
        advice.calls,
        advice,
        max_calls=spec.verify_calls,
        seed=model.seed,
        time_limit_s=spec.time_limit,
        checkpoint=save,
        progress=progress,
    )


class TuningSaver:
    """Saves a tuning and its samples; while measuring that is done again and again, with what is known by then.

    Args:
        results: Where they go.
        record: What is known of it from the start.
        advice: What is known of its result.

    Attributes:
        is_stopped: The user stopped it.
        failure: Why nothing could be saved any more; the answer is worth minutes of a GPU and is shown all the same.
    """

    def __init__(self, results: ResultFolder, record: TuneRecord, advice: Advice) -> None:
        self.is_stopped = False
        self.failure: RecordFileError | None = None
        self._results, self._record, self._advice = results, record, advice

    def __call__(self) -> TuneRecord:
        """Saves what is known, and returns the record of it."""
        from vitgraph.records.sample_table import csv_of

        result, samples = self._advice.result, self._advice.samples
        changes = {"result": result, "samples_file": SAMPLES_FILE if samples else None}
        if self.is_stopped or (result.measured is not None and result.measured.is_interrupted):
            changes |= {"status": "interrupted", "status_reason": "stopped by the user while measuring"}
        record = self._record.model_copy(update=changes)
        if self.failure is None:
            try:
                if samples:
                    self._results.write(SAMPLES_FILE, csv_of(samples).encode())
                    self._results.samples_saved = len(samples)
                self._results.save(record)
            except RecordFileError as error:
                self.failure = error
        return record
