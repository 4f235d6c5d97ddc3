"""`vitgraph calibrate`, `tune-budgets` and `plan`: measure a cost profile, tune with it, explain a packing."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitgraph.commands import options as opt

if TYPE_CHECKING:
    from vitgraph.measure.bench import PreparedBench
    from vitgraph.predict.profile import CalibrationProfile
    from vitgraph.specs import BenchSpec

TUNE_FILE = "run.json"

Objective = Annotated[
    str, typer.Option(help="mean, p99, throughput, or a weighted mix: mean=0.7,p99=0.3.", rich_help_panel=opt.GRAPHS)
]
MaxGraphs = Annotated[int | None, typer.Option(help="Graphs to capture at most.", rich_help_panel=opt.GRAPHS)]
MaxMemory = Annotated[
    float | None,
    typer.Option("--max-graph-memory", help="GiB of pool and buffers at most.", rich_help_panel=opt.GRAPHS),
]
MaxCapture = Annotated[
    float | None, typer.Option("--max-capture-time", help="Seconds of capturing at most.", rich_help_panel=opt.GRAPHS)
]
Target = Annotated[
    str, typer.Option(help="Whose manager runs the settings: vitgraph or vllm.", rich_help_panel=opt.GRAPHS)
]
TimeLimit = Annotated[float, typer.Option(help="Seconds after which no new measurement begins.")]
Items = Annotated[
    str | None,
    typer.Option(help="One call instead of a workload: WIDTHxHEIGHT or WIDTHxHEIGHTxFRAMES, with commas between."),
]


def calibrate(
    model: opt.Model = None,
    output: Annotated[Path | None, typer.Option(help="File of the profile; unset: under runs/.")] = None,
    load_format: opt.LoadFormat = "auto",
    dtype: opt.Dtype = "auto",
    device: opt.Device = "auto",
    mm_encoder_attn_backend: opt.AttnBackend = "auto",
    flash_attn_version: opt.FlashAttnVersion = None,
    mm_processor_kwargs: opt.MmProcessorKwargs = None,
    compile_blocks: opt.CompileBlocks = False,
    max_model_len: opt.MaxModelLen = 32768,
    max_num_batched_tokens: opt.MaxBatchedTokens = 16384,
    time_limit: TimeLimit = 90.0,
    revision: opt.Revision = None,
    seed: opt.Seed = 0,
    overwrite: opt.Overwrite = False,
    json_output: opt.JsonOutput = False,
    quiet: opt.Quiet = False,
) -> None:
    """Measure what replays, eager calls, slots and copies cost here; tune-budgets reads the result anywhere."""
    from vitgraph.cli import reported_errors

    with reported_errors():
        from rich.console import Console

        from vitgraph.commands.spec_values import (
            first_look,
            graph_spec,
            model_spec,
            new_run_folder,
            with_bench_defaults,
        )
        from vitgraph.measure.setup import load, resolve_device, resolve_dtype, resolve_source
        from vitgraph.predict.profile_summary import describe_profile
        from vitgraph.records.store import check_file
        from vitgraph.report.progress import ConsoleProgress
        from vitgraph.report.tune_tables import render_profile
        from vitgraph.tuning.calibration import calibrate as measure

        options = with_bench_defaults(dict(locals()))
        options = options if model else first_look(options)
        spec = model_spec(options)
        source = resolve_source(spec)
        where = output or new_run_folder("calibration", spec.model).with_suffix(".json")
        check_file(where, overwrite)
        on_device = resolve_device(spec.device)
        with ConsoleProgress(enabled=not quiet) as progress:
            progress.phase("loading the encoder")
            encoder, facts = load(source, spec, device=on_device, dtype=resolve_dtype(spec.dtype, on_device))
            weights = "random" if spec.load_format == "dummy" else source.weights
            profile = measure(
                encoder,
                max_tokens=graph_spec(options).max_call_tokens,
                model={"name": source.name, "row": source.row.name, "weights": weights, **facts},
                time_limit_s=time_limit,
                seed=seed,
                progress=progress,
            )
        profile.save(where, overwrite=overwrite)
        summary = describe_profile(profile)
        if json_output:
            _print(summary)
        else:
            render_profile(summary, Console())
            typer.echo(f"profile: {where}")


def tune_budgets(
    model: opt.Model = None,
    calibration: opt.Calibration = None,
    objective: Objective = "mean",
    max_graphs: MaxGraphs = None,
    max_graph_memory: MaxMemory = None,
    max_capture_time: MaxCapture = None,
    target: Target = "vitgraph",
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Predict only; measure nothing.")] = False,
    verify_calls: Annotated[int, typer.Option(help="Calls to measure every strategy with.")] = 100,
    time_limit: TimeLimit = 240.0,
    dataset_name: opt.DatasetName = "trace",
    dataset_path: opt.DatasetPath = None,
    num_prompts: opt.NumPrompts = None,
    requests_per_call: opt.RequestsPerCall = 1,
    random_mm_base_items_per_request: opt.BaseItems = 1,
    random_mm_num_mm_items_range_ratio: opt.RangeRatio = 0.0,
    random_mm_limit_mm_per_prompt: opt.LimitMm = None,
    random_mm_bucket_config: opt.BucketConfig = None,
    max_pixels_per_item: opt.MaxPixels = None,
    video_fps: opt.VideoFps = None,
    load_format: opt.LoadFormat = "auto",
    dtype: opt.Dtype = "auto",
    device: opt.Device = "auto",
    mm_encoder_attn_backend: opt.AttnBackend = "auto",
    flash_attn_version: opt.FlashAttnVersion = None,
    mm_processor_kwargs: opt.MmProcessorKwargs = None,
    max_model_len: opt.MaxModelLen = 32768,
    max_num_batched_tokens: opt.MaxBatchedTokens = 16384,
    revision: opt.Revision = None,
    seed: opt.Seed = 0,
    output_dir: opt.OutputDir = None,
    overwrite: opt.Overwrite = False,
    json_output: opt.JsonOutput = False,
    quiet: opt.Quiet = False,
) -> None:
    """Find the budgets, item and frame limits and packing that suit a workload, or say that eager is better.

    Reads a profile of `vitgraph calibrate` (or of the ones that come with vitgraph); where a GPU is there, the winner
    is then measured beside the automatic list, the documented nine budgets and eager.
    """
    from vitgraph.cli import reported_errors

    with reported_errors():
        from rich.console import Console

        from vitgraph.commands.spec_values import bench_spec, new_run_folder, with_bench_defaults
        from vitgraph.errors import UsageError
        from vitgraph.predict.find_profile import find_profile
        from vitgraph.report.progress import ConsoleProgress
        from vitgraph.report.tune_plots import write_tune_plots
        from vitgraph.report.tune_tables import render_tune, write_tune_csv
        from vitgraph.tuning import objective as goals
        from vitgraph.tuning.tune import tune_budgets as search

        if model is None:
            raise UsageError("no model given; pass --model PRESET, hub id or folder (`vitgraph models` lists them)")
        options = with_bench_defaults(dict(locals()))
        prepared = _prepare_workload(options)
        profile = find_profile(calibration, prepared.source.name)
        memory = None if max_graph_memory is None else max_graph_memory * 2**30
        limits = goals.Limits(max_graphs, memory, max_capture_time)
        folder = output_dir or new_run_folder("tune", model)
        with ConsoleProgress(enabled=not quiet) as progress:
            result = search(
                prepared.calls,
                prepared.source,
                profile,
                max_call_tokens=prepared.spec.graph.max_call_tokens,
                objective=goals.Objective.parse(objective),
                limits=limits,
                target=target,
                workload=prepared.describe_workload(),
            )
            result.data["command"] = ["vitgraph", *sys.argv[1:]]
            save_tuning(folder, result.data, overwrite)
            if not no_verify and not _has_no_gpu(device):
                save = partial(save_tuning, folder, result.data, overwrite=True)
                _measure(bench_spec(options), prepared, profile, result, verify_calls, time_limit, save, progress)
            elif not no_verify:
                progress.note("no GPU here: the result is predicted, with the model's error, and not measured")
        data = result.as_dict()
        save_tuning(folder, data, overwrite=True)
        write_tune_csv(data, folder, overwrite=True)
        write_tune_plots(data, folder / "plots", overwrite=True)
        if json_output:
            _print(data)
        else:
            render_tune(data, Console())
            typer.echo(f"record: {folder}")
        if data["measured"] and data["measured"]["is_interrupted"]:
            raise KeyboardInterrupt


def plan(
    model: opt.Model = None,
    items: Items = None,
    calibration: opt.Calibration = None,
    dataset_name: opt.DatasetName = "trace",
    dataset_path: opt.DatasetPath = None,
    num_prompts: opt.NumPrompts = None,
    requests_per_call: opt.RequestsPerCall = 1,
    random_mm_base_items_per_request: opt.BaseItems = 1,
    random_mm_num_mm_items_range_ratio: opt.RangeRatio = 0.0,
    random_mm_limit_mm_per_prompt: opt.LimitMm = None,
    random_mm_bucket_config: opt.BucketConfig = None,
    video_fps: opt.VideoFps = None,
    mm_processor_kwargs: opt.MmProcessorKwargs = None,
    compilation_config: opt.CompilationConfig = None,
    token_budgets: opt.TokenBudgets = None,
    max_vision_items_per_batch: opt.MaxItems = None,
    max_frames_per_batch: opt.MaxFrames = None,
    packing: opt.Packing = "greedy",
    max_model_len: opt.MaxModelLen = 32768,
    max_num_batched_tokens: opt.MaxBatchedTokens = 16384,
    single_slot_tier: opt.SingleSlotTier = False,
    tensor_parallel_size: opt.TensorParallelSize = 1,
    mm_encoder_tp_mode: opt.TpMode = "weights",
    dp_assignment: opt.DpAssignment = "size",
    revision: opt.Revision = None,
    seed: opt.Seed = 0,
    json_output: opt.JsonOutput = False,
) -> None:
    """Show which items would go into which replay, with hits, misses and waste; needs no GPU.

    On several GPUs (--tensor-parallel-size), also which rank would get which items, and what sharing by cost changes.
    """
    from vitgraph.cli import reported_errors

    with reported_errors():
        from rich.console import Console

        from vitgraph.commands.spec_values import graph_spec, model_spec, with_bench_defaults
        from vitgraph.errors import UsageError
        from vitgraph.measure.setup import engine_notes, plan_graphs, resolve_source
        from vitgraph.planning.items import VIDEO
        from vitgraph.predict.find_profile import packing_cost
        from vitgraph.report.tune_tables import render_explanation
        from vitgraph.tuning.explain import explain_plan, explain_workload

        if model is None:
            raise UsageError("no model given; pass --model PRESET, hub id or folder (`vitgraph models` lists them)")
        options = with_bench_defaults(dict(locals()))
        if tensor_parallel_size > 1:
            _plan_ranks(options, items, json_output)
            return
        cost = packing_cost(calibration, model) if calibration is not None else None
        if items is not None:
            source = resolve_source(model_spec(options))
            rule = source.rule()
            specs = [rule.item_spec(rule.geometry(*size)) for size in parse_items(items)]
            data = explain_plan(specs, plan_graphs(rule, graph_spec(options), specs), packing, cost)
            has_videos = any(spec.modality == VIDEO for spec in specs)
            data["warnings"] = engine_notes(source, graph_spec(options), has_videos=has_videos)
        else:
            prepared = _prepare_workload(options)
            calls = [call.specs for call in prepared.calls]
            requests = [len(call.requests) for call in prepared.calls]
            data = explain_workload(calls, prepared.plan, packing, cost, requests)
            data["warnings"] = prepared.warnings
        if json_output:
            _print(data)
        else:
            render_explanation(data, Console())
            for text in data["warnings"]:
                typer.echo(f"note: {text}", err=True)


def _plan_ranks(options: Mapping[str, Any], items: str | None, json_output: bool) -> None:
    """`plan` on several GPUs: what each rank would do with its share."""
    from rich.console import Console

    from vitgraph.commands.spec_values import bench_spec
    from vitgraph.measure.setup import plan_graphs, resolve_source
    from vitgraph.measure.sharing import choose_assigner, describe_sharing
    from vitgraph.predict.find_profile import packing_cost
    from vitgraph.report.rank_table import render_sharing
    from vitgraph.report.tune_tables import render_explanation
    from vitgraph.tuning.explain import explain_plan, explain_workload

    spec = bench_spec(options)
    ranks, policy = spec.parallel.ranks, spec.graph.packing
    source = resolve_source(spec.model)
    cost = packing_cost(spec.graph.calibration, source.name) if spec.graph.calibration is not None else None
    assign, assigning_cost = choose_assigner(spec, source.name)
    if items is not None:
        rule = source.rule()
        calls = [tuple(rule.item_spec(rule.geometry(*size)) for size in parse_items(items))]
        graphs = plan_graphs(rule, spec.graph, calls[0])
    else:
        prepared = _prepare_workload(options)
        calls, graphs = [call.specs for call in prepared.calls], prepared.plan
    sharing = describe_sharing(calls, ranks, assign, assigning_cost)
    shared = [assign(specs, ranks) for specs in calls]
    explained: list[dict[str, Any]] = []
    for rank in range(ranks):
        parts = [tuple(specs[index] for index in shares[rank]) for specs, shares in zip(calls, shared, strict=True)]
        parts = [part for part in parts if part]
        found = None
        if parts and items is not None:
            found = explain_plan(parts[0], graphs, policy, cost)
        elif parts:
            found = explain_workload(parts, graphs, policy, cost)
        own = list(shared[0][rank]) if items is not None else None
        explained.append({"rank": rank, "items": own, "explanation": found})
    if json_output:
        _print({"sharing": sharing, "ranks": explained})
        return
    console = Console()
    for entry in explained:
        of_call = "" if entry["items"] is None else f": items {', '.join(map(str, entry['items'])) or 'none'}"
        console.print(f"Rank {entry['rank']}{of_call}", style="bold", highlight=False)
        if entry["explanation"] is not None:
            render_explanation(entry["explanation"], console)
    console.print(f"Pixel rows of the heaviest rank over the mean: {sharing['input_imbalance']:.3f}")
    render_sharing(sharing, console)


def parse_items(text: str) -> list[tuple[int, ...]]:
    """Reads `336x336,640x480x16`: width, height and, for videos, frames.

    Raises:
        UsageError: A part is not two or three positive integers.
    """
    from vitgraph.errors import UsageError

    found = []
    for part in text.split(","):
        numbers = part.strip().lower().split("x")
        if len(numbers) not in (2, 3) or not all(number.isdigit() and int(number) > 0 for number in numbers):
            raise UsageError(f"--items has {part.strip()!r}; give WIDTHxHEIGHT or WIDTHxHEIGHTxFRAMES, like 336x336")
        found.append(tuple(int(number) for number in numbers))
    return found


def _prepare_workload(options: Mapping[str, Any]) -> PreparedBench:
    from vitgraph.commands.spec_values import bench_spec
    from vitgraph.measure.bench import prepare_bench

    return prepare_bench(bench_spec({**options, "num_warmups": 0}))


def _has_no_gpu(device: str) -> bool:
    from vitgraph.measure.setup import resolve_device

    return resolve_device(device).type != "cuda"


def _measure(
    spec: BenchSpec,
    prepared: PreparedBench,
    profile: CalibrationProfile,
    result: Any,
    calls: int,
    time_limit: float,
    save: Callable[[], None],
    progress: Any,
) -> None:
    from vitgraph.attention.registry import unavailable_backends
    from vitgraph.measure.environment import snapshot
    from vitgraph.measure.setup import load, resolve_device, resolve_dtype
    from vitgraph.tuning.judge import verify_tuning

    device = resolve_device(spec.model.device)
    progress.phase("loading the encoder")
    model = profile.measured_spec(spec.model, unavailable_backends(device))
    encoder, facts = load(prepared.source, model, device=device, dtype=resolve_dtype(model.dtype, device))
    for difference in profile.differences({**snapshot(device), **facts}):
        progress.note(difference)
        result.data["notes"].append(difference)
    verify_tuning(
        encoder,
        prepared.calls,
        result,
        max_calls=calls,
        seed=spec.model.seed,
        time_limit_s=time_limit,
        checkpoint=save,
        progress=progress,
    )


def save_tuning(folder: Path, data: Mapping[str, Any], overwrite: bool) -> None:
    """Writes a tuning record; while measuring it is written again and again, with what is known by then."""
    from vitgraph.records.bench_record import encode
    from vitgraph.records.files import refuse_to_replace, write_atomically

    path = folder / TUNE_FILE
    if not overwrite:
        refuse_to_replace(path)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(encode(data), indent=1).encode())


def _print(value: Any) -> None:
    from vitgraph.records.bench_record import encode

    typer.echo(json.dumps(encode(value), indent=1))
