"""The sections that records of several kinds share: one form for one thing, with its meaning and unit at the field, or
beneath it where that takes more than a line.

In files, not measured is null and never 0, and a number that is not finite is the string "nan", "inf" or "-inf".
Gains have one sign everywhere: an improvement is positive where the second of two is faster.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, PlainSerializer, WithJsonSchema

NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
LARGEST_COUNT = 2**53
"""Largest whole number that every reader of JSON holds exactly."""

Number = Annotated[
    float,
    BeforeValidator(lambda value: NOT_FINITE.get(value, value) if isinstance(value, str) else value),
    PlainSerializer(lambda value: value if math.isfinite(value) else str(value), when_used="json"),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"enum": list(NOT_FINITE)}]}),
]
"""A float that may be nan or infinite."""
Finite = Annotated[float, Field(allow_inf_nan=False)]
Time = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
ReplayMode = Literal["cuda", "cpu-replay"]
"""The second where graphs were stood in for on a CPU, which saves no launches."""


def value_at(thing: Any, path: str) -> Any:
    """What stands at names with dots between; None where one of them is missing."""
    for name in path.split("."):
        thing = thing.get(name) if isinstance(thing, Mapping) else getattr(thing, name, None)
    return thing


class Section(BaseModel):
    """A part of a record. Fields that it does not have are refused, so that a misspelt one is not lost."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    def but(self, **changes: Any) -> Self:
        """The section with other values in some fields, checked as a whole."""
        return self.model_validate({**dict(self), **changes})


# -- what was run, and on what -----------------------------------------------------------------------------------------


class MonolithicPlan(Section):
    """The graphs that hold both paths of a model, as they were planned."""

    max_crops: Count = Field(description="Crops that they compute for every image.")
    item_tokens: Count = Field(description="Rows that every image takes.")
    token_budgets: dict[str, tuple[Count, ...]] = Field(description="Budgets of each path, ascending, in tokens.")
    max_vision_items_per_batch: Count = Field(description="Items that a replay may hold.")
    graphs: Count = Field(description="Graphs to capture.")


class Resolved(Section):
    """What was run: what the settings came to. Readers of a record need this and not its settings."""

    model: str = Field(description="Preset, hub id or folder, as given.")
    architecture: str | None = Field(default=None, description="Class name in the model's configuration.")
    row: str | None = Field(default=None, description="Row of the table of supported models.")
    config_source: str | None = Field(default=None, description="Source of the configuration: `preset`, hub or folder.")
    revision: str | None = Field(default=None, description="Hub revision.")
    load_format: str | None = Field(default=None, description="`auto` for checkpoint weights, `dummy` for random ones.")
    processor: dict[str, JsonValue] = Field(default={}, description="Overrides of the image processor.")
    dtype: str | None = Field(default=None, description="Dtype asked for, `auto` included.")
    attn_backend: str | None = Field(default=None, description="Attention backend asked for; null for an open choice.")
    compile: bool = Field(default=False, description="The repeated block was compiled, in every mode alike.")
    packing: str | None = Field(default=None, description="Packing policy.")
    token_budgets: dict[str, tuple[Count, ...]] = Field(default={}, description="Token budgets by path, ascending.")
    max_vision_items_per_batch: Count | None = Field(default=None, description="Items that a replay may hold.")
    max_frames_per_batch: Count | None = Field(default=None, description="Frames that a replay holds; 0: image-only.")
    slot_tiers: bool = Field(default=True, description="Each budget has graphs of several numbers of segment slots.")
    video_pruning_rate: Share = 0.0
    """Pruned share of video tokens; above 0 they run eagerly."""
    graphs: Count | None = Field(default=None, description="Graphs to capture.")
    requests_per_call: Count | None = Field(default=1, description="Requests that are encoded together.")
    rounds: Count | None = Field(default=None, description="Times that every call is measured in every series.")
    ranks: Count = Field(default=1, description="Processes that share every call, each with a device and an encoder.")
    assignment: str | None = Field(default=None, description="Items shared by `size` (pixel rows) or predicted `cost`.")
    monolithic: MonolithicPlan | None = Field(default=None, description="Graphs of both paths in one, where measured.")


THROTTLE_REASONS = ("hw_slowdown", "hw_thermal_slowdown", "sw_thermal_slowdown")
"""Reasons that make a run invalid; a power cap under full load is how the card is set, and only recorded."""


class GpuState(Section):
    """One reading of the driver's tool."""

    values: dict[str, str] = Field(description="Query name to what `nvidia-smi` prints, in W, °C and MHz.")
    other_processes: Count = Field(description="Processes of other programs that computed on the GPU.")

    @property
    def throttled_by(self) -> tuple[str, ...]:
        """Active slowdown reasons, thermal or hardware."""
        return tuple(name for name in THROTTLE_REASONS if self.values.get(f"clocks_event_reasons.{name}") == "Active")


class CompileCache(Section):
    """What torch's cache of compiled code did."""

    hits: Count = Field(description="Compilations whose code came from the cache.")
    misses: Count = Field(description="Compilations whose code was made anew.")


class Compiled(Section):
    """What regional compilation did."""

    blocks: Count = Field(description="Blocks that were compiled.")
    seconds: Time | None = Field(default=None, description="Time of torch's compiler in the whole run, in s.")
    compilations: Count | None = None
    """How often it compiled; once for each kind of block, more where lengths needed code of their own."""
    cache: CompileCache | None = Field(default=None, description="What torch's cache of compiled code did.")
    cache_dir: str | None = Field(default=None, description="Folder of that cache; null for torch's temporary one.")
    fusions: dict[str, bool | Count] = {}
    """What was fused beyond torch's own choices: by fusion, whether or how often in a block."""


class AttentionChoice(Section):
    """The backend of the attention calls of one shape."""

    rows: Count = Field(description="Packed rows.")
    slots: Count = Field(description="Segment slots.")
    longest: Count = Field(description="Upper bound of the segment lengths, in rows.")
    is_graph: bool = Field(description="It is the shape of a graph's calls; else of eager ones near it.")
    backend: str = Field(description="The fastest backend.")
    milliseconds: dict[str, Time]
    """Time of a mean call in ms, by backend, eagerly what it adds to a layer; empty where a near shape decided."""
    calls: Count = Field(default=0, description="Expected calls of this shape, whose mean the time is; 0: none known.")


class Encoder(Section):
    """The encoder that ran."""

    dtype: str = Field(description="Dtype that ran.")
    parameters: Count | None = Field(default=None, description="Parameters of the encoder.")
    weight_bytes: Count | None = Field(default=None, description="Memory of its weights, in bytes.")
    attn_backend_requested: str | None = Field(default=None, description="Attention backend asked for.")
    attn_backend: str | None = Field(default=None, description="Attention backend that ran.")
    attn_implementation: str | None = Field(default=None, description="What stands behind it: package and version.")
    attn_selection: tuple[dict[str, JsonValue], ...] | None = None
    """Where `auto` chose by measuring: what it found of each candidate."""
    attn_choices: tuple[AttentionChoice, ...] | None = None
    """Which backend each shape of a call went to, where there is a choice: in graphs, and eagerly."""
    attn_plan_build_ms: Time | None = Field(default=None, description="Time of building plans before timing, in ms.")
    compiled: Compiled | None = Field(default=None, description="What compilation did; null without it.")

    @property
    def compiled_blocks(self) -> int:
        """Blocks that were compiled; 0 where none was."""
        return self.compiled.blocks if self.compiled is not None else 0


class GraphKey(Section):
    """One graph. A graph is named by these four."""

    path: str = Field(description="Encoder path; `default` where the model has one path.")
    token_budget: Count = Field(description="Output tokens that the graph can hold.")
    segment_slots: Count = Field(description="Attention segments that the graph can hold; 0 on paths without segments.")
    axis_key: tuple[Count, ...] = Field(default=(), description="Key on further capture axes; empty without any.")


class DroppedGraph(GraphKey):
    """A graph that could not be captured."""

    reason: str = Field(description="Why.")


class Rank(Section):
    """One process of those that shared the items."""

    rank: Count = Field(description="Its number.")
    host: str = Field(description="Name of its host.")
    device: str = Field(description="Its device, as torch names it.")
    device_name: str = Field(description="Name of the GPU, or `CPU`.")
    attn_backend: str | None = Field(default=None, description="Attention backend that ran.")
    captured: Count = Field(default=0, description="Graphs that it captured.")
    dropped: tuple[DroppedGraph, ...] = Field(default=(), description="Graphs that it could not capture.")
    pool_bytes: Count | None = Field(default=None, description="Memory of its graphs' pool, in bytes.")
    buffer_bytes: Count | None = Field(default=None, description="Memory of its static buffers, in bytes.")
    capture_s: Time | None = Field(default=None, description="Time of its captures, warm-up included, in s.")
    problems: tuple[str, ...] = Field(default=(), description="What makes its times invalid; empty in a sound run.")


class Environment(Section):
    """What was measured on and with. Facts of a GPU are null on a CPU; of several ranks they are rank 0's."""

    device: str = Field(description="Name of the GPU, or `CPU`.")
    device_type: Literal["cuda", "cpu"] = Field(description="Type of the device.")
    python: str | None = Field(default=None, description="Version of Python.")
    platform: str | None = Field(default=None, description="Operating system.")
    cpu: str | None = Field(default=None, description="Processor of the host.")
    cpu_count: Count | None = Field(default=None, description="Cores of the host.")
    libraries: dict[str, str | None] = Field(default={}, description="Versions of libraries; null where not installed.")
    gpu_memory_bytes: Count | None = Field(default=None, description="Memory of the GPU, in bytes.")
    multiprocessors: Count | None = Field(default=None, description="Streaming multiprocessors of the GPU.")
    compute_capability: str | None = Field(default=None, description="Compute capability of the GPU.")
    cuda: str | None = Field(default=None, description="Version of CUDA that torch was built with.")
    cudnn: Count | None = Field(default=None, description="Version of cuDNN, as torch numbers it.")
    gpu_states: tuple[GpuState, ...] = ()
    """What the driver's tool said before the run and while measuring; empty where there is no GPU."""
    matrix_rate_tflops: Time | None = Field(default=None, description="Matrix rate measured in its dtype, TFLOP/s.")
    encoder: Encoder | None = Field(default=None, description="The encoder that ran; null for none, or one a row.")
    ranks: tuple[Rank, ...] = Field(default=(), description="Processes that shared the items; empty where it was one.")
    calibration_differences: tuple[str, ...] | None = None
    """Where this run is not what the calibration was measured with, in words; null without one."""


# -- the requests ------------------------------------------------------------------------------------------------------


class SkippedItem(Section):
    """An item that was left out."""

    source: str = Field(description="Which one.")
    reason: str = Field(description="Why.")


class Workload(Section):
    """The requests, their sizes and where they come from."""

    name: str = Field(description="Short name.")
    fingerprint: str = Field(description="Hash of the items' sizes in order; comparable runs have the same.")
    requests: Count = Field(description="Requests.")
    calls: Count = Field(description="Encoder calls that they make.")
    items: Count = Field(description="Images and videos in them.")
    requests_brought: Count | None = None
    """Requests of the workload; more than `requests` where the model's processor takes no item of one."""
    items_brought: Count | None = Field(default=None, description="Items that the workload names, `skipped` included.")
    images: Count = Field(description="Items of one frame.")
    videos: Count = Field(description="Items of several frames.")
    skipped: tuple[SkippedItem, ...] = Field(default=(), description="Items that were left out.")
    provenance: dict[str, JsonValue] = Field(default={}, description="Where the requests come from: facts by name.")
    tokens_per_request: dict[str, Time] = Field(default={}, description="Percentiles of its output tokens, by name.")


AUTO = "auto"


def costs_ms(choices: Iterable[AttentionChoice], is_graph: bool) -> dict[str, float]:
    """Attention time of a layer over the calls that were expected, in ms, the least first.

    Args:
        is_graph: Of the graphs' replays; else of calls run eagerly.

    Returns:
        By backend where it alone ran them all, and `auto` for the choices; empty where no calls were known.
    """
    timed = [one for one in choices if one.is_graph == is_graph and one.calls and one.milliseconds]
    if not timed:
        return {}
    able = set.intersection(*(set(one.milliseconds) for one in timed))
    totals = {name: sum(one.milliseconds[name] * one.calls for one in timed) for name in able}
    totals[AUTO] = sum(one.milliseconds[one.backend] * one.calls for one in timed)
    return dict(sorted(totals.items(), key=lambda pair: pair[1]))


def for_calls(choices: Iterable[AttentionChoice], rows: Mapping[int, int]) -> tuple[AttentionChoice, ...]:
    """The choices of graphs with the calls that each would have: a call goes to the smallest graph that holds it.

    Args:
        rows: How many calls there are, by their packed rows; those above the largest graph count as its own.
    """
    graphs = sorted((one for one in choices if one.is_graph and one.milliseconds), key=lambda one: one.rows)
    calls: Counter[int] = Counter()
    for height, count in rows.items():
        calls[next((place for place, one in enumerate(graphs) if one.rows >= height), len(graphs) - 1)] += count
    return tuple(one.model_copy(update={"calls": calls[place]}) for place, one in enumerate(graphs))


def best_alone(choices: Sequence[AttentionChoice]) -> str | None:
    """The backend that is fastest where an engine has one for all: over the graphs' replays, else over eager calls.

    Variants (`FLASH_ATTN:2`) are left out, as an engine's setting names none. None where nothing was timed.
    """
    costs = costs_ms(choices, is_graph=True) or costs_ms(choices, is_graph=False)
    return next((name for name in costs if name != AUTO and ":" not in name), None)


def choices_text(choices: Sequence[AttentionChoice]) -> str:
    """In a line: who takes which calls, and what each backend alone would have cost; empty without choices."""
    return "; ".join(filter(None, (_mode_text(choices, is_graph) for is_graph in (True, False))))


def _mode_text(choices: Sequence[AttentionChoice], is_graph: bool) -> str:
    rows: dict[str, list[int]] = {}
    for one in choices:
        if one.is_graph == is_graph:
            rows.setdefault(one.backend, []).append(one.rows)
    if not rows:
        return ""
    taken = ", ".join(f"{name} at {_span(of)} rows" for name, of in rows.items())
    costs = costs_ms(choices, is_graph)
    own = costs.pop(AUTO, 0.0)
    alone = ", ".join(f"{name} {cost / own:.2f}x" for name, cost in costs.items() if own)
    return f"{'graphs' if is_graph else 'eager calls'}: {taken}" + (f" (one backend alone: {alone})" if alone else "")


def _span(rows: Sequence[int]) -> str:
    low, high = min(rows), max(rows)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
