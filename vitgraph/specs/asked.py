"""What each command is asked: its parts, its own options, and what contradicts each other in them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitgraph.errors import UsageError
from vitgraph.specs.fields import Spec, option, part
from vitgraph.specs.parts import (
    BASELINES,
    GRAPHS,
    HF_BASELINE,
    MODEL,
    MONOLITHIC_BASELINE,
    RUN,
    SAME_MARGIN_PCT,
    TRACE,
    WORKLOAD,
    GraphSpec,
    ModelSpec,
    ParallelSpec,
    RunSpec,
    ShellSpec,
    TrafficSpec,
    WorkloadSpec,
    folder_option,
    overwrite_option,
)
from vitgraph.specs.values import Size, at_least, between, one_of, parse_items, parse_names, preset_names, refuse_given


def time_limit_option(seconds: float, what: str = "after which no new measurement begins") -> Any:
    """The field of a time limit in seconds."""
    rule = between(0, 1e6, f"above 0 seconds, for example {seconds:g}", open_ends=True)
    return option(float(seconds), f"Seconds {what}.", panel=RUN, rule=rule)


@dataclass(frozen=True)
class BenchSpec(Spec):
    """A `bench` run; also what the other commands measure with."""

    PANEL = RUN

    model: ModelSpec = part(ModelSpec)
    graph: GraphSpec = part(GraphSpec)
    run: RunSpec = part(RunSpec)
    workload: WorkloadSpec = part(WorkloadSpec, dataset_name=TRACE, num_warmups=20)
    parallel: ParallelSpec = part(ParallelSpec)
    traffic: TrafficSpec = part(TrafficSpec)
    compile_rows: bool = option(
        False, "Measure four rows in one run: eager and graph, each plain and with the repeated block compiled."
    )
    shell: ShellSpec = part(ShellSpec)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model.check_named()
        if self.run.requests_per_call is not None and self.traffic.request_rate is not None:
            raise UsageError("--requests-per-call and --request-rate both say which requests a call has; give one")
        # The stock forward runs the very blocks that are compiled, so it would be neither stock nor plain.
        if self.model.compile and self.run.baseline == HF_BASELINE:
            raise UsageError(
                "--baseline hf measures the stock forward, but --compile compiles the blocks that it runs too; leave "
                "one of them out, or measure the stock forward in a run of its own"
            )
        is_monolithic = self.run.baseline == MONOLITHIC_BASELINE
        if is_monolithic and self.parallel.ranks > 1:
            raise UsageError(
                f"--baseline {MONOLITHIC_BASELINE} compares graphs in one process, but --tensor-parallel-size is "
                f"{self.parallel.ranks}; leave one of the two out"
            )
        if is_monolithic and self.graph.packing == "optimal":
            raise UsageError(
                f"--packing optimal weighs times that a calibration has of the two paths and of no monolithic graph; "
                f"use another packing with --baseline {MONOLITHIC_BASELINE}"
            )
        of_graphs = {
            "--compile-rows": self.compile_rows,
            "--fail-on-slower": self.run.fail_on_slower,
            f"--baseline {MONOLITHIC_BASELINE}": is_monolithic,
        }
        if self.graph.enforce_eager:
            refuse_given(of_graphs, "--enforce-eager measures no graphs, and {} is about graphs; leave one of them out")
        beside_rows = {
            "--baseline": self.run.baseline != BASELINES[0],
            "--monolithic-crops": self.run.monolithic_crops is not None,
            "--same-margin": self.run.same_margin_pct != SAME_MARGIN_PCT,
            "--fail-on-slower": self.run.fail_on_slower,
            "--tensor-parallel-size": self.parallel.ranks != 1,
        }
        if self.compile_rows:
            refuse_given(beside_rows, "--compile-rows measures four rows of its own; leave {} out")

    def as_dict(self) -> dict[str, Any]:
        """The settings in the shape of run.json."""
        settings = super().as_dict()
        return {
            **{name: settings[name] for name in ("model", "graph")},
            "bench": settings["run"],
            **{name: settings[name] for name in ("workload", "parallel", "traffic")},
        }


class _AroundBench(Spec):
    bench: BenchSpec

    @property
    def shell(self) -> ShellSpec:
        """How the command talks."""
        return self.bench.shell


@dataclass(frozen=True)
class CompareSpec(_AroundBench):
    """A `compare-backends` run: model, graphs, measuring and workload as for `bench`, but for the backend."""

    PANEL = RUN

    bench: BenchSpec = part(
        BenchSpec,
        without=(*("attn_backend", "baseline", "monolithic_crops", "fail_on_slower", "compile_rows", "enforce_eager"),),
        rounds=1,
        num_warmups=10,
    )
    backends: tuple[str, ...] = option(
        (), "Backends to compare, FLASH_ATTN,FLASHINFER,…; unset: every one.", panel=MODEL, parse=parse_names
    )
    isolate: bool = option(False, "Measure each backend in a process of its own.")
    micro: bool = option(
        False, "Time attention alone with this tower's heads, over segment lengths and slots; no workload is run."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.micro:
            elsewhere = {"--isolate": self.isolate, "--dry-run": self.shell.dry_run}
            refuse_given(elsewhere, "--micro times attention alone, in this process and without a plan; leave {} out")
            ranks = {"--tensor-parallel-size": self.bench.parallel.ranks > 1}
            refuse_given(ranks, "--micro times attention alone, on one GPU; leave {} out")

    def as_dict(self) -> dict[str, Any]:
        """The settings in the shape of run.json."""
        settings = self.bench.as_dict()
        settings["model"]["attn_backend"] = None
        return settings | {"compare": {"backends": list(self.backends), "isolate": self.isolate}}


@dataclass(frozen=True)
class TuneSpec(_AroundBench):
    """A `tune-budgets` run: the traffic, what is wanted of it, and how the result is measured."""

    PANEL = GRAPHS

    bench: BenchSpec = part(
        BenchSpec,
        without=(
            *("token_budgets", "max_vision_items_per_batch", "max_frames_per_batch", "compilation_config"),
            *("packing", "enforce_eager", "slot_tiers", "video_pruning_rate", "rounds", "baseline", "monolithic_crops"),
            *("same_margin_pct", "fail_on_slower", "parallel", "compile_rows", "num_warmups"),
        ),
        num_warmups=0,
    )
    objective: str = option("mean", "mean, p99, throughput, or a weighted mix: mean=0.7,p99=0.3.")
    max_graphs: int | None = option(None, "Graphs to capture at most.", rule=at_least(1))
    max_graph_memory: float | None = option(
        None, "GiB of pool and buffers at most.", rule=between(0, 1e6, "above 0 GiB, for example 4", open_ends=True)
    )
    max_capture_time: float | None = option(
        None, "Seconds of capturing at most.", rule=between(0, 1e6, "above 0 seconds, for example 30", open_ends=True)
    )
    max_slower_share: float = option(
        0.02,
        "Share of the requests that may become slower than eager; without a list that keeps it, graphs stay off.",
        rule=between(0, 1, "from 0 to 1, for example 0.05"),
    )
    search_share: float = option(
        0.5,
        "Share of the calls that is searched on; the settings are judged on the others.",
        rule=lambda share: None if 0 < share <= 1 else "it must be above 0 and at most 1, which holds no calls back",
    )
    target: str = option(
        "vitgraph", "Whose manager runs the settings: vitgraph or vllm.", rule=one_of("vitgraph", "vllm")
    )
    verifies: bool = option(True, "Predict only; measure nothing.", "--no-verify", turns_off=True, panel=RUN)
    verify_calls: int = option(100, "Calls to measure every strategy with.", panel=RUN, rule=at_least(1))
    time_limit: float = time_limit_option(240)


@dataclass(frozen=True)
class RecommendSpec(Spec):
    """A `recommend` run: what is tuned for, and how much it may take to be sure."""

    PANEL = RUN

    tune: TuneSpec = part(TuneSpec, without=("verifies", "target"), target="vllm")
    calibration_time_limit: float = time_limit_option(
        90, "of calibrating after which no new measurement begins; unused with --calibration"
    )
    check_calls: int = option(50, "Random calls to compare replay with eager.", rule=at_least(1))

    @property
    def shell(self) -> ShellSpec:
        """How the command talks."""
        return self.tune.shell


@dataclass(frozen=True)
class CalibrateSpec(Spec):
    """A `calibrate` run."""

    PANEL = RUN

    model: ModelSpec = part(ModelSpec)
    graph: GraphSpec = part(GraphSpec, only=("max_model_len", "max_num_batched_tokens"))
    output: Path | None = option(None, "File of the profile; unset: under runs/.")
    overwrite: bool = overwrite_option("that file")
    time_limit: float = time_limit_option(90)
    shell: ShellSpec = part(ShellSpec)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model.check_named()


@dataclass(frozen=True)
class PlanSpec(_AroundBench):
    """A `plan`: a workload, or one call, and the graphs that would take it."""

    PANEL = WORKLOAD

    items: tuple[Size, ...] = option(
        (),
        "One call instead of a workload: 336x336 (width x height), 20*336x336, 640x360x8 (a video), with commas.",
        parse=parse_items,
    )
    bench: BenchSpec = part(
        BenchSpec,
        without=(
            *("load_format", "dtype", "device", "attn_backend", "flash_attn_version", "compile", "compile_rows"),
            *("rounds", "baseline", "monolithic_crops", "fail_on_slower", "output_dir", "overwrite", "num_warmups"),
            *("rank_timeout_s", "same_margin_pct", "enforce_eager", "dry_run"),
        ),
        num_warmups=0,
    )


@dataclass(frozen=True)
class VerifySpec(Spec):
    """A `verify` run."""

    PANEL = RUN

    models: tuple[str, ...] = option(
        (),
        "Preset, hub id or local checkpoint folder, or several with commas.",
        "--model",
        panel=MODEL,
        parse=parse_names,
        completes=preset_names,
    )
    every_row: bool = option(False, "Every row of `vitgraph models`.", "--all", panel=MODEL)
    debug_size: bool = option(False, "With --all: the small presets.", panel=MODEL)
    calls: int = option(200, "Random calls to compare with eager.", rule=at_least(0))
    model: ModelSpec = part(ModelSpec, without=("model", "mm_processor_kwargs"), load_format="dummy")
    graph: GraphSpec = part(GraphSpec, only=("token_budgets", "max_vision_items_per_batch"))
    parallel: ParallelSpec = part(ParallelSpec, without=("assignment",))
    output_dir: Path | None = option(None, "Folder of the record; unset: none is kept.")
    overwrite: bool = overwrite_option()
    shell: ShellSpec = part(ShellSpec)

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.models) == self.every_row:
            raise UsageError("pass --model with a preset, hub id or folder (or several, with commas), or --all")
        if self.debug_size and not self.every_row:
            raise UsageError("--debug-size chooses among the rows of --all; leave it out, or name small presets")


@dataclass(frozen=True)
class ProfileSpec(Spec):
    """A profile of one call, given by its items, or drawn as random-mm does."""

    PANEL = RUN

    model: ModelSpec = part(ModelSpec, load_format="dummy")
    graph: GraphSpec = part(
        GraphSpec, only=("token_budgets", "max_vision_items_per_batch", "max_frames_per_batch", "packing")
    )
    items: tuple[Size, ...] = option(
        (),
        "The call: 336x336 (width x height), 20*336x336, 640x360x8 (a video), with commas; 1024x768 where a GPU is.",
        panel=WORKLOAD,
        parse=parse_items,
    )
    workload: WorkloadSpec = part(
        WorkloadSpec,
        only=("random_mm_base_items_per_request", "random_mm_bucket_config", "random_mm_limit_mm_per_prompt", "seed"),
        num_prompts=1,
        num_warmups=0,
    )
    repeats: int = option(5, "Traces to average in each mode.", rule=at_least(1, most=10**4))
    chrome_trace: bool = option(False, "Also write a trace of host and device.")
    output_dir: Path | None = folder_option()
    overwrite: bool = overwrite_option()
    shell: ShellSpec = part(ShellSpec)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model.check_named()
        if self.graph.packing == "optimal":
            raise UsageError(
                "--packing optimal weighs predicted times, and a profile has one call; use another packing"
            )
