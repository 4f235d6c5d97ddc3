"""`vitgraph calibrate`, `tune-budgets` and `recommend`: what replays cost here, which settings suit, and one page."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from vitgraph.commands.shell import Shown, check_run, dry_run, is_on_gpu, shown_record
from vitgraph.measure.progress import Progress
from vitgraph.records.record import TuneRecord
from vitgraph.records.sections import Resolved
from vitgraph.records.store import DEFAULT_ROOT, SAMPLES_FILE, RecordFileError, ResultFolder, check_file, new_folder
from vitgraph.specs.asked import CalibrateSpec, RecommendSpec, TuneSpec
from vitgraph.specs.fields import as_options
from vitgraph.specs.parts import ModelSpec

if TYPE_CHECKING:
    from vitgraph.measure.calls import EncoderCall
    from vitgraph.measure.preparation import PreparedBench
    from vitgraph.models.registry import ModelSource
    from vitgraph.predict.profile import CalibrationProfile
    from vitgraph.records.record import VerifyRecord
    from vitgraph.tuning.advice import Advice
    from vitgraph.tuning.objective import Limits, Objective

CALIBRATION, VERIFICATION = "calibration.json", "verify"
"""Names in the folder of a recommendation; its own record is that of the tuning."""


def calibrate(spec: CalibrateSpec, progress: Progress) -> Shown:
    """Measure what replays, eager calls, slots and copies cost here; tune-budgets reads the result anywhere."""
    from vitgraph.measure.setup import resolve_source
    from vitgraph.predict.doubt import describe_profile
    from vitgraph.report.views.parts import calibrate_document

    model = spec.model
    source = resolve_source(model)
    where = spec.output or DEFAULT_ROOT / f"{new_folder('calibration', model.model).name}.json"
    check_run(model, source, None, overwrite=spec.overwrite)
    check_file(where, spec.overwrite)
    if spec.shell.dry_run:
        return dry_run(spec, f"would calibrate {source.name} and save {where}")
    profile = _measured_profile(model, source, spec.graph.max_call_tokens, spec.time_limit, progress)
    failure = None
    try:
        profile.save(where, overwrite=spec.overwrite)
    except RecordFileError as error:
        # The answer is worth minutes of a GPU: it is shown all the same.
        failure = error
    summary = describe_profile(profile)
    return Shown(
        summary,
        calibrate_document(summary),
        where if failure is None else None,
        kept_as="profile",
        is_interrupted=profile.stopped is not None and failure is None,
        failure=failure,
    )


def _measured_profile(
    model: ModelSpec, source: ModelSource, max_tokens: int, time_limit_s: float, progress: Progress
) -> CalibrationProfile:
    """Loads an encoder and measures its cost profile on its device, of calls of up to `max_tokens` output tokens."""
    from vitgraph.measure.setup import load, resolve_device, resolve_dtype
    from vitgraph.predict.profile import tower_shape
    from vitgraph.tuning.calibration import calibrate as measure

    device = resolve_device(model.device)
    progress.phase("loading the encoder")
    encoder, ran = load(source, model, device=device, dtype=resolve_dtype(model.dtype, device))
    weights = "random" if model.load_format == "dummy" else source.weights
    named = {"name": source.name, "row": source.row.name, "weights": weights, "tower": tower_shape(source)}
    return measure(
        encoder,
        max_tokens=max_tokens,
        model=named,
        ran=ran,
        time_limit_s=time_limit_s,
        seed=model.seed,
        progress=progress,
    )


# -- tune-budgets ------------------------------------------------------------------------------------------------------


def tune_budgets(spec: TuneSpec, progress: Progress) -> Shown:
    """Find the budgets, item and frame limits and packing that suit a workload, or say that eager is better.

    Reads a profile of `vitgraph calibrate` (or of the ones that come with vitgraph); where a GPU is there, the winner
    is then measured beside the automatic list, the documented nine budgets and eager.
    """
    from vitgraph.measure.preparation import prepare_bench
    from vitgraph.report.documents import write_derived

    check_goals(spec)
    bench = spec.bench
    prepared = prepare_bench(bench, runs=spec.verifies and is_on_gpu(bench.model.device))
    profile = _profile_for(spec, prepared)
    folder, overwrite = bench.run.output_dir or new_folder("tune", bench.model.model), bench.run.overwrite
    check_run(bench.model, None, folder, overwrite=overwrite)
    if spec.shell.dry_run:
        return dry_run(spec, f"would tune for {len(prepared.calls)} calls of {prepared.source.name}")
    with ResultFolder(folder, overwrite) as results:
        record = _tune(spec, prepared, profile, results, progress)
        write_derived(folder, progress.note)
    return shown_record(record, folder if results.failure is None else None, results.failure)


def check_goals(spec: TuneSpec) -> tuple[Objective, Limits]:
    """What is minimised, and within which limits; raises UsageError for an objective that is none."""
    from vitgraph.tuning.objective import Limits, Objective

    memory = None if spec.max_graph_memory is None else spec.max_graph_memory * 2**30
    limits = Limits(spec.max_graphs, memory, spec.max_capture_time, spec.max_slower_share)
    return Objective.parse(spec.objective), limits


def _profile_for(spec: TuneSpec, prepared: PreparedBench) -> CalibrationProfile:
    """The calibration that is named, or that of this tower that comes with vitgraph; raises UsageError without one."""
    from vitgraph.predict.profile import find_profile

    model = spec.bench.model
    wanted = {"dtype": model.dtype, "attn_backend": model.attn_backend, "compile": model.compile}
    return find_profile(spec.bench.graph.calibration, prepared.source, wanted)


def _tune(
    spec: TuneSpec, prepared: PreparedBench, profile: CalibrationProfile, results: ResultFolder, progress: Progress
) -> TuneRecord:
    """Searches, and measures the winner where a GPU is there; a stop, and a folder that fails, keep what there is."""
    from vitgraph.measure.preparation import refusal_notes, workload_of
    from vitgraph.records.sample_table import csv_of
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
        doubts=profile.doubts(spec.bench.model),
        host_factor=factor,
        video_limit=spec.bench.graph.video_limit_per_prompt,
        asked=as_options(spec.bench),
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

    def save(is_stopped: bool = False) -> TuneRecord:
        """Saves what is known by now. The answer is worth minutes of a GPU: the folder keeps why it is not saved."""
        measured, samples = advice.result.measured, advice.samples
        changes = {"result": advice.result, "samples_file": SAMPLES_FILE if samples else None}
        if is_stopped or (measured is not None and measured.is_interrupted):
            changes |= {"status": "interrupted", "status_reason": "stopped by the user while measuring"}
        made = record.model_copy(update=changes)
        with suppress(RecordFileError):
            if samples:
                results.write(SAMPLES_FILE, csv_of(samples).encode())
                results.samples_saved = len(samples)
            results.save(made)
        return made

    save()
    if spec.verifies and is_on_gpu(spec.bench.model.device):
        try:
            _measure(spec, prepared, profile, advice, save, progress)
        except KeyboardInterrupt:
            # The prediction is there, and perhaps some of the measurement.
            return save(is_stopped=True)
    elif spec.verifies:
        progress.note("no GPU here: the result is predicted, with the model's error, and not measured")
    return save()


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
    from vitgraph.tuning.judge import Verification

    device = resolve_device(spec.bench.model.device)
    progress.phase("loading the encoder")
    engine = advice.result.vllm.attn_backend if spec.target == VLLM else None
    model = profile.measured_spec(spec.bench.model, unavailable_backends(device), engine)
    encoder, ran = load(prepared.source, model, device=device, dtype=resolve_dtype(model.dtype, device))
    for difference in profile.differences(snapshot(device).but(encoder=ran)):
        progress.note(difference)
        advice.note(difference)
    verification = Verification(
        encoder, advice.calls, advice, seed=model.seed, time_limit_s=spec.time_limit, progress=progress
    )
    verification.run(spec.verify_calls, checkpoint=save)


# -- recommend ---------------------------------------------------------------------------------------------------------


def recommend(spec: RecommendSpec, progress: Progress) -> Shown:
    """Say whether this traffic should use encoder graphs, what to paste into vLLM, what it gains, and how sure that is.

    On a GPU: calibrates (or takes --calibration), tunes on a part of the calls, measures on the others, and compares
    replay with eager. Without one: predicts from a profile that comes with vitgraph, and says that nothing was
    measured.
    """
    from vitgraph.measure.preparation import prepare_bench
    from vitgraph.report.documents import write, write_derived
    from vitgraph.report.views.tune import recommend_document, recommendation
    from vitgraph.verify.models import failure_of

    check_goals(spec.tune)
    bench = spec.tune.bench
    measures = is_on_gpu(bench.model.device)
    prepared = prepare_bench(bench, runs=measures)
    calibrates = measures and bench.graph.calibration is None
    profile = None if calibrates else _profile_for(spec.tune, prepared)
    folder, overwrite = bench.run.output_dir or new_folder("recommend", bench.model.model), bench.run.overwrite
    check_run(bench.model, prepared.source if measures else None, folder, overwrite=overwrite)
    if spec.shell.dry_run:
        does = "calibrate, tune, measure" if calibrates else "tune, measure" if measures else "tune and predict"
        return dry_run(spec, f"would {does} for {len(prepared.calls)} calls of {prepared.source.name}")
    with ResultFolder(folder, overwrite) as results:
        if profile is None:
            limit = spec.calibration_time_limit
            profile = _measured_profile(bench.model, prepared.source, bench.graph.max_call_tokens, limit, progress)
            profile.save(folder / CALIBRATION, overwrite=overwrite)
        record, verified = _tune(spec.tune, prepared, profile, results, progress), None
        if measures and record.status == "complete" and results.failure is None:
            verified = _verify(spec, prepared, profile, record, results, progress)
        document = recommend_document(record, verified, is_shipped=bench.graph.calibration is None and not calibrates)
        if results.failure is None:
            write_derived(folder, progress.note)
            write(document, folder, ("markdown", "html"), stem="recommendation", overwrite=True)
    data = {
        "recommendation": recommendation(record, verified),
        "tune": record.model_dump(mode="json"),
        "verify": None if verified is None else verified.model_dump(mode="json"),
    }
    is_stopped = "interrupted" in {one.status for one in (record, verified) if one is not None}
    saved = folder if results.failure is None else None
    fault = failure_of(verified) if verified is not None else None
    return Shown(data, document, saved, is_interrupted=is_stopped, failure=results.failure or fault)


def _verify(
    spec: RecommendSpec,
    prepared: PreparedBench,
    profile: CalibrationProfile,
    record: TuneRecord,
    results: ResultFolder,
    progress: Progress,
) -> VerifyRecord:
    """Compares replay with eager for the graphs that were tuned, on random calls."""
    from vitgraph.attention.registry import unavailable_backends
    from vitgraph.measure.setup import resolve_device
    from vitgraph.verify.models import prepare_verification, run_verification

    best = record.result.best.settings
    budgets = best.token_budgets if isinstance(best.token_budgets, tuple) else None
    missing = unavailable_backends(resolve_device(spec.tune.bench.model.device))
    model = profile.measured_spec(spec.tune.bench.model, missing, record.result.vllm.attn_backend)
    verification = prepare_verification(
        (prepared.source.name,),
        model,
        calls=spec.check_calls,
        token_budgets=budgets or None,
        max_items=best.max_vision_items_per_batch or None,
    )
    with ResultFolder(results.path / VERIFICATION, results.overwrite) as folder:
        settings = {"verify": spec.as_dict()}
        verified = run_verification(verification, progress, folder=folder, settings=settings)
        if folder.failure is not None:
            progress.note(str(folder.failure))
        return verified  # type: ignore[return-value]
