"""`vitgraph workload`: inspect a workload, make a random one, convert images and logs to a trace of sizes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitgraph.commands import options as opt

if TYPE_CHECKING:
    from vitgraph.workloads.base import Workload, WorkloadSpec

app = typer.Typer(no_args_is_help=True, help="Inspect workloads, make random ones, convert images and logs to traces.")

WHOLE_TRACE = 10**9
DEFAULT_MODEL = "qwen3-vl-30b-a3b"
FACTS_FILE = "workload.json"

Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model", help=f"Preset, hub id or folder whose tokens to count; repeatable; default {DEFAULT_MODEL}."
    ),
]
Output = Annotated[Path, typer.Option("--output", "-o", help="The CSV file to write.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace files that are there.")]
PlotFolder = Annotated[
    Path | None, typer.Option("--output-dir", help="Folder for workload.json and plots of sizes and tokens.")
]
Requests = Annotated[
    int | None, typer.Option("--num-prompts", help="Requests; unset: a whole trace, folder or log; 1000 of the rest.")
]


@app.command()
def inspect(
    model: Models = None,
    dataset_name: opt.DatasetName = "trace",
    dataset_path: opt.DatasetPath = None,
    hf_name: opt.HfName = None,
    hf_subset: opt.HfSubset = None,
    hf_split: opt.HfSplit = None,
    no_stream: opt.NoStream = False,
    disable_shuffle: opt.DisableShuffle = False,
    no_oversample: opt.NoOversample = False,
    num_prompts: Requests = None,
    random_mm_base_items_per_request: opt.BaseItems = 1,
    random_mm_num_mm_items_range_ratio: opt.RangeRatio = 0.0,
    random_mm_limit_mm_per_prompt: opt.LimitMm = None,
    random_mm_bucket_config: opt.BucketConfig = None,
    max_pixels_per_item: opt.MaxPixels = None,
    video_fps: opt.VideoFps = None,
    mm_processor_kwargs: opt.MmProcessorKwargs = None,
    seed: opt.Seed = 0,
    output_dir: PlotFolder = None,
    overwrite: Overwrite = False,
    json_output: opt.JsonOutput = False,
) -> None:
    """Show the sizes of a workload and the output tokens that models make of them: percentiles and a histogram."""
    from vitgraph.cli import reported_errors

    with reported_errors():
        options = {**locals(), "num_warmups": 0, "shuffle_trace": False}
        if num_prompts is None and dataset_name == "trace":
            options["num_prompts"] = WHOLE_TRACE
        _inspect(options)


def _inspect(options: Mapping[str, Any]) -> None:
    from rich.console import Console

    from vitgraph.commands.spec_values import model_spec, workload_spec
    from vitgraph.measure.setup import resolve_source
    from vitgraph.report.workload_table import render_workload
    from vitgraph.workloads.inspect import inspect_workload
    from vitgraph.workloads.registry import build_workload

    rules = {}
    for name in dict.fromkeys(options["model"] or [DEFAULT_MODEL]):
        source = resolve_source(model_spec({**_MODEL_DEFAULTS, **options, "model": name}))
        rules[name] = (source.row.name, source.rule())
    found = inspect_workload(build_workload(workload_spec(options)), rules)
    facts = found.as_dict()
    if options["output_dir"] is not None:
        tokens = {model.model: model.tokens_per_item for model in found.models}
        _write_facts(facts, found.sizes, tokens, options["output_dir"], options["overwrite"])
    if options["json_output"]:
        typer.echo(json.dumps(facts, indent=1))
    else:
        render_workload(facts, Console())
        if options["output_dir"] is not None:
            typer.echo(f"plots: {options['output_dir']}")


def _write_facts(facts: Mapping[str, Any], sizes: Any, tokens: Any, folder: Path, overwrite: bool) -> None:
    from vitgraph.records.files import RecordFileError, os_reason, refuse_to_replace, write_atomically
    from vitgraph.report.workload_plots import write_workload_plots

    if not overwrite:
        refuse_to_replace(folder / FACTS_FILE)
    write_workload_plots(facts["name"], sizes, tokens, folder, overwrite=overwrite)
    try:
        write_atomically(folder / FACTS_FILE, json.dumps(facts, indent=1).encode())
    except OSError as error:
        raise RecordFileError(f"cannot write {folder / FACTS_FILE}: {os_reason(error)}") from error


@app.command()
def make(
    output: Output,
    num_prompts: Annotated[int, typer.Option(help="Requests to draw.")] = 1000,
    random_mm_base_items_per_request: opt.BaseItems = 1,
    random_mm_num_mm_items_range_ratio: opt.RangeRatio = 0.0,
    random_mm_limit_mm_per_prompt: opt.LimitMm = None,
    random_mm_bucket_config: opt.BucketConfig = None,
    seed: opt.Seed = 0,
    overwrite: Overwrite = False,
    json_output: opt.JsonOutput = False,
) -> None:
    """Draw random requests as random-mm does, and write their sizes as a trace."""
    from vitgraph.cli import reported_errors

    with reported_errors():
        from vitgraph.workloads.registry import build_workload

        _refuse_existing(output, overwrite)
        options = {**_DATA_SET_DEFAULTS, **locals(), "dataset_name": "random-mm"}
        _save(build_workload(_spec(options)), output, overwrite, json_output)


@app.command()
def convert(
    source: Annotated[
        str,
        typer.Argument(help="Folder of images, hub data set, folder of parquet files or one of them, or request log."),
    ],
    output: Output,
    kind: Annotated[str, typer.Option(help="auto, hf, images, json-lines or text.")] = "auto",
    pattern: Annotated[
        str | None,
        typer.Option(
            help="Where a line of a text log names a size: 'size=WxH', 'WxHxF' with frames, or a regular expression "
            "with the groups width and height."
        ),
    ] = None,
    height_first: Annotated[
        bool, typer.Option("--height-first", help="Pairs in a JSON log are height before width.")
    ] = False,
    num_prompts: Requests = None,
    hf_name: opt.HfName = None,
    hf_subset: opt.HfSubset = None,
    hf_split: opt.HfSplit = None,
    no_stream: opt.NoStream = False,
    disable_shuffle: opt.DisableShuffle = False,
    seed: opt.Seed = 0,
    overwrite: Overwrite = False,
    json_output: opt.JsonOutput = False,
) -> None:
    """Write the sizes of images or of logged requests as a trace, which others can replay without the images."""
    from vitgraph.cli import reported_errors

    with reported_errors():
        from vitgraph.workloads.convert import convert_source

        _refuse_existing(output, overwrite)
        spec = _spec({**_DATA_SET_DEFAULTS, **_RANDOM_DEFAULTS, **locals(), "dataset_name": "hf"})
        workload = convert_source(
            source, kind=kind, pattern=pattern, height_first=height_first, num_requests=num_prompts, spec=spec
        )
        _save(workload, output, overwrite, json_output)


_MODEL_DEFAULTS: dict[str, Any] = {
    "revision": None,
    "load_format": "dummy",
    "dtype": "auto",
    "device": "cpu",
    "mm_encoder_attn_backend": "auto",
    "flash_attn_version": None,
    "compile_blocks": False,
}
_DATA_SET_DEFAULTS: dict[str, Any] = {
    "dataset_path": None,
    "hf_name": None,
    "hf_subset": None,
    "hf_split": None,
    "no_stream": False,
    "disable_shuffle": False,
    "no_oversample": True,
    "num_warmups": 0,
    "max_pixels_per_item": None,
    "video_fps": None,
    "shuffle_trace": False,
}
_RANDOM_DEFAULTS: dict[str, Any] = {
    "random_mm_base_items_per_request": 1,
    "random_mm_num_mm_items_range_ratio": 0.0,
    "random_mm_limit_mm_per_prompt": None,
    "random_mm_bucket_config": None,
}


def _refuse_existing(output: Path, overwrite: bool) -> None:
    from vitgraph.errors import UsageError

    # Before the source is read, which can take minutes.
    if output.exists() and not overwrite:
        raise UsageError(f"{output} exists; use --overwrite or another --output")


def _spec(options: Mapping[str, Any]) -> WorkloadSpec:
    from vitgraph.commands.spec_values import workload_spec

    return workload_spec(options)


def _save(workload: Workload, output: Path, overwrite: bool, json_output: bool) -> None:
    from rich.console import Console

    from vitgraph.report.workload_table import render_saved_trace
    from vitgraph.workloads.trace import save_trace

    path = save_trace(workload, output, overwrite=overwrite)
    facts = {
        "path": str(path),
        "requests": len(workload.requests),
        "items": workload.num_items,
        "videos": sum(item.frames > 1 for request in workload.requests for item in request.items),
        "fingerprint": workload.fingerprint(),
        "skipped": [{"source": item.source, "reason": item.reason} for item in workload.skipped],
        "provenance": dict(workload.provenance),
    }
    if json_output:
        typer.echo(json.dumps(facts, indent=1))
    else:
        render_saved_trace(facts, Console())
