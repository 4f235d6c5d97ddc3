"""`vitgraph profile`: options to a spec, one profile, its table and plot."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from vitgraph.commands import options as opt

DEFAULT_ITEMS = "1024x768"
DEFAULT_MODEL = "qwen3-vl-30b-a3b"
DEFAULT_CPU_ITEMS = "336x336"
DEFAULT_CPU_MODEL = "qwen3-vl-debug"

Items = Annotated[
    str | None,
    typer.Option(
        help=f"The call: 336x336 (width x height), 20*336x336, 640x360x8 (a video), with commas; {DEFAULT_ITEMS}.",
        rich_help_panel=opt.WORKLOAD,
    ),
]
Repeats = Annotated[int, typer.Option(help="Traces to average in each mode.", rich_help_panel=opt.RUN)]
ChromeTrace = Annotated[
    bool, typer.Option("--chrome-trace", help="Also write a trace of host and device.", rich_help_panel=opt.RUN)
]


def profile(
    model: opt.Model = None,
    items: Items = None,
    random_mm_base_items_per_request: opt.BaseItems = 1,
    random_mm_bucket_config: opt.BucketConfig = None,
    random_mm_limit_mm_per_prompt: opt.LimitMm = None,
    revision: opt.Revision = None,
    load_format: opt.LoadFormat = "dummy",
    dtype: opt.Dtype = "auto",
    device: opt.Device = "auto",
    mm_encoder_attn_backend: opt.AttnBackend = "auto",
    flash_attn_version: opt.FlashAttnVersion = None,
    mm_processor_kwargs: opt.MmProcessorKwargs = None,
    compile_blocks: opt.CompileBlocks = False,
    token_budgets: opt.TokenBudgets = None,
    max_vision_items_per_batch: opt.MaxItems = None,
    max_frames_per_batch: opt.MaxFrames = None,
    packing: opt.Packing = "greedy",
    repeats: Repeats = 5,
    chrome_trace: ChromeTrace = False,
    seed: opt.Seed = 0,
    output_dir: opt.OutputDir = None,
    overwrite: opt.Overwrite = False,
    json_output: opt.JsonOutput = False,
    quiet: opt.Quiet = False,
) -> None:
    """Show where the GPU time of one call goes, eagerly and in replay: attention, products, norms, copies, gaps.

    The call is given by --items, or drawn by the random-mm options. Without --token-budgets its graphs are of exactly
    its size. On a CPU the operators of the forward are shown instead of kernels.
    """
    from vitgraph.cli import reported_errors

    with reported_errors():
        _run(dict(locals()))


def _run(options: Mapping[str, Any]) -> None:
    from rich.console import Console

    from vitgraph.commands.spec_values import new_run_folder
    from vitgraph.measure.profile_call import prepare_profile, run_profile
    from vitgraph.report.profile_plot import write_profile_plot
    from vitgraph.report.profile_table import render_profile
    from vitgraph.report.progress import ConsoleProgress

    prepared = prepare_profile(profile_spec(options))
    spec = prepared.spec
    folder = spec.output_dir or new_run_folder("profile", spec.model.model)
    with ConsoleProgress(enabled=not options["quiet"]) as progress:
        record = run_profile(prepared, folder, ["vitgraph", *sys.argv[1:]], progress)
        write_profile_plot(record, folder / "plots", overwrite=True)
    if options["json_output"]:
        from vitgraph.records.bench_record import encode

        typer.echo(json.dumps(encode(record), indent=1))
    else:
        render_profile(record, Console())
        typer.echo(f"record: {folder}")


def profile_spec(options: Mapping[str, Any]) -> Any:
    """The spec of `vitgraph profile` from its options by parameter name.

    Raises:
        UsageError: An option that cannot be read, or two that contradict each other.
    """
    from vitgraph.commands.spec_values import graph_spec, model_spec
    from vitgraph.errors import UsageError
    from vitgraph.measure.profile_call import ProfileSpec, parse_items
    from vitgraph.measure.setup import resolve_device

    is_cpu = resolve_device(options["device"]).type == "cpu"
    model = options["model"] or (DEFAULT_CPU_MODEL if is_cpu else DEFAULT_MODEL)
    text = options["items"]
    if options["random_mm_bucket_config"] is not None:
        if text is not None:
            raise UsageError(f"--items is {text!r} and --random-mm-bucket-config is given too; one of them is the call")
        media = _drawn_items(options)
    else:
        media = parse_items(text or (DEFAULT_CPU_ITEMS if is_cpu else DEFAULT_ITEMS))
    unused = {"compilation_config": None, "video_pruning_rate": 0.0, "single_slot_tier": False, "calibration": None}
    limits = {"max_model_len": 10**9, "max_num_batched_tokens": 10**9}
    return ProfileSpec(
        model=model_spec({**options, "model": model}),
        graph=graph_spec({**unused, **limits, **options}),
        media=media,
        repeats=options["repeats"],
        chrome_trace=options["chrome_trace"],
        output_dir=options["output_dir"],
        overwrite=options["overwrite"],
    )


def _drawn_items(options: Mapping[str, Any]) -> Any:
    """The first request of the random-mm workload that the options describe."""
    from vitgraph.errors import UsageError
    from vitgraph.workloads.base import WorkloadSpec
    from vitgraph.workloads.random_mm import parse_bucket_config, parse_limit_mm_per_prompt
    from vitgraph.workloads.registry import build_workload

    settings: dict[str, Any] = {"random_mm_bucket_config": parse_bucket_config(options["random_mm_bucket_config"])}
    if options["random_mm_limit_mm_per_prompt"] is not None:
        settings["random_mm_limit_mm_per_prompt"] = parse_limit_mm_per_prompt(options["random_mm_limit_mm_per_prompt"])
    spec = WorkloadSpec(
        dataset_name="random-mm",
        num_prompts=1,
        num_warmups=0,
        seed=options["seed"],
        random_mm_base_items_per_request=options["random_mm_base_items_per_request"],
        **settings,
    )
    (request,) = build_workload(spec).requests
    if not request.items:
        raise UsageError("--random-mm-base-items-per-request draws a request without items; ask for 1 or more")
    return request.items
