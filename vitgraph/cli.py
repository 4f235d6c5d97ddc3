"""The command line: options to a spec, one engine call, its record to a report; exit statuses. Nothing else.

Heavy modules are imported inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitgraph import __version__, errors
from vitgraph.commands import export as cli_export
from vitgraph.commands import machine as cli_machine
from vitgraph.commands import options as opt
from vitgraph.commands import profile as cli_profile
from vitgraph.commands import tune as cli_tune
from vitgraph.commands import workload as cli_workload
from vitgraph.commands.process import end_without_leak_report

if TYPE_CHECKING:
    from vitgraph.commands.compare_backends import Shown
    from vitgraph.specs import BenchSpec

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Decide how to run a vision-language model's vision encoder: CUDA Graphs at token budgets against eager.",
)

app.add_typer(cli_workload.app, name="workload")
app.add_typer(cli_machine.app)
app.command("export")(cli_export.export)
app.command("calibrate")(cli_tune.calibrate)
app.command("tune-budgets")(cli_tune.tune_budgets)
app.command("plan")(cli_tune.plan)
app.command("profile")(cli_profile.profile)


def _show_version(value: bool) -> None:
    if value:
        print(f"vitgraph {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """See the commands below; each has its own --help."""


@contextmanager
def reported_errors() -> Iterator[None]:
    """Turns errors meant for the user into one message on stderr and their exit status.

    A termination signal (a batch system's time limit, say) is treated like Ctrl-C, so that what was measured is saved.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except errors.VitgraphError as error:
        _tell(f"error: {error}", error)
        raise typer.Exit(error.exit_status) from error
    except KeyboardInterrupt as error:
        _tell("stopped")
        raise typer.Exit(errors.EXIT_INTERRUPTED) from error


def _tell(text: str, error: errors.VitgraphError | None = None) -> None:
    """Prints why a command ended. Of several ranks only the first does; the others leave word for the launcher."""
    from vitgraph.ranks.launch import is_follower, leave_word

    if not is_follower():
        print(text, file=sys.stderr)
    if error is not None and not isinstance(error, errors.RankFailedError):
        leave_word(error)


@app.command()
def bench(
    context: typer.Context,
    config: opt.Config = None,
    model: opt.Model = None,
    dataset_name: opt.DatasetName = "trace",
    dataset_path: opt.DatasetPath = None,
    hf_name: opt.HfName = None,
    hf_subset: opt.HfSubset = None,
    hf_split: opt.HfSplit = None,
    no_stream: opt.NoStream = False,
    disable_shuffle: opt.DisableShuffle = False,
    no_oversample: opt.NoOversample = False,
    num_prompts: opt.NumPrompts = None,
    num_warmups: opt.NumWarmups = 20,
    random_mm_base_items_per_request: opt.BaseItems = 1,
    random_mm_num_mm_items_range_ratio: opt.RangeRatio = 0.0,
    random_mm_limit_mm_per_prompt: opt.LimitMm = None,
    random_mm_bucket_config: opt.BucketConfig = None,
    max_pixels_per_item: opt.MaxPixels = None,
    video_fps: opt.VideoFps = None,
    shuffle_trace: opt.ShuffleTrace = False,
    revision: opt.Revision = None,
    load_format: opt.LoadFormat = "auto",
    dtype: opt.Dtype = "auto",
    device: opt.Device = "auto",
    mm_encoder_attn_backend: opt.AttnBackend = "auto",
    flash_attn_version: opt.FlashAttnVersion = None,
    mm_processor_kwargs: opt.MmProcessorKwargs = None,
    compile_blocks: opt.CompileBlocks = False,
    compilation_config: opt.CompilationConfig = None,
    token_budgets: opt.TokenBudgets = None,
    max_vision_items_per_batch: opt.MaxItems = None,
    max_frames_per_batch: opt.MaxFrames = None,
    packing: opt.Packing = "greedy",
    calibration: opt.Calibration = None,
    max_model_len: opt.MaxModelLen = 32768,
    max_num_batched_tokens: opt.MaxBatchedTokens = 16384,
    video_pruning_rate: opt.VideoPruningRate = 0.0,
    single_slot_tier: opt.SingleSlotTier = False,
    tensor_parallel_size: opt.TensorParallelSize = 1,
    mm_encoder_tp_mode: opt.TpMode = "weights",
    dp_assignment: opt.DpAssignment = "size",
    rank_timeout: opt.RankTimeout = 60.0,
    rounds: opt.Rounds = 2,
    requests_per_call: opt.RequestsPerCall = 1,
    baseline: opt.Baseline = "eager",
    monolithic_crops: opt.MonolithicCrops = None,
    seed: opt.Seed = 0,
    output_dir: opt.OutputDir = None,
    overwrite: opt.Overwrite = False,
    dry_run: opt.DryRun = False,
    json_output: opt.JsonOutput = False,
    fail_on_slower: opt.FailOnSlower = False,
    compile_rows: opt.CompileRows = False,
    quiet: opt.Quiet = False,
) -> None:
    """Measure the encoder in graph and eager mode on a workload, and say which is faster.

    Without --model, a first look: the Qwen3-VL-30B-A3B tower with random weights on a GPU, a small one on a CPU, and
    the shipped trace of real image sizes.
    """
    with reported_errors():
        from vitgraph.commands.config_file import with_config_file
        from vitgraph.commands.spec_values import bench_spec

        options = with_config_file(context, config, dict(locals()))
        if options["compile_rows"]:
            from vitgraph.commands.compile_rows import run_compile_rows

            _show(run_compile_rows(options), options["json_output"])
            return
        spec = bench_spec(options)
        _run_bench(spec, **{name: options[name] for name in ("dry_run", "json_output", "quiet")})


def _run_bench(spec: BenchSpec, *, dry_run: bool, json_output: bool, quiet: bool) -> None:
    from rich.console import Console

    from vitgraph.commands.on_ranks import bench_on_rank, is_follower, ran_on_ranks, rank_progress
    from vitgraph.commands.spec_values import new_run_folder
    from vitgraph.measure.bench import prepare_bench
    from vitgraph.report.claims import verdict_of
    from vitgraph.report.console import render_bench
    from vitgraph.report.derived import write_derived_or_say
    from vitgraph.report.plan_table import render_plan
    from vitgraph.report.rank_table import render_ranks, render_sharing

    folder = spec.run.output_dir or new_run_folder("bench", spec.model.model)
    if not dry_run and ran_on_ranks(spec.parallel, spec.model.device, folder, overwrite=spec.run.overwrite):
        return
    prepared = prepare_bench(spec)
    if dry_run:
        description = prepared.describe()
        if json_output:
            _print_json(description)
        else:
            render_plan(description, Console())
        return
    command = ["vitgraph", *sys.argv[1:]]
    with rank_progress(quiet) as progress:
        for warning in prepared.warnings:
            progress.note(warning)
        try:
            record = bench_on_rank(prepared, folder, command, progress)
        finally:
            if not is_follower():
                write_derived_or_say(folder, progress.note)
    if record is None:
        return
    if json_output:
        _print_json(record.data)
    else:
        render_bench(record, Console())
        render_ranks(record, Console())
        render_sharing(prepared.sharing, Console())
        print(f"record: {folder}")
    if record["status"] == "interrupted":
        raise typer.Exit(errors.EXIT_INTERRUPTED)
    if spec.run.fail_on_slower and record["comparison"].get("verdict") == "slower":
        raise errors.SlowerThanEagerError(f"graphs are slower than eager here: {verdict_of(record).reason}")


def _print_json(value: Any) -> None:
    import json

    from vitgraph.records.bench_record import encode

    print(json.dumps(encode(value), indent=1))


@app.command()
def models(
    json_output: opt.JsonOutput = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the README's matrix.")] = False,
) -> None:
    """List the supported models, their presets, and what was verified where."""
    with reported_errors():
        from rich.console import Console

        from vitgraph.models.catalog import catalog
        from vitgraph.report.model_table import matrix_markdown, render_models

        entries = catalog()
        if json_output:
            _print_json([entry.as_dict() for entry in entries])
        elif markdown:
            print(matrix_markdown(entries))
        else:
            render_models(entries, Console())


@app.command()
def verify(
    model: opt.Model = None,
    every_row: Annotated[bool, typer.Option("--all", help="Every row of `vitgraph models`.")] = False,
    debug_size: Annotated[bool, typer.Option("--debug-size", help="With --all: the small presets.")] = False,
    calls: Annotated[int, typer.Option(help="Random calls to compare with eager.")] = 200,
    token_budgets: opt.TokenBudgets = None,
    max_vision_items_per_batch: opt.MaxItems = 8,
    load_format: opt.LoadFormat = "dummy",
    dtype: opt.Dtype = "auto",
    device: opt.Device = "auto",
    mm_encoder_attn_backend: opt.AttnBackend = "auto",
    flash_attn_version: opt.FlashAttnVersion = None,
    compile_blocks: opt.CompileBlocks = False,
    revision: opt.Revision = None,
    tensor_parallel_size: opt.TensorParallelSize = 1,
    mm_encoder_tp_mode: opt.TpMode = "weights",
    rank_timeout: opt.RankTimeout = 60.0,
    seed: opt.Seed = 0,
    output_dir: opt.OutputDir = None,
    overwrite: opt.Overwrite = False,
    json_output: opt.JsonOutput = False,
    quiet: opt.Quiet = False,
) -> None:
    """Prove that replay equals eager: every graph, random packings, poisoned memory, order, aliasing, clean-up."""
    with reported_errors():
        from vitgraph.commands.verify import run_verify

        results = run_verify(dict(locals()))
        if results is None:
            return
        if json_output:
            _print_json({"rows": results})
        else:
            from rich.console import Console

            from vitgraph.report.verify_table import render_verify

            render_verify(results, Console())
        faults = [row for row in results if row["status"] != "ok"]
        if faults:
            named = "; ".join(f"{row['row']}: {row['status']}" for row in faults)
            raise errors.IncorrectOutputError(f"{len(faults)} of {len(results)} rows are not ok ({named})")


@app.command("compare-backends")
def compare_backends(
    context: typer.Context,
    config: opt.Config = None,
    backends: Annotated[
        str | None,
        typer.Option(help="Backends to compare, FLASH_ATTN,FLASHINFER,…; unset: every one.", rich_help_panel=opt.MODEL),
    ] = None,
    isolate: Annotated[
        bool,
        typer.Option("--isolate", help="Measure each backend in a process of its own.", rich_help_panel=opt.RUN),
    ] = False,
    micro: Annotated[
        bool,
        typer.Option(
            "--micro",
            help="Time attention alone with this tower's heads, over segment lengths and slots; no workload is run.",
            rich_help_panel=opt.RUN,
        ),
    ] = False,
    model: opt.Model = None,
    dataset_name: opt.DatasetName = "trace",
    dataset_path: opt.DatasetPath = None,
    hf_name: opt.HfName = None,
    hf_subset: opt.HfSubset = None,
    hf_split: opt.HfSplit = None,
    no_stream: opt.NoStream = False,
    disable_shuffle: opt.DisableShuffle = False,
    no_oversample: opt.NoOversample = False,
    num_prompts: opt.NumPrompts = None,
    num_warmups: opt.NumWarmups = 10,
    random_mm_base_items_per_request: opt.BaseItems = 1,
    random_mm_num_mm_items_range_ratio: opt.RangeRatio = 0.0,
    random_mm_limit_mm_per_prompt: opt.LimitMm = None,
    random_mm_bucket_config: opt.BucketConfig = None,
    max_pixels_per_item: opt.MaxPixels = None,
    video_fps: opt.VideoFps = None,
    shuffle_trace: opt.ShuffleTrace = False,
    revision: opt.Revision = None,
    load_format: opt.LoadFormat = "auto",
    dtype: opt.Dtype = "auto",
    device: opt.Device = "auto",
    flash_attn_version: opt.FlashAttnVersion = None,
    mm_processor_kwargs: opt.MmProcessorKwargs = None,
    compile_blocks: opt.CompileBlocks = False,
    compilation_config: opt.CompilationConfig = None,
    token_budgets: opt.TokenBudgets = None,
    max_vision_items_per_batch: opt.MaxItems = None,
    max_frames_per_batch: opt.MaxFrames = None,
    packing: opt.Packing = "greedy",
    calibration: opt.Calibration = None,
    max_model_len: opt.MaxModelLen = 32768,
    max_num_batched_tokens: opt.MaxBatchedTokens = 16384,
    video_pruning_rate: opt.VideoPruningRate = 0.0,
    single_slot_tier: opt.SingleSlotTier = False,
    tensor_parallel_size: opt.TensorParallelSize = 1,
    mm_encoder_tp_mode: opt.TpMode = "weights",
    dp_assignment: opt.DpAssignment = "size",
    rank_timeout: opt.RankTimeout = 60.0,
    rounds: opt.Rounds = 1,
    requests_per_call: opt.RequestsPerCall = 1,
    seed: opt.Seed = 0,
    output_dir: opt.OutputDir = None,
    overwrite: opt.Overwrite = False,
    dry_run: opt.DryRun = False,
    json_output: opt.JsonOutput = False,
    quiet: opt.Quiet = False,
    part_options: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Compare attention backends in graph and eager mode on one workload, and say which to use and how sure that is.

    Every backend's outputs are checked against the same tower in float32 before anything is timed. A backend that is
    missing, fails or is wrong keeps its row with the reason.
    """
    with reported_errors():
        from vitgraph.commands.compare_backends import run_comparison
        from vitgraph.commands.config_file import with_config_file

        shown = run_comparison(with_config_file(context, config, dict(locals())))
        if shown is not None:
            _show(shown, json_output)


def _show(shown: Shown, json_output: bool) -> None:
    if json_output:
        _print_json(shown.data)
    else:
        from rich.console import Console

        shown.render(Console())
        if shown.folder is not None:
            print(f"record: {shown.folder}")
    if shown.is_interrupted:
        raise typer.Exit(errors.EXIT_INTERRUPTED)
    if shown.failure is not None:
        raise shown.failure


def main() -> None:
    """Entry point of the `vitgraph` program."""
    try:
        if "RANK" in os.environ:
            from vitgraph.commands.on_ranks import main_of_rank

            main_of_rank(app)
        else:
            app()
    except SystemExit as end:
        end_without_leak_report(end.code)
        raise


if __name__ == "__main__":
    main()
