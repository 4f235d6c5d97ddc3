"""What the commands that run no encoder are asked: workloads, exports, lists, the machine, other servers' lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from vitgraph.errors import UsageError
from vitgraph.specs.fields import Spec, option, part
from vitgraph.specs.parts import (
    HF,
    MODEL,
    RUN,
    SAME_MARGIN_PCT,
    TRACE,
    GraphSpec,
    ModelSpec,
    RunSpec,
    ShellSpec,
    TrafficSpec,
    WorkloadSpec,
    overwrite_option,
    same_margin_option,
)
from vitgraph.specs.values import (
    MOST_COUNT,
    at_least,
    between,
    parse_log_fields,
    parse_percent,
    preset_names,
    refuse_given,
)

WHOLE_TRACE = MOST_COUNT
"""Requests of `workload inspect` and `convert` where no number is asked for: all that there are."""


@dataclass(frozen=True)
class WorkloadInspectSpec(Spec):
    """A `workload inspect`."""

    models: tuple[str, ...] = option(
        ("qwen3-vl-30b-a3b",),
        "Preset, hub id or folder whose tokens to count.",
        "--model",
        is_repeatable=True,
        panel=MODEL,
        completes=preset_names,
    )
    model: ModelSpec = part(ModelSpec, only=("mm_processor_kwargs", "revision"), load_format="dummy", device="cpu")
    workload: WorkloadSpec = part(
        WorkloadSpec, without=("num_warmups", "shuffle_trace"), dataset_name=TRACE, num_warmups=0
    )
    output_dir: Path | None = option(None, "Folder for workload.json and plots of sizes and tokens.", panel=RUN)
    overwrite: bool = overwrite_option("files that are there")
    shell: ShellSpec = part(ShellSpec, without=("dry_run", "quiet"))

    @classmethod
    def defaults_for(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """A trace is read whole."""
        is_trace = given.get("dataset_name", TRACE) == TRACE and "num_prompts" not in given
        return {"num_prompts": WHOLE_TRACE} if is_trace else {}


@dataclass(frozen=True)
class WorkloadMakeSpec(Spec):
    """A `workload make`."""

    output: Path = option(MISSING, "The CSV file to write.", "--output", "-o")
    workload: WorkloadSpec = part(
        WorkloadSpec,
        only=(
            *("num_prompts", "seed", "random_mm_base_items_per_request", "random_mm_num_mm_items_range_ratio"),
            *("random_mm_limit_mm_per_prompt", "random_mm_bucket_config"),
        ),
        num_warmups=0,
    )
    overwrite: bool = overwrite_option("that file")
    shell: ShellSpec = part(ShellSpec, without=("dry_run", "quiet"))


@dataclass(frozen=True)
class WorkloadConvertSpec(Spec):
    """A `workload convert`."""

    source: str = option(
        MISSING,
        "Folder of images, hub data set, folder of parquet files or one of them, or request log.",
        is_argument=True,
    )
    output: Path = option(MISSING, "The CSV file to write.", "--output", "-o")
    kind: str = option("auto", "auto, hf, images, json-lines or text.")
    pattern: str | None = option(
        None,
        "Where a line of a text log names a size: 'size=WxH', 'WxHxF' with frames, or a regular expression with the "
        "groups width and height.",
    )
    height_first: bool = option(False, "Pairs in a JSON log are height before width.")
    fields: dict[str, str] = option(
        dict,
        'Names that a JSON log has for the fields of a size: {"width": "w", "frames": "n_frames"}.',
        parse=parse_log_fields,
    )
    num_prompts: int | None = option(
        None, "Requests; unset: 1000 of a data set, everything of other sources.", rule=at_least(1)
    )
    workload: WorkloadSpec = part(
        WorkloadSpec,
        only=("hf_name", "hf_subset", "hf_split", "stream", "disable_shuffle", "first_image_only", "seed"),
        dataset_name=HF,
        num_warmups=0,
    )
    overwrite: bool = overwrite_option("that file")
    shell: ShellSpec = part(ShellSpec, without=("dry_run", "quiet"))


@dataclass(frozen=True)
class WorkloadCallsSpec(Spec):
    """A `workload calls`."""

    output: Path = option(MISSING, "The CSV file to write.", "--output", "-o")
    model: ModelSpec = part(ModelSpec, only=("model", "mm_processor_kwargs", "revision"), load_format="dummy")
    graph: GraphSpec = part(GraphSpec, only=("calibration", "max_num_batched_tokens"))
    run: RunSpec = part(RunSpec, only=("requests_per_call",))
    traffic: TrafficSpec = part(TrafficSpec)
    workload: WorkloadSpec = part(WorkloadSpec, without=("num_warmups",), dataset_name=TRACE, num_warmups=0)
    overwrite: bool = overwrite_option("that file")
    shell: ShellSpec = part(ShellSpec, without=("dry_run", "quiet"))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model.check_named()
        if (self.run.requests_per_call is None) == (self.traffic.request_rate is None):
            raise UsageError("say which requests a call has, with --request-rate or with --requests-per-call")


@dataclass(frozen=True)
class ExportSpec(Spec):
    """An `export`."""

    runs: tuple[Path, ...] = option(
        (), "Folders of saved runs, or their run.json.", is_argument=True, is_repeatable=True, metavar="RUN"
    )
    compare: tuple[str, str] | None = option(
        None,
        "Runs of the same requests on the same device, B against A; several of either with commas, A1,A2 B1,B2, so "
        "that the noise between processes is measured.",
        metavar="A B",
    )
    fail_on_slower: float | None = option(
        None,
        "With --compare: exit with 5 when graph mode is sure to be slower, and by at least this, for example 2%.",
        metavar="PERCENT",
        parse=parse_percent,
    )
    same_margin_pct: float = same_margin_option()
    across: str | None = option(
        None, "What may differ between the two, for example backend,dtype; unset: any one thing."
    )
    formats: str | None = option(None, "Some of csv, parquet, markdown, latex, plots, html; unset: all of them.")
    markdown: bool = option(
        False, "Print one Markdown table, a bench run (or one with --compile-rows) a line; write no files."
    )
    output_dir: Path | None = option(
        None, "Folder of the files; unset: export/ in the run's folder, or a new one under runs/ for several."
    )
    overwrite: bool = overwrite_option("files of an earlier export")
    shell: ShellSpec = part(ShellSpec, without=("dry_run", "quiet"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.runs) == (self.compare is not None):
            raise UsageError("give one or more runs, or --compare with two of them (and not both)")
        of_comparisons = {
            f"--across is {self.across!r}": self.across is not None,
            "--fail-on-slower is given": self.fail_on_slower is not None,
            f"--same-margin is {self.same_margin_pct:g}": self.same_margin_pct != SAME_MARGIN_PCT,
        }
        if self.compare is None:
            refuse_given(of_comparisons, "{}, but only --compare compares runs; add it, or leave the option out")
        if self.markdown and (self.compare or self.formats or self.output_dir or self.overwrite or self.shell.json):
            raise UsageError("--markdown prints one table of the runs and writes no files; give it runs alone")


@dataclass(frozen=True)
class SweepSpec(Spec):
    """A `sweep`."""

    file: Path = option(
        MISSING,
        "YAML or JSON file: `command` (bench where it is left out), `settings` of all runs, `axes` (option: list of "
        "values) whose combinations are runs, `runs` (list of settings) for others, which may name a `command` too.",
        is_argument=True,
    )
    output_dir: Path | None = option(
        None, "Folder with one folder a run; unset: runs/sweep-NAME of the file's name, so that it goes on.", panel=RUN
    )
    time_limit: float | None = option(
        None,
        "Seconds after which no new run begins; run again, the sweep goes on.",
        panel=RUN,
        rule=between(0, 1e6, "above 0 seconds, for example 600", open_ends=True),
    )
    shell: ShellSpec = part(ShellSpec, without=("config",))


@dataclass(frozen=True)
class ModelsSpec(Spec):
    """A `models` list."""

    markdown: bool = option(False, "Print the tables of the README and of docs/models.md.")
    shell: ShellSpec = part(ShellSpec, without=("config", "dry_run", "quiet"))


@dataclass(frozen=True)
class DoctorSpec(Spec):
    """A `doctor` report."""

    shell: ShellSpec = part(ShellSpec, without=("config", "dry_run", "quiet"))


@dataclass(frozen=True)
class ImportSpec(Spec):
    """An `import` of another server's settings."""

    line: str = option(
        MISSING,
        "A `vllm serve` or SGLang command in quotes, the JSON of --compilation-config, or - (stdin).",
        is_argument=True,
    )
    shell: ShellSpec = part(ShellSpec, without=("config", "dry_run", "quiet"))
