"""`vitgraph bench`, `compare-backends`, `plan`, `profile` and `verify`: what to run, where, and what to show of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitgraph.commands.options import NOT_IN_FILES, command_of_options
from vitgraph.commands.shell import Shown, check_run, dry_run, is_on_gpu, shown_record, tell
from vitgraph.errors import InputError, SlowerError, UsageError, VitgraphError
from vitgraph.measure.progress import Progress
from vitgraph.records.record import Record
from vitgraph.records.store import RecordFileError, ResultFolder, new_folder
from vitgraph.specs.asked import BenchSpec, CompareSpec, PlanSpec, ProfileSpec, VerifySpec
from vitgraph.specs.fields import as_options

if TYPE_CHECKING:
    from rich.console import Console

    from vitgraph.measure.preparation import PreparedBench
    from vitgraph.planning.budgets import EncoderItemSpec
    from vitgraph.report.document import Document
    from vitgraph.verify.models import PreparedVerification

GPU_CALL = {"model": "qwen3-vl-30b-a3b", "items": "1024x768"}
CPU_CALL = {"model": "qwen3-vl-debug", "items": "336x336"}


def bench(spec: BenchSpec, progress: Progress) -> Shown | None:
    """Measure the encoder in graph and eager mode on a workload, and say which is faster.

    Without --model, a first look: the Qwen3-VL-30B-A3B tower with random weights on a GPU, a small one on a CPU, and
    the shipped trace of real image sizes.
    """
    from vitgraph.commands.on_ranks import measured, on_rank, ran_on_ranks
    from vitgraph.measure.bench import run_bench
    from vitgraph.measure.compare import run_compile_rows
    from vitgraph.measure.preparation import prepare_bench
    from vitgraph.records.candidates import failure as failure_of

    folder = spec.run.output_dir or new_folder("compile-rows" if spec.compile_rows else "bench", spec.model.model)
    if ran_on_ranks(spec, folder, progress):
        return None
    asked = replace(spec, model=replace(spec.model, compile=False)) if spec.compile_rows else spec
    prepared = prepare_bench(asked)

    def measure() -> Record | None:
        if spec.compile_rows:
            return run_compile_rows(prepared, folder, progress)
        return on_rank(asked, folder, lambda group: run_bench(prepared, folder, progress, group))

    def failure(record: Record, document: Document) -> VitgraphError | None:
        verdict = document.verdict
        if spec.compile_rows:
            return failure_of(record.result)
        if spec.run.fail_on_slower and verdict is not None and verdict.word == "slower":
            return SlowerError(f"graphs are slower than eager here: {verdict.reason}")
        return None

    return measured(prepared, folder, progress, prepared.describe, measure, failure)


# -- compare-backends --------------------------------------------------------------------------------------------------


def compare_backends(spec: CompareSpec, progress: Progress) -> Shown | None:
    """Compare attention backends in graph and eager mode on one workload, and say which to use and how sure that is.

    Every backend's outputs are checked against the same tower in float32 before anything is timed. A backend that is
    missing, fails or is wrong keeps its row with the reason.
    """
    from vitgraph.commands.on_ranks import measured, on_rank, ran_on_ranks
    from vitgraph.measure.compare import Comparison, choose_backends, prepare_compare, run_isolated
    from vitgraph.measure.micro import MICRO_KIND, micro_failure, run_micro_comparison
    from vitgraph.ranks.launch import is_rank
    from vitgraph.records.candidates import COMPARE_KIND as KIND
    from vitgraph.records.candidates import failure as failure_of
    from vitgraph.report.documents import write_derived

    if spec.isolate and is_rank():
        raise UsageError("--isolate starts processes of its own; run it without torchrun, or leave it out")
    spec = replace(spec, backends=choose_backends(spec.backends))
    bench = spec.bench
    folder = bench.run.output_dir or new_folder(MICRO_KIND if spec.micro else KIND, bench.model.model)
    if spec.micro:
        record = run_micro_comparison(spec, folder, progress)
        write_derived(folder, progress.note)
        return shown_record(record, folder, micro_failure(record))
    if ran_on_ranks(bench, folder, progress, launches=not spec.isolate):
        return None
    prepared = prepare_compare(spec)

    def measure() -> Record | None:
        if spec.isolate:
            return run_isolated(prepared, folder, progress, lambda name, part: _part_command(name, part, spec))
        return on_rank(bench, folder, lambda group: Comparison.of(prepared, progress, group).record(folder))

    return measured(
        prepared.bench, folder, progress, prepared.describe, measure, lambda record, _: failure_of(record.result)
    )


def _part_command(backend: str, part: Path, spec: CompareSpec) -> Sequence[str]:
    """The command line that measures one backend alone."""
    run = replace(spec.bench.run, output_dir=part, overwrite=True)
    shell = replace(spec.shell, config=None, quiet=True, json=True, debug=False)
    alone = replace(spec, bench=replace(spec.bench, run=run, shell=shell), backends=(backend,), isolate=False)
    options = {key: value for key, value in as_options(alone).items() if key not in NOT_IN_FILES}
    return command_of_options("compare-backends", options, part)


# -- profile -----------------------------------------------------------------------------------------------------------


def profiled_call(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is profiled where nothing is named, on this machine's device."""
    call = GPU_CALL if is_on_gpu(given.get("device", "auto")) else CPU_CALL
    is_drawn = "random_mm_bucket_config" in given
    return {name: value for name, value in call.items() if name != "items" or not is_drawn}


def profile(spec: ProfileSpec, progress: Progress) -> Shown:
    """Show where the GPU time of one call goes, eagerly and in replay: attention, products, norms, copies, gaps.

    The call is given by --items, or drawn by the random-mm options. Without --token-budgets its graphs are of exactly
    its size. On a CPU the operators of the forward are shown instead of kernels.
    """
    from vitgraph.measure.profile_call import prepare_profile, run_profile
    from vitgraph.report.documents import write_derived

    prepared = prepare_profile(spec)
    folder = spec.output_dir or new_folder("profile", spec.model.model)
    check_run(spec.model, prepared.source, folder, overwrite=spec.overwrite)
    if spec.shell.dry_run:
        return dry_run(spec, f"would profile {len(prepared.call.items)} item(s) of {prepared.source.name}")
    record = run_profile(prepared, folder, progress)
    write_derived(folder, progress.note)
    return shown_record(record, folder)


# -- verify ------------------------------------------------------------------------------------------------------------


def verify(spec: VerifySpec, progress: Progress) -> Shown | None:
    """Prove that replay equals eager: every graph, random packings, poisoned memory, order, aliasing, clean-up."""
    from vitgraph.commands.on_ranks import joined, ran_on_ranks
    from vitgraph.ranks.launch import is_follower
    from vitgraph.verify.models import failure_of, run_verification

    if ran_on_ranks(spec, spec.output_dir, progress):
        return None
    prepared = _verification(spec)
    check_run(spec.model, None, spec.output_dir, overwrite=spec.overwrite)
    if spec.shell.dry_run:
        return dry_run(spec, f"would verify {'every row' if spec.every_row else ', '.join(spec.models)}")
    unsaved: RecordFileError | None = None
    with ExitStack() as stack:
        folder = None
        if spec.output_dir is not None and not is_follower():
            folder = stack.enter_context(ResultFolder(spec.output_dir, spec.overwrite))
        group = stack.enter_context(joined(spec.parallel, spec.model.device))
        record = run_verification(prepared, progress, folder=folder, group=group, settings={"verify": spec.as_dict()})
        unsaved = folder.failure if folder is not None else None
    # Of several ranks the first shows the record of all.
    return (
        None
        if is_follower()
        else shown_record(record, None if unsaved else spec.output_dir, unsaved or failure_of(record))
    )


def _verification(spec: VerifySpec) -> PreparedVerification:
    from vitgraph.models.loading import check_weights
    from vitgraph.models.registry import ROWS, ModelSource
    from vitgraph.verify.models import prepare_rows, prepare_verification

    settings = {
        "calls": spec.calls,
        "token_budgets": spec.graph.token_budgets or None,
        "max_items": spec.graph.max_vision_items_per_batch or None,
    }
    if spec.every_row:
        return prepare_rows(ROWS, spec.model, debug_size=spec.debug_size, **settings)
    prepared = prepare_verification(spec.models, spec.model, **settings)
    for target in prepared.targets.values():
        if isinstance(target, ModelSource):
            check_weights(target, spec.model.load_format)
    return prepared


def plan(spec: PlanSpec) -> Shown:
    """Show which items would go into which replay, with hits, misses and waste; needs no GPU.

    On several GPUs (--tensor-parallel-size), also which rank would get which items, and what sharing by cost changes.
    """
    from vitgraph.measure.preparation import workload_of
    from vitgraph.report.views.plan import explanation_document

    prepared = _prepare(spec)
    if spec.bench.parallel.ranks > 1:
        return _plan_ranks(spec, prepared)
    requests = [len(call.requests) for call in prepared.calls]
    data = _explain(spec, prepared, [call.specs for call in prepared.calls], requests)
    data["warnings"], data["workload"] = prepared.warnings, workload_of(prepared).model_dump(mode="json")
    for text in prepared.warnings if not spec.shell.json else ():
        tell(f"note: {text}")
    return Shown(data, explanation_document(data))


def _prepare(spec: PlanSpec) -> PreparedBench:
    """The workload, or the one call of `--items`, prepared as `bench` would."""
    from vitgraph.measure.preparation import prepare_bench
    from vitgraph.workloads.base import MediaItem, Workload, number_requests

    if not spec.items:
        return prepare_bench(spec.bench)
    items = tuple(MediaItem(*size) for size in spec.items)
    prepared = prepare_bench(spec.bench, Workload("items", number_requests([items])))
    if prepared.skipped:
        raise InputError(f"{prepared.source.name} does not take every item of the call: {prepared.skipped[0].reason}")
    return prepared


def _explain(
    spec: PlanSpec, prepared: PreparedBench, calls: Sequence[Sequence[EncoderItemSpec]], requests: Sequence[int] | None
) -> dict[str, Any]:
    from vitgraph.predict.targets import packing_cost
    from vitgraph.tuning.explain import explain_plan, explain_workload

    policy, cost = spec.bench.graph.packing, prepared.cost
    if cost is None and spec.bench.parallel.ranks > 1 and spec.bench.parallel.assignment == "cost":
        # What the items are shared by predicts each rank's replays too.
        cost = packing_cost(None, prepared.source)
    if spec.items:
        return explain_plan(calls[0], prepared.plan, policy, cost)
    return explain_workload(calls, prepared.plan, policy, cost, requests)


def _plan_ranks(spec: PlanSpec, prepared: PreparedBench) -> Shown:
    """What each rank would do with its share."""
    assert prepared.assign is not None, "several ranks have an assigner"
    ranks = spec.bench.parallel.ranks
    calls = [call.specs for call in prepared.calls]
    shared = [prepared.assign(specs, ranks) for specs in calls]
    explained: list[dict[str, Any]] = []
    for rank in range(ranks):
        parts = [tuple(specs[index] for index in shares[rank]) for specs, shares in zip(calls, shared, strict=True)]
        parts = [part for part in parts if part]
        found = _explain(spec, prepared, parts, None) if parts else None
        own = list(shared[0][rank]) if spec.items else None
        if found is not None and own is not None:
            # Items are numbered as in the call, not as in the share.
            for item in found["items"]:
                item["index"] = own[item["index"]]
            for batch in found["batches"]:
                batch["items"] = [own[index] for index in batch["items"]]
        explained.append({"rank": rank, "items": own, "explanation": found})
    data = {"sharing": prepared.sharing, "ranks": explained}

    def show_all(console: Console) -> None:
        from vitgraph.report.to_terminal import render
        from vitgraph.report.views.plan import ranks_documents

        for document in ranks_documents(data):
            render(document, console)
            console.print()

    return Shown(data, show_all)
