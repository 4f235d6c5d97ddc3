"""`vitgraph calibrate`: measures a cost profile of an encoder on this device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitgraph.commands.shell import Shown, check_run, dry_run
from vitgraph.measure.progress import Progress
from vitgraph.records.store import DEFAULT_ROOT, RecordFileError, check_file, new_folder
from vitgraph.specs import CalibrateSpec, ModelSpec

if TYPE_CHECKING:
    from vitgraph.models.registry import ModelSource
    from vitgraph.predict.profile import CalibrationProfile


def calibrate(spec: CalibrateSpec, progress: Progress) -> Shown:
    """Measure what replays, eager calls, slots and copies cost here; tune-budgets reads the result anywhere."""
    from vitgraph.measure.setup import resolve_source
    from vitgraph.predict.profile_summary import describe_profile
    from vitgraph.report.views.parts import calibrate_document

    model = spec.model
    source = resolve_source(model)
    where = spec.output or DEFAULT_ROOT / f"{new_folder('calibration', model.model).name}.json"
    check_run(model, source, None, overwrite=spec.overwrite)
    check_file(where, spec.overwrite)
    if spec.shell.dry_run:
        return dry_run(spec, f"would calibrate {source.name} and save {where}")
    profile = measured_profile(model, source, spec.graph.max_call_tokens, spec.time_limit, progress)
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


def measured_profile(
    model: ModelSpec, source: ModelSource, max_tokens: int, time_limit_s: float, progress: Progress
) -> CalibrationProfile:
    """Loads an encoder and measures its cost profile on its device.

    Args:
        model: How it runs.
        source: The model.
        max_tokens: Most output tokens of a call.
        time_limit_s: Seconds after which no new measurement begins.
        progress: Told of every step.
    """
    from vitgraph.measure.setup import load, resolve_device, resolve_dtype
    from vitgraph.predict.find_profile import tower_shape
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
