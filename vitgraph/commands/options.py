"""The command line's shared options: one place for each name, spelled as in `vllm bench mm-processor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

MODEL, WORKLOAD, GRAPHS, RANKS, RUN = "Model", "Workload", "Graph settings", "Several GPUs", "Run and output"

Model = Annotated[
    str | None,
    typer.Option(
        help="Preset (see `vitgraph models`), hub id or local checkpoint folder; unset: a first look.",
        rich_help_panel=MODEL,
    ),
]
Revision = Annotated[str | None, typer.Option(help="Hub revision.", rich_help_panel=MODEL)]
LoadFormat = Annotated[
    str,
    typer.Option(
        help="`auto` reads the encoder's tensors from the checkpoint, `dummy` draws seeded random weights.",
        rich_help_panel=MODEL,
    ),
]
Dtype = Annotated[
    str,
    typer.Option(help="auto (bfloat16 on a GPU), bfloat16, float16 or float32.", rich_help_panel=MODEL),
]
Device = Annotated[str, typer.Option(help="auto, cuda, cuda:N or cpu.", rich_help_panel=MODEL)]
AttnBackend = Annotated[
    str,
    typer.Option(
        "--mm-encoder-attn-backend",
        help="auto, FLASH_ATTN, TORCH_SDPA, … (see `vitgraph models`).",
        rich_help_panel=MODEL,
    ),
]
FlashAttnVersion = Annotated[
    int | None, typer.Option(help="Force this FlashAttention generation for FLASH_ATTN.", rich_help_panel=MODEL)
]
MmProcessorKwargs = Annotated[
    str | None,
    typer.Option(help='Overrides of the image processor, JSON: {"max_pixels": 1003520}.', rich_help_panel=MODEL),
]
CompileBlocks = Annotated[
    bool,
    typer.Option(
        "--compile",
        help="torch.compile the repeated block, in every mode alike; its code is kept in TORCHINDUCTOR_CACHE_DIR, or "
        "in ~/.cache/vitgraph.",
        rich_help_panel=MODEL,
    ),
]
Calibration = Annotated[
    str | None,
    typer.Option(
        help="Profile of `vitgraph calibrate`: a file, or the name of one that comes with vitgraph.",
        rich_help_panel=GRAPHS,
    ),
]
CompileRows = Annotated[
    bool,
    typer.Option(
        "--compile-rows",
        help="Measure four rows in one run: eager and graph, each plain and with the repeated block compiled.",
        rich_help_panel=RUN,
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of the workload, of random pixels and of dummy weights.")]

DatasetName = Annotated[
    str,
    typer.Option(help="random-mm, hf (hub or local parquet), or trace (CSV of sizes).", rich_help_panel=WORKLOAD),
]
DatasetPath = Annotated[
    str | None,
    typer.Option(
        help="hf: hub id, folder or .parquet file. trace: CSV file or a shipped trace "
        "(mixed-chat, documents, screenshots, videos).",
        rich_help_panel=WORKLOAD,
    ),
]
HfName = Annotated[str | None, typer.Option(help="Public name of a local copy.", rich_help_panel=WORKLOAD)]
HfSubset = Annotated[str | None, typer.Option(help="Configuration of the data set.", rich_help_panel=WORKLOAD)]
HfSplit = Annotated[str | None, typer.Option(help="Split; train by default.", rich_help_panel=WORKLOAD)]
NoStream = Annotated[bool, typer.Option("--no-stream", help="Load the whole data set.", rich_help_panel=WORKLOAD)]
DisableShuffle = Annotated[
    bool, typer.Option("--disable-shuffle", help="Keep the data set's order.", rich_help_panel=WORKLOAD)
]
NoOversample = Annotated[
    bool, typer.Option("--no-oversample", help="Do not repeat rows of a short data set.", rich_help_panel=WORKLOAD)
]
NumPrompts = Annotated[int | None, typer.Option(help="Requests to measure; 1000.", rich_help_panel=WORKLOAD)]
NumWarmups = Annotated[int, typer.Option(help="Other requests to warm up with.", rich_help_panel=WORKLOAD)]
BaseItems = Annotated[
    int,
    typer.Option("--random-mm-base-items-per-request", help="Items of a random-mm request.", rich_help_panel=WORKLOAD),
]
RangeRatio = Annotated[
    float,
    typer.Option(
        "--random-mm-num-mm-items-range-ratio", help="Spread of that count, 0 to 1.", rich_help_panel=WORKLOAD
    ),
]
LimitMm = Annotated[
    str | None,
    typer.Option(
        "--random-mm-limit-mm-per-prompt", help='Most items of each modality: {"image": 8}.', rich_help_panel=WORKLOAD
    ),
]
BucketConfig = Annotated[
    str | None,
    typer.Option(
        "--random-mm-bucket-config",
        help='Probability by (height, width, frames): {"(336,336,1)": 1.0}.',
        rich_help_panel=WORKLOAD,
    ),
]
MaxPixels = Annotated[
    int | None,
    typer.Option(
        "--max-pixels-per-item", help="Shrink larger items first, as chat front ends do.", rich_help_panel=WORKLOAD
    ),
]
VideoFps = Annotated[
    float | None,
    typer.Option(
        help="Frame rate of trace videos, which the model's loader then samples; unset: frames are already sampled.",
        rich_help_panel=WORKLOAD,
    ),
]
ShuffleTrace = Annotated[
    bool, typer.Option("--shuffle-trace", help="Permute a trace with the seed.", rich_help_panel=WORKLOAD)
]

CompilationConfig = Annotated[
    str | None, typer.Option(help="vLLM's JSON; its encoder_cudagraph fields are read.", rich_help_panel=GRAPHS)
]
TokenBudgets = Annotated[
    str | None, typer.Option(help="Budgets, 512,1024,…; empty: automatic doubling.", rich_help_panel=GRAPHS)
]
MaxItems = Annotated[
    int | None,
    typer.Option("--max-vision-items-per-batch", help="Items in one replay; 0: automatic.", rich_help_panel=GRAPHS),
]
MaxFrames = Annotated[
    int | None,
    typer.Option(
        "--max-frames-per-batch",
        help="Video frames (attention segments) in one replay; unset: automatic, 0: image-only graphs.",
        rich_help_panel=GRAPHS,
    ),
]
Packing = Annotated[
    str,
    typer.Option(
        help="greedy, greedy-defer (vLLM 0.33), exact, or optimal (needs --calibration).", rich_help_panel=GRAPHS
    ),
]
MaxModelLen = Annotated[
    int, typer.Option(help="Tokens that a prompt may have; caps automatic budgets.", rich_help_panel=GRAPHS)
]
MaxBatchedTokens = Annotated[
    int,
    typer.Option(
        "--max-num-batched-tokens", help="Tokens that a call may have; caps automatic budgets.", rich_help_panel=GRAPHS
    ),
]
VideoPruningRate = Annotated[
    float,
    typer.Option(
        help="Video-token pruning of the server; above 0, videos run eagerly, as in vLLM.", rich_help_panel=GRAPHS
    ),
]
SingleSlotTier = Annotated[
    bool,
    typer.Option(
        "--single-slot-tier",
        help="Capture each budget with its largest number of segment slots only, as vLLM does.",
        rich_help_panel=GRAPHS,
    ),
]

TensorParallelSize = Annotated[
    int,
    typer.Option(help="GPUs, each with a process and a whole encoder of its own.", rich_help_panel=RANKS),
]
TpMode = Annotated[
    str,
    typer.Option(
        "--mm-encoder-tp-mode",
        help="data: the GPUs share the items of a call; the only mode for several.",
        rich_help_panel=RANKS,
    ),
]
DpAssignment = Annotated[
    str,
    typer.Option(
        help="Who encodes what: size (pixel rows, as vLLM), or cost (predicted latency, see --calibration).",
        rich_help_panel=RANKS,
    ),
]
RankTimeout = Annotated[
    float,
    typer.Option(help="Seconds that a process waits for another before it gives up.", rich_help_panel=RANKS),
]

Config = Annotated[
    Path | None,
    typer.Option(help="YAML file of these options (see configs/); flags given here win over it.", rich_help_panel=RUN),
]
Rounds = Annotated[int, typer.Option(help="Times that every request is measured in every mode.", rich_help_panel=RUN)]
RequestsPerCall = Annotated[int, typer.Option(help="Requests that are encoded together.", rich_help_panel=RUN)]
Baseline = Annotated[
    str,
    typer.Option(
        help="eager; hf, to measure transformers' stock forward too; or monolithic, to measure one graph of both paths "
        "of a two-path model too.",
        rich_help_panel=RUN,
    ),
]
MonolithicCrops = Annotated[
    int | None,
    typer.Option(
        help="Crops that the monolithic graph computes for every image; default: the most that the workload needs.",
        rich_help_panel=RUN,
    ),
]
OutputDir = Annotated[
    Path | None, typer.Option(help="Folder of the record; default: a new one under runs/.", rich_help_panel=RUN)
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a record in that folder.", rich_help_panel=RUN)]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the resolved settings and the plan; run nothing.", rich_help_panel=RUN)
]
JsonOutput = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout instead of tables.", rich_help_panel=RUN)
]
FailOnSlower = Annotated[
    bool, typer.Option("--fail-on-slower", help="Exit with 5 when graphs are slower.", rich_help_panel=RUN)
]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "--disable-tqdm", help="No progress bars on stderr.", rich_help_panel=RUN),
]
