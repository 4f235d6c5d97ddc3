"""`vitgraph recommend`: calibrates, tunes, measures and verifies for given traffic, and prints one page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitgraph.commands.calibrate import measured_profile
from vitgraph.commands.shell import Shown, check_run, dry_run, is_on_gpu
from vitgraph.commands.tune_budgets import check_goals, profile_for, tune
from vitgraph.measure.progress import Progress
from vitgraph.records.store import ResultFolder, new_folder
from vitgraph.specs import RecommendSpec

if TYPE_CHECKING:
    from vitgraph.measure.preparation import PreparedBench
    from vitgraph.predict.profile import CalibrationProfile
    from vitgraph.records.record import TuneRecord, VerifyRecord

CALIBRATION, VERIFICATION = "calibration.json", "verify"
"""Names in the result's folder; its own record is that of the tuning."""


def recommend(spec: RecommendSpec, progress: Progress) -> Shown:
    """Say whether this traffic should use encoder graphs, what to paste into vLLM, what it gains, and how sure that is.

    On a GPU: calibrates (or takes --calibration), tunes on a part of the calls, measures on the others, and compares
    replay with eager. Without one: predicts from a profile that comes with vitgraph, and says that nothing was
    measured.
    """
    from vitgraph.measure.preparation import prepare_bench
    from vitgraph.report.documents import write_derived
    from vitgraph.report.to_files import write
    from vitgraph.report.views.tune import recommend_document, recommendation
    from vitgraph.verify.models import failure_of

    check_goals(spec.tune)
    bench = spec.tune.bench
    prepared, measures = prepare_bench(bench), is_on_gpu(bench.model.device)
    calibrates = measures and bench.graph.calibration is None
    profile = None if calibrates else profile_for(spec.tune, prepared)
    folder, overwrite = bench.run.output_dir or new_folder("recommend", bench.model.model), bench.run.overwrite
    check_run(bench.model, prepared.source if measures else None, folder, overwrite=overwrite)
    if spec.shell.dry_run:
        does = "calibrate, tune, measure" if calibrates else "tune, measure" if measures else "tune and predict"
        return dry_run(spec, f"would {does} for {len(prepared.calls)} calls of {prepared.source.name}")
    with ResultFolder(folder, overwrite) as results:
        if profile is None:
            limit = spec.calibration_time_limit
            profile = measured_profile(bench.model, prepared.source, bench.graph.max_call_tokens, limit, progress)
            profile.save(folder / CALIBRATION, overwrite=overwrite)
        record, failure = tune(spec.tune, prepared, profile, results, progress)
        verified = None
        if measures and record.status == "complete" and failure is None:
            verified = _verify(spec, prepared, profile, record, results, progress)
        document = recommend_document(record, verified, is_shipped=bench.graph.calibration is None and not calibrates)
        if failure is None:
            write_derived(folder, progress.note)
            write(document, folder, ("markdown", "html"), stem="recommendation", overwrite=True)
    data = {
        "recommendation": recommendation(record, verified),
        "tune": record.model_dump(mode="json"),
        "verify": None if verified is None else verified.model_dump(mode="json"),
    }
    is_stopped = "interrupted" in {one.status for one in (record, verified) if one is not None}
    saved = folder if failure is None else None
    fault = failure_of(verified) if verified is not None else None
    return Shown(data, document, saved, is_interrupted=is_stopped, failure=failure or fault)


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
