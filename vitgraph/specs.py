"""What a command was asked to do, fully resolved: the settings that run.json stores."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vitgraph.errors import UsageError
from vitgraph.workloads.base import WorkloadSpec

DEFAULT_MAX_MODEL_LEN = 32768
DEFAULT_MAX_NUM_BATCHED_TOKENS = 16384
"""vLLM's defaults of what one encoder call may hold on a large GPU; they only bound automatic budgets."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Which encoder, and how it runs.

    Attributes:
        model: Preset, hub id or local folder.
        revision: Hub revision.
        load_format: `auto` or `dummy`.
        dtype: `auto` (bfloat16 on a GPU, float32 on a CPU), or a name.
        device: `auto`, `cuda`, `cuda:1`, `cpu`.
        attn_backend: Registry name or `auto`.
        flash_attn_version: Forces a FlashAttention generation.
        mm_processor_kwargs: Overrides of the processor's settings.
        compile: Regional compilation of the repeated block, in every mode alike.
        seed: Seed of random weights and pixels.
    """

    model: str
    revision: str | None = None
    load_format: str = "auto"
    dtype: str = "auto"
    device: str = "auto"
    attn_backend: str = "auto"
    flash_attn_version: int | None = None
    mm_processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    compile: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """Graph settings as given; empty, 0 and None mean automatic, as in vLLM's compilation config.

    Attributes:
        token_budgets: Explicit budgets.
        max_vision_items_per_batch: Item limit; 0 is automatic.
        max_frames_per_batch: Frame limit; None is automatic, 0 is image-only.
        packing: Packing policy.
        calibration: Profile that the policy `optimal` weighs times with: a file, or a shipped name.
        max_model_len: Tokens that a prompt may have.
        max_num_batched_tokens: Tokens that a call may have.
        video_limit_per_prompt: Videos that a prompt may hold; None takes it from the workload.
        video_pruning_rate: Share of video tokens that the server prunes; above 0 it makes the token count depend on
            data, so videos are not captured.
        slot_tiers: Capture each budget at several segment-slot counts; off means one count, as upstream.
    """

    token_budgets: tuple[int, ...] = ()
    max_vision_items_per_batch: int = 0
    max_frames_per_batch: int | None = None
    packing: str = "greedy"
    calibration: str | None = None
    max_model_len: int = DEFAULT_MAX_MODEL_LEN
    max_num_batched_tokens: int = DEFAULT_MAX_NUM_BATCHED_TOKENS
    video_limit_per_prompt: int | None = None
    video_pruning_rate: float = 0.0
    slot_tiers: bool = True

    def __post_init__(self) -> None:
        if not 0.0 <= self.video_pruning_rate < 1.0:
            raise UsageError(f"--video-pruning-rate is {self.video_pruning_rate}; it must be at least 0 and below 1")
        for name, value in (
            ("--max-model-len", self.max_model_len),
            ("--max-num-batched-tokens", self.max_num_batched_tokens),
        ):
            if value < 1:
                raise UsageError(f"{name} is {value}; it must be at least 1 token")

    @property
    def max_call_tokens(self) -> int:
        """Output tokens that one encoder call may hold; bounds automatic budgets."""
        return min(self.max_model_len, self.max_num_batched_tokens)


EAGER_BASELINE, HF_BASELINE, MONOLITHIC_BASELINE = BASELINES = ("eager", "hf", "monolithic")
"""What graphs are measured against: eager alone, transformers' stock forward too, or one graph of both paths too."""


@dataclass(frozen=True, slots=True)
class RunSpec:
    """How the measuring is done and where its result goes.

    Attributes:
        rounds: Times that every request is measured in every mode.
        requests_per_call: Requests that are encoded together.
        baseline: One of `BASELINES`: what is measured beside graph mode.
        monolithic_crops: Crops that a monolithic graph computes for every image; None is the most of the workload.
        output_dir: Folder of the record; None makes one under `runs/`.
        overwrite: Replace an existing record.
        fail_on_slower: Exit non-zero when graph mode is slower than eager.
    """

    rounds: int = 2
    requests_per_call: int = 1
    baseline: str = EAGER_BASELINE
    monolithic_crops: int | None = None
    output_dir: Path | None = None
    overwrite: bool = False
    fail_on_slower: bool = False

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise UsageError(f"--rounds is {self.rounds}; it must be at least 1")
        if self.requests_per_call < 1:
            raise UsageError(f"--requests-per-call is {self.requests_per_call}; it must be at least 1")
        if self.baseline not in BASELINES:
            raise UsageError(f"--baseline is {self.baseline!r}; known: {', '.join(BASELINES)}")
        if self.monolithic_crops is None:
            return
        if self.baseline != MONOLITHIC_BASELINE:
            raise UsageError(
                f"--monolithic-crops is {self.monolithic_crops}, but no monolithic graph is measured; add "
                f"--baseline {MONOLITHIC_BASELINE} or leave it out"
            )
        if self.monolithic_crops < 1:
            raise UsageError(
                f"--monolithic-crops is {self.monolithic_crops}; a graph of both paths computes at least 1 crop"
            )


ASSIGNMENTS = ("size", "cost")
"""Who encodes what: by input size as vLLM does, or by predicted latency, which needs a calibration."""


@dataclass(frozen=True, slots=True)
class ParallelSpec:
    """How many processes encode a call together, each on a device of its own.

    Attributes:
        ranks: Processes; each holds the whole encoder and takes a share of a call's items.
        tp_mode: `data`; `weights`, which splits the tower itself, is only accepted where there is one process.
        assignment: One of `ASSIGNMENTS`.
        rank_timeout_s: Longest wait of a rank for another while calls are measured.
    """

    ranks: int = 1
    tp_mode: str = "weights"
    assignment: str = "size"
    rank_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise UsageError(f"--tensor-parallel-size is {self.ranks}; it must be at least 1")
        if self.tp_mode not in ("data", "weights"):
            raise UsageError(f"--mm-encoder-tp-mode is {self.tp_mode!r}; known: data, weights")
        if self.ranks > 1 and self.tp_mode != "data":
            raise UsageError(
                f"--tensor-parallel-size is {self.ranks} with --mm-encoder-tp-mode {self.tp_mode}, which splits the "
                "tower over the GPUs and is not supported; add --mm-encoder-tp-mode data, where each GPU runs the "
                "whole encoder on a share of the items"
            )
        if self.assignment not in ASSIGNMENTS:
            raise UsageError(f"--dp-assignment is {self.assignment!r}; known: {', '.join(ASSIGNMENTS)}")
        if not self.rank_timeout_s > 0:
            raise UsageError(f"--rank-timeout is {self.rank_timeout_s}; it must be above 0 seconds")


@dataclass(frozen=True, slots=True)
class BenchSpec:
    """A `bench` run."""

    model: ModelSpec
    graph: GraphSpec
    run: RunSpec
    workload: WorkloadSpec
    parallel: ParallelSpec = field(default_factory=ParallelSpec)

    def __post_init__(self) -> None:
        # The stock forward runs the very blocks that are compiled, so it would be neither stock nor plain.
        if self.model.compile and self.run.baseline == HF_BASELINE:
            raise UsageError(
                "--baseline hf measures the stock forward, but --compile compiles the blocks that it runs too; leave "
                "one of them out, or measure the stock forward in a run of its own"
            )
        if self.run.baseline != MONOLITHIC_BASELINE:
            return
        if self.parallel.ranks > 1:
            raise UsageError(
                f"--baseline {MONOLITHIC_BASELINE} compares graphs in one process, but --tensor-parallel-size is "
                f"{self.parallel.ranks}; leave one of the two out"
            )
        if self.graph.packing == "optimal":
            raise UsageError(
                f"--packing optimal weighs times that a calibration has of the two paths and of no monolithic graph; "
                f"use another packing with --baseline {MONOLITHIC_BASELINE}"
            )

    def as_dict(self) -> dict[str, Any]:
        """The settings in the shape of run.json."""
        settings = asdict(self)
        settings["bench"] = settings.pop("run")
        settings["bench"]["output_dir"] = str(self.run.output_dir) if self.run.output_dir else None
        buckets = settings["workload"].get("random_mm_bucket_config")
        if buckets is not None:
            settings["workload"]["random_mm_bucket_config"] = {str(size): share for size, share in buckets.items()}
        return settings


COMPILATION_KEYS = {
    "cudagraph_mm_encoder": bool,
    "encoder_cudagraph_token_budgets": list,
    "encoder_cudagraph_max_vision_items_per_batch": int,
    "encoder_cudagraph_max_frames_per_batch": int,
}


def parse_compilation_config(text: str) -> dict[str, Any]:
    """Reads the encoder-graph fields of vLLM's `--compilation-config` JSON.

    Returns:
        Those of `COMPILATION_KEYS` that are given; other fields configure the language model and are left out.

    Raises:
        UsageError: Not a JSON object, or a field of the wrong type, or the flag is false.
    """
    try:
        config = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--compilation-config is not valid JSON ({error}): {text}") from error
    if not isinstance(config, dict):
        raise UsageError(f"--compilation-config must be a JSON object, got {text}")
    found: dict[str, Any] = {}
    for key, kind in COMPILATION_KEYS.items():
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise UsageError(f"--compilation-config: {key} is {value!r}; it must be of type {kind.__name__}")
        found[key] = value
    unknown = [key for key in config if key.startswith("encoder_cudagraph") and key not in COMPILATION_KEYS]
    if unknown:
        raise UsageError(f"--compilation-config: unknown field {unknown[0]!r}; known: {', '.join(COMPILATION_KEYS)}")
    budgets = found.get("encoder_cudagraph_token_budgets", [])
    if not all(isinstance(budget, int) and not isinstance(budget, bool) for budget in budgets):
        raise UsageError(f"--compilation-config: token budgets must be integers, got {budgets}")
    if found.get("cudagraph_mm_encoder") is False:
        raise UsageError(
            "--compilation-config has cudagraph_mm_encoder false, but graph mode is what this command measures; "
            "set it to true or leave the option out"
        )
    return found


def parse_token_budgets(text: str) -> tuple[int, ...]:
    """Reads `512,1024,2048` or `[512, 1024]`.

    Raises:
        UsageError: Something in the list is not an integer.
    """
    parts = [part.strip() for part in text.strip().strip("[]").split(",") if part.strip()]
    try:
        return tuple(int(part) for part in parts)
    except ValueError as error:
        raise UsageError(f"--token-budgets is {text!r}; give integers, for example 512,1024,2048") from error
