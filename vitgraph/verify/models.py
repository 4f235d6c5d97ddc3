"""`verify` from a model's name on: what is asked for, each encoder built, verified and freed, and the record."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from vitgraph.errors import (
    HubUnreachableError,
    IncorrectOutputError,
    NothingReplayedError,
    RankFailedError,
    VitgraphError,
)
from vitgraph.measure.environment import snapshot
from vitgraph.measure.progress import Progress
from vitgraph.measure.setup import check_model, load, resolve_device, resolve_dtype, resolve_source
from vitgraph.models.registry import ModelRow, ModelSource, resolve_model
from vitgraph.records.record import Record, Status, VerifyRecord
from vitgraph.records.results import VerifiedModel, VerifyResult
from vitgraph.records.store import Draft, RecordFileError, ResultFolder
from vitgraph.specs.parts import ModelSpec
from vitgraph.verify.run import describe_error, effort_on, merge_ranks, plan_verification, verify_row
from vitgraph.verify.session import ERROR, FAILED, OK

if TYPE_CHECKING:
    from vitgraph.ranks.group import ParallelGroup


@dataclass(frozen=True, slots=True)
class PreparedVerification:
    """What will be verified, resolved and refused where that can be told before a device is touched.

    Attributes:
        targets: By preset, the model; or the result of one that does not resolve.
        model: How each encoder runs.
        settings: The other settings of `verify_row`.
        debug_size: The models are the small presets.
    """

    targets: Mapping[str, ModelSource | VerifiedModel]
    model: ModelSpec
    settings: Mapping[str, Any] = field(default_factory=dict)
    debug_size: bool = False


def prepare_verification(names: Sequence[str], model: ModelSpec, **settings: Any) -> PreparedVerification:
    """Resolves the models that are asked for.

    Args:
        names: Presets, hub ids or folders.
        model: How each encoder runs; its own name is not used.
        settings: The other settings of `verify_row`.

    Raises:
        VitgraphError: A model, device, dtype, backend or budget that cannot be used.
    """
    sources = {name: resolve_source(replace(model, model=name)) for name in names}
    effort = effort_on(resolve_device(model.device))
    plan_settings = {name: settings.get(name) for name in ("token_budgets", "max_items")}
    for source in sources.values():
        check_model(source, model)
        plan_verification(source.rule(), effort, **plan_settings)
    return PreparedVerification(sources, model, settings)


def prepare_rows(
    rows: Iterable[ModelRow], model: ModelSpec, *, debug_size: bool, **settings: Any
) -> PreparedVerification:
    """Resolves the model of each row of the compatibility matrix, as `prepare_verification`; one that does not resolve
    is a result of its own. `debug_size` takes the small presets instead of the full-size ones."""
    targets: dict[str, ModelSource | VerifiedModel] = {}
    for row in rows:
        preset = row.debug_preset if debug_size else row.full_preset
        try:
            targets[preset] = resolve_model(preset)
        except Exception as error:
            targets[preset] = VerifiedModel(
                architecture=row.architectures[0],
                row=row.name,
                preset=preset,
                status=ERROR,
                error=describe_error(error),
            )
    resolve_dtype(model.dtype, resolve_device(model.device))
    return PreparedVerification(targets, model, settings, debug_size)


def run_verification(
    prepared: PreparedVerification,
    progress: Progress,
    *,
    folder: ResultFolder | None = None,
    group: ParallelGroup | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Record:
    """Verifies one model after the other; the record is saved after each, and is returned where the user stops it.

    Args:
        folder: Where the record goes; None saves none.
        group: Ranks that verify the same models; each returns the same record.
        settings: The command's options, for the record.

    Raises:
        RankFailedError: Another rank failed.
    """
    device = resolve_device(prepared.model.device) if group is None else group.device
    draft = Draft(VerifyRecord(settings=dict(settings or {}), environment=snapshot(device), result=VerifyResult()))
    models: list[VerifiedModel] = []
    total = len(prepared.targets)

    def record(status: Status, reason: str | None = None) -> Record:
        draft.note_result(models=models)
        draft.end(status, reason)
        if folder is not None:
            with suppress(RecordFileError):
                # What is verified is worth showing all the same; the folder keeps why it is not saved.
                folder.save(draft.record)
        return draft.record

    progress.phase("verifying", total)
    try:
        made = record("error", "the run ended before it verified anything")
        for done, result in enumerate(_results(prepared, device, group), start=1):
            if group is not None:
                everyone = group.exchange(result.model_dump(mode="json"), f"the result of {result.preset}", slow=True)
                result = merge_ranks([VerifiedModel.model_validate(one) for one in everyone])
            models.append(result)
            made = (
                record("complete")
                if done == total
                else record("error", f"the run ended after {done} of {total} models")
            )
            progress.step()
    except KeyboardInterrupt as stop:
        failure = group.failure_behind_stop() if group is not None else None
        if failure is not None:
            record("error", str(failure))
            raise failure from stop
        return record("interrupted", f"stopped by the user after {len(models)} of {total} models")
    return made


def failure_of(record: Record) -> VitgraphError | None:
    """What a finished verification must not exit with 0 for."""
    models = record.result.models
    faults = [model for model in models if model.status != OK]
    named = "; ".join(f"{model.row}: {model.status}" for model in faults)
    text = f"{len(faults)} of {len(models)} rows are not ok ({named})"
    if not any(model.status == FAILED and model.replays for model in faults) and any(not m.replays for m in models):
        unused = ", ".join(str(model.preset) for model in models if not model.replays)
        return NothingReplayedError(f"not one graph was replayed of {unused}{f'; {text}' if faults else ''}")
    return IncorrectOutputError(text) if faults else None


def _results(
    prepared: PreparedVerification, device: torch.device, group: ParallelGroup | None
) -> Iterator[VerifiedModel]:
    threads = torch.get_num_threads()
    for target in prepared.targets.values():
        if isinstance(target, VerifiedModel):
            yield target
            continue
        if device.type == "cpu" and prepared.debug_size:
            # Small towers gain little from more, and these wait for each other where cores are busy.
            torch.set_num_threads(1)
        try:
            yield verify_model(target, prepared.model, device, group=group, **prepared.settings)
        finally:
            torch.set_num_threads(threads)


def verify_model(source: ModelSource, spec: ModelSpec, device: torch.device, **settings: Any) -> VerifiedModel:
    """Builds the encoder of a resolved model, verifies it and frees it; a result also where it could not be built.

    `spec` says how the encoder runs, its own name is not used; `settings` are the other ones of `verify_row`.
    """
    dtype = resolve_dtype(spec.dtype, device)
    try:
        # Compiled before anything is counted: the compiler keeps memory of its own.
        encoder, facts = load(source, spec, device=device, dtype=dtype)
        compiled = facts.compiled.blocks if facts.compiled is not None else 0
        result = verify_row(encoder, seed=spec.seed, **settings).model_copy(update={"compiled_blocks": compiled})
        # Its reference cycles hold device memory until they are collected.
        del encoder
    except (RankFailedError, HubUnreachableError):
        raise
    except Exception as error:
        # As in `verify_row`: the reason goes into the result.
        result = VerifiedModel(
            architecture=source.architecture,
            device=str(device),
            dtype=str(dtype).removeprefix("torch."),
            status=ERROR,
            seed=spec.seed,
            error=describe_error(error),
        )
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
    named = {"architecture": source.architecture, "row": source.row.name, "preset": source.name}
    return result.model_copy(update={**named, "backend_requested": spec.attn_backend})
