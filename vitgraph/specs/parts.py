"""What commands have in common: which encoder, its graphs, the workload, the measuring, the ranks, and the shell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitgraph.errors import UsageError
from vitgraph.specs.fields import Option, Spec, option
from vitgraph.specs.values import (
    MOST_INT,
    at_least,
    between,
    one_of,
    options_of_compilation_config,
    parse_buckets,
    parse_limits,
    parse_processor_kwargs,
    parse_requests_per_call,
    parse_token_budgets,
    parse_tokens,
    parse_video_limit,
    preset_names,
)

MODEL, WORKLOAD, GRAPHS, RANKS, RUN = "Model", "Workload", "Graph settings", "Several GPUs", "Run and output"
TRAFFIC = "Arrivals"

DEFAULT_MAX_MODEL_LEN = 32768
DEFAULT_MAX_NUM_BATCHED_TOKENS = 16384
"""vLLM's defaults of what one encoder call may hold on a large GPU; they only bound automatic budgets."""

DEFAULT_TRACE = "mixed-chat"
RANDOM_MM, HF, TRACE = ("random-mm", "hf", "trace")
MOST_LIMIT = 2**20
"""Items and frames that a replay may be asked to hold."""


def seed_option() -> Any:
    return option(
        0, "Seed of the workload, of random pixels and of dummy weights.", panel="", rule=at_least(0, most=MOST_INT)
    )


def folder_option() -> Any:
    """The field of the folder of a record."""
    return option(None, "Folder of the record; default: a new one under runs/.", panel=RUN)


SAME_MARGIN_PCT = 2.0
"""Differences that nobody would change a server for: within it two things are the same, unless asked otherwise."""


def same_margin_option() -> Any:
    """The field of the margin of the verdict `same`."""
    return option(
        SAME_MARGIN_PCT,
        "Percent within which the whole interval must lie for the verdict `same`.",
        "--same-margin",
        panel=RUN,
        rule=between(0, 100, "a share in percent above 0 and below 100, for example 2", open_ends=True),
    )


def overwrite_option(what: str = "a record in that folder") -> Any:
    """The field that lets a result replace one."""
    return option(False, f"Replace {what}.", panel=RUN)


@dataclass(frozen=True)
class ModelSpec(Spec):
    """Which encoder, and how it runs."""

    PANEL = MODEL

    model: str = option(
        "",
        "Preset (see `vitgraph models`), hub id or local checkpoint folder; unset: a first look.",
        completes=preset_names,
    )
    revision: str | None = option(None, "Hub revision.")
    load_format: str = option(
        "auto",
        "`auto` reads the encoder's tensors from the checkpoint, `dummy` draws seeded random weights.",
        rule=one_of("auto", "dummy"),
    )
    dtype: str = option("auto", "auto (bfloat16 on a GPU), bfloat16, float16 or float32.")
    device: str = option("auto", "auto, cuda, cuda:N or cpu.")
    attn_backend: str = option(
        "auto", "auto, FLASH_ATTN, TORCH_SDPA, … (see `vitgraph models`).", "--mm-encoder-attn-backend"
    )
    flash_attn_version: int | None = option(
        None, "Force this FlashAttention generation for FLASH_ATTN.", rule=at_least(1, most=99)
    )
    mm_processor_kwargs: Mapping[str, Any] = option(
        dict, 'Overrides of the image processor, JSON: {"max_pixels": 1003520}.', parse=parse_processor_kwargs
    )
    compile: bool = option(
        False,
        "torch.compile the repeated block, in every mode alike; its code is kept in TORCHINDUCTOR_CACHE_DIR, or in "
        "~/.cache/vitgraph.",
    )
    seed: int = seed_option()

    def check_named(self) -> None:
        """Refuses to go without a model."""
        if not self.model:
            raise UsageError("no model given; pass --model PRESET, hub id or folder (`vitgraph models` lists them)")


@dataclass(frozen=True)
class GraphSpec(Spec):
    """Graph settings as given; empty, 0 and None mean automatic, as in vLLM's compilation config."""

    PANEL = GRAPHS
    ALIASES = (
        Option(
            "vLLM's JSON; its encoder_cudagraph fields are read.",
            GRAPHS,
            ("--compilation-config", "-cc"),
            options_of_compilation_config,
        ),
    )

    token_budgets: tuple[int, ...] = option(
        (), "Budgets, 512,1024,…; empty: automatic doubling.", parse=parse_token_budgets
    )
    max_vision_items_per_batch: int = option(0, "Items in one replay; 0: automatic.", rule=at_least(0, most=MOST_LIMIT))
    max_frames_per_batch: int | None = option(
        None,
        "Video frames (attention segments) in one replay; unset: automatic, 0: image-only graphs.",
        rule=at_least(0, most=MOST_LIMIT),
    )
    packing: str = option(
        "greedy",
        "greedy, greedy-defer (vLLM 0.33), exact, or optimal (needs --calibration).",
        rule=one_of("greedy", "greedy-defer", "exact", "optimal"),
    )
    calibration: str | None = option(
        None, "Profile of `vitgraph calibrate`: a file, or the name of one that comes with vitgraph."
    )
    max_model_len: int = option(
        DEFAULT_MAX_MODEL_LEN,
        "Tokens that a prompt may have; caps automatic budgets.",
        parse=lambda value: parse_tokens(value, "--max-model-len"),
        rule=at_least(1, " token", most=2**31 - 1),
    )
    max_num_batched_tokens: int = option(
        DEFAULT_MAX_NUM_BATCHED_TOKENS,
        "Tokens that a call may have; caps automatic budgets.",
        parse=lambda value: parse_tokens(value, "--max-num-batched-tokens"),
        rule=at_least(1, " token", most=2**31 - 1),
    )
    video_limit_per_prompt: int | None = option(
        None,
        'Most items that the server takes in a prompt, JSON: {"image": 4, "video": 0}. Its videos decide what graphs '
        "hold: 0 makes them image-only, as in vLLM; unset: as the workload has.",
        "--limit-mm-per-prompt",
        parse=parse_video_limit,
        rule=at_least(0, most=MOST_LIMIT),
    )
    video_pruning_rate: float = option(
        0.0,
        "Video-token pruning of the server; above 0, videos run eagerly, as in vLLM.",
        rule=lambda rate: None if 0.0 <= rate < 1.0 else "it must be at least 0 and below 1",
    )
    enforce_eager: bool = option(
        False, "Measure eager alone, without graphs, as cudagraph_mm_encoder false in a compilation config asks for."
    )
    slot_tiers: bool = option(
        True,
        "Capture each budget with its largest number of segment slots only, as vLLM does.",
        "--single-slot-tier",
        turns_off=True,
    )

    @property
    def max_call_tokens(self) -> int:
        """Output tokens that one encoder call may hold; bounds automatic budgets."""
        return min(self.max_model_len, self.max_num_batched_tokens)


@dataclass(frozen=True)
class WorkloadSpec(Spec):
    """Every option of a workload, with the defaults of `vllm bench mm-processor`."""

    PANEL = WORKLOAD

    dataset_name: str = option(RANDOM_MM, "random-mm, hf (hub or local parquet), or trace (CSV of sizes).")
    dataset_path: str | None = option(
        None,
        "hf: hub id, folder or .parquet file. trace: CSV file or a shipped trace (mixed-chat, documents, screenshots, "
        "videos).",
    )
    hf_name: str | None = option(None, "Public name of a local copy.")
    hf_subset: str | None = option(None, "Configuration of the data set.")
    hf_split: str | None = option(None, "Split; train by default.")
    stream: bool = option(True, "Load the whole data set.", "--no-stream", turns_off=True)
    disable_shuffle: bool = option(False, "Keep the data set's order.")
    first_image_only: bool = option(False, "Take the first image of a row alone, as vLLM does.")
    no_oversample: bool = option(False, "Do not repeat rows of a short data set.")
    num_prompts: int = option(1000, "Requests to measure.", rule=at_least(1, ", for example 1000"))
    num_warmups: int = option(1, "Other requests to warm up with.", rule=at_least(0, most=10**5))
    seed: int = seed_option()
    random_mm_base_items_per_request: int = option(1, "Items of a random-mm request.", rule=at_least(1))
    random_mm_num_mm_items_range_ratio: float = option(0.0, "Spread of that count, 0 to 1.")
    random_mm_limit_mm_per_prompt: dict[str, int] = option(
        lambda: {"image": 255, "video": 1}, 'Most items of each modality: {"image": 8}.', parse=parse_limits
    )
    random_mm_bucket_config: dict[tuple[int, int, int], float] = option(
        lambda: {(256, 256, 1): 0.5, (720, 1280, 1): 0.5, (720, 1280, 16): 0.0},
        'Probability by (height, width, frames): {"(336,336,1)": 1.0}.',
        parse=parse_buckets,
    )
    max_pixels_per_item: int | None = option(
        None,
        "Shrink larger items first, as chat front ends do.",
        rule=at_least(1, ", for example 2000000", most=10**18),
    )
    video_fps: float | None = option(
        None,
        "Frame rate of trace videos, which the model's loader then samples; unset: frames are already sampled.",
        rule=between(0.001, 1e6, "a number of frames a second from 0.001 to 1,000,000, for example 29.97"),
    )
    shuffle_trace: bool = option(False, "Permute a trace with the seed.")

    @classmethod
    def defaults_for(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Options of random-mm ask for it; a trace without a path is the shipped mixed one."""
        if "dataset_name" not in given and any(name.startswith("random_mm_") for name in given):
            return {"dataset_name": RANDOM_MM}
        is_trace = given.get("dataset_name", TRACE) == TRACE
        return {"dataset_path": DEFAULT_TRACE} if is_trace and "dataset_path" not in given else {}


EAGER_BASELINE, _, HF_BASELINE, MONOLITHIC_BASELINE = BASELINES = ("eager", "itemwise", "hf", "monolithic")
"""What graphs are measured against: eager alone; or also eager with one item of a call at a time, transformers' stock
forward, or one graph of both paths."""


@dataclass(frozen=True)
class RunSpec(Spec):
    """How the measuring is done and where its result goes."""

    PANEL = RUN

    rounds: int = option(2, "Times to measure every request in every mode.", rule=at_least(1, most=10**4))
    requests_per_call: str | None = option(
        None,
        "Requests that are encoded together: 4, or a mix with the shares of the calls, 1:0.6,2:0.3,4:0.1; unset: the "
        "calls that a trace names, else 1.",
        parse=parse_requests_per_call,
    )
    baseline: str = option(
        EAGER_BASELINE,
        "eager; itemwise, to measure eager with one item of a call at a time too; hf, to measure transformers' stock "
        "forward too; or monolithic, to measure one graph of both paths of a two-path model too.",
        rule=one_of(*BASELINES),
    )
    monolithic_crops: int | None = option(
        None,
        "Crops that the monolithic graph computes for every image; default: the most that the workload needs.",
        rule=at_least(1, " crop", most=4096),
    )
    output_dir: Path | None = folder_option()
    overwrite: bool = overwrite_option()
    same_margin_pct: float = same_margin_option()
    fail_on_slower: bool = option(False, "Exit with 5 when graphs are slower.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.monolithic_crops is not None and self.baseline != MONOLITHIC_BASELINE:
            raise UsageError(
                f"--monolithic-crops is {self.monolithic_crops}, but no monolithic graph is measured; add "
                f"--baseline {MONOLITHIC_BASELINE} or leave it out"
            )


@dataclass(frozen=True)
class TrafficSpec(Spec):
    """How requests arrive, and what is assumed of the engine that calls the encoder for them."""

    PANEL = TRAFFIC

    request_rate: str | None = option(
        None,
        "Requests a second, or `trace` for the arrivals that a trace names: replayed through a model of vLLM's "
        "scheduler, which makes the calls; needs a calibration for the encoder's times.",
        parse=lambda value: str(value).strip(),
    )
    lm_step_ms: float = option(
        10.0, "Assumed time of a step of the language model.", rule=between(0, 1e6, "0 ms or more, at most 1,000,000")
    )
    lm_us_per_token: float = option(
        20.0,
        "Assumed time that each prompt token adds to a step.",
        rule=between(0, 1e6, "0 us or more, at most 1,000,000"),
    )
    text_tokens: int = option(64, "Assumed text tokens of a prompt.", rule=at_least(0))
    answer_tokens: int = option(256, "Assumed tokens of an answer.", rule=at_least(1, most=10**6))


@dataclass(frozen=True)
class ParallelSpec(Spec):
    """How many processes encode a call together, each on a device of its own."""

    PANEL = RANKS

    ranks: int = option(
        1,
        "GPUs, each with a process and a whole encoder of its own.",
        "--tensor-parallel-size",
        "-tp",
        rule=at_least(1, most=1024),
    )
    tp_mode: str = option(
        "weights",
        "data: the GPUs share the items of a call; the only mode for several.",
        "--mm-encoder-tp-mode",
        rule=one_of("data", "weights"),
    )
    assignment: str = option(
        "size",
        "Who encodes what: size (pixel rows, as vLLM), or cost (predicted latency, see --calibration).",
        "--dp-assignment",
        rule=one_of("size", "cost"),
    )
    rank_timeout_s: float = option(
        60.0,
        "Seconds that a process waits for another before it gives up.",
        "--rank-timeout",
        rule=between(0, 1e6, "above 0 seconds, and at most 1,000,000", open_ends=True),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ranks > 1 and self.tp_mode != "data":
            raise UsageError(
                f"--tensor-parallel-size is {self.ranks} with --mm-encoder-tp-mode {self.tp_mode}, which splits the "
                "tower over the GPUs and is not supported; add --mm-encoder-tp-mode data, where each GPU runs the "
                "whole encoder on a share of the items"
            )


@dataclass(frozen=True)
class ShellSpec(Spec):
    """How a command talks; no setting of what it does."""

    PANEL = RUN

    config: Path | None = option(None, "YAML file of these options (see configs/); flags given here win over it.")
    dry_run: bool = option(False, "Check everything, print the resolved settings and the plan; run nothing.")
    json: bool = option(False, "Print one JSON object on stdout instead of tables.")
    quiet: bool = option(False, "No progress bars on stderr.", "--quiet", "--disable-tqdm")
    debug: bool = option(False, "Show the traceback of an unexpected error.", variable="VITGRAPH_DEBUG")
