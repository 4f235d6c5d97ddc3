"""Turns the values of command-line options into specs; the one place where texts of options are parsed."""

from __future__ import annotations

import datetime
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitgraph.errors import UsageError
from vitgraph.specs import (
    BenchSpec,
    GraphSpec,
    ModelSpec,
    ParallelSpec,
    RunSpec,
    parse_compilation_config,
    parse_token_budgets,
)
from vitgraph.workloads.base import WorkloadSpec
from vitgraph.workloads.random_mm import parse_bucket_config, parse_limit_mm_per_prompt

DEFAULT_TRACE = "mixed-chat"


def bench_spec(options: Mapping[str, Any]) -> BenchSpec:
    """The spec of `vitgraph bench` from its options by parameter name.

    Raises:
        UsageError: An option that cannot be read, or two that contradict each other.
    """
    options = first_look(options) if not options["model"] else options
    return BenchSpec(
        model_spec(options), graph_spec(options), run_spec(options), workload_spec(options), parallel_spec(options)
    )


def with_bench_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of another command with the defaults of `bench` for those that it does not have."""
    from vitgraph.cli import bench

    defaults = {name: parameter.default for name, parameter in inspect.signature(bench).parameters.items()}
    return {**defaults, **{name: value for name, value in options.items() if name in defaults}}


FIRST_LOOK_GPU = {"model": "qwen3-vl-30b-a3b", "load_format": "dummy", "num_prompts": 400}
FIRST_LOOK_CPU = {
    "model": "qwen3-vl-debug",
    "load_format": "dummy",
    "num_prompts": 100,
    # A CPU would spend minutes in the attention of a few photos.
    "mm_processor_kwargs": '{"max_pixels": 500000}',
    "token_budgets": "64,96,128,192,256,384,512",
}
"""Options of `vitgraph bench` without a model; those given on the command line win."""


def first_look(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with the embedded model and a short run filled in, for this machine's device."""
    from vitgraph.measure.setup import resolve_device

    on_gpu = resolve_device(options["device"]).type == "cuda"
    defaults = FIRST_LOOK_GPU if on_gpu else FIRST_LOOK_CPU
    unset = {name for name in defaults if options[name] is None or name == "load_format"}
    return {**options, **{name: value for name, value in defaults.items() if name in unset}}


def model_spec(options: Mapping[str, Any]) -> ModelSpec:
    """The model part."""
    return ModelSpec(
        model=options["model"],
        revision=options["revision"],
        load_format=options["load_format"],
        dtype=options["dtype"],
        device=options["device"],
        attn_backend=options["mm_encoder_attn_backend"],
        flash_attn_version=options["flash_attn_version"],
        mm_processor_kwargs=_json_object("--mm-processor-kwargs", options["mm_processor_kwargs"]),
        compile=options["compile_blocks"],
        seed=options["seed"],
    )


def graph_spec(options: Mapping[str, Any]) -> GraphSpec:
    """The graph part; the single options override the fields of `--compilation-config`."""
    given = parse_compilation_config(options["compilation_config"]) if options["compilation_config"] else {}
    budgets = tuple(given.get("encoder_cudagraph_token_budgets", ()))
    if options["token_budgets"] is not None:
        budgets = parse_token_budgets(options["token_budgets"])
    items = options["max_vision_items_per_batch"]
    frames = options["max_frames_per_batch"]
    return GraphSpec(
        token_budgets=budgets,
        max_vision_items_per_batch=(
            given.get("encoder_cudagraph_max_vision_items_per_batch", 0) if items is None else items
        ),
        max_frames_per_batch=given.get("encoder_cudagraph_max_frames_per_batch") if frames is None else frames,
        packing=options["packing"],
        calibration=options["calibration"],
        max_model_len=options["max_model_len"],
        max_num_batched_tokens=options["max_num_batched_tokens"],
        video_pruning_rate=options["video_pruning_rate"],
        slot_tiers=not options["single_slot_tier"],
    )


def run_spec(options: Mapping[str, Any]) -> RunSpec:
    """The measuring part."""
    return RunSpec(
        rounds=options["rounds"],
        requests_per_call=options["requests_per_call"],
        baseline=options["baseline"],
        monolithic_crops=options["monolithic_crops"],
        output_dir=options["output_dir"],
        overwrite=options["overwrite"],
        fail_on_slower=options["fail_on_slower"],
    )


def parallel_spec(options: Mapping[str, Any]) -> ParallelSpec:
    """The data-parallel part; commands without these options run in one process."""
    names = {
        "ranks": "tensor_parallel_size",
        "tp_mode": "mm_encoder_tp_mode",
        "assignment": "dp_assignment",
        "rank_timeout_s": "rank_timeout",
    }
    return ParallelSpec(**{field: options[name] for field, name in names.items() if name in options})


def workload_spec(options: Mapping[str, Any]) -> WorkloadSpec:
    """The workload part; a trace without a path is the shipped mixed one."""
    path = options["dataset_path"]
    if options["dataset_name"] == "trace" and path is None:
        path = DEFAULT_TRACE
    texts: dict[str, Any] = {}
    if options["random_mm_bucket_config"] is not None:
        texts["random_mm_bucket_config"] = parse_bucket_config(options["random_mm_bucket_config"])
    if options["random_mm_limit_mm_per_prompt"] is not None:
        texts["random_mm_limit_mm_per_prompt"] = parse_limit_mm_per_prompt(options["random_mm_limit_mm_per_prompt"])
    return WorkloadSpec(
        dataset_name=options["dataset_name"],
        dataset_path=path,
        hf_name=options["hf_name"],
        hf_subset=options["hf_subset"],
        hf_split=options["hf_split"],
        stream=not options["no_stream"],
        disable_shuffle=options["disable_shuffle"],
        no_oversample=options["no_oversample"],
        num_prompts=1000 if options["num_prompts"] is None else options["num_prompts"],
        num_warmups=options["num_warmups"],
        seed=options["seed"],
        random_mm_base_items_per_request=options["random_mm_base_items_per_request"],
        random_mm_num_mm_items_range_ratio=options["random_mm_num_mm_items_range_ratio"],
        max_pixels_per_item=options["max_pixels_per_item"],
        video_fps=options["video_fps"],
        shuffle_trace=options["shuffle_trace"],
        **texts,
    )


def new_run_folder(kind: str, model: str) -> Path:
    """A folder name under `runs/` that says what was run and when."""
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{kind}_{Path(model).name.lower()}_{stamp}"


def _json_object(option: str, text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{option} is not valid JSON ({error}): {text}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{option} must be a JSON object, got {text}")
    return value
