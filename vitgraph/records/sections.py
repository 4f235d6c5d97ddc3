"""The sections that records of several kinds share: one form for one thing, with its meaning and unit at the field.

In files, not measured is null and never 0, and a number that is not finite is the string "nan", "inf" or "-inf".
Gains have one sign everywhere: an improvement is positive where the second of two is faster.
"""

from __future__ import annotations

import math
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


class Section(BaseModel):
    """A part of a record. Fields that it does not have are refused, so that a misspelt one is not lost."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    def but(self, **changes: Any) -> Self:
        """The section with other values in some fields, checked as a whole.

        Raises:
            pydantic.ValidationError: The values break a rule of the section.
        """
        return self.model_validate({**dict(self), **changes})


# -- what was run, and on what -----------------------------------------------------------------------------------------


class MonolithicPlan(Section):
    """The graphs that hold both paths of a model, as they were planned."""

    max_crops: Count
    """Crops that they compute for every image."""
    item_tokens: Count
    """Rows that every image takes."""
    token_budgets: dict[str, tuple[Count, ...]]
    """Budgets of each path, ascending, in tokens."""
    max_vision_items_per_batch: Count
    """Items that a replay may hold."""
    graphs: Count
    """Graphs to capture."""


class Resolved(Section):
    """What was run: what the settings came to. Readers of a record need this and not its settings."""

    model: str
    """Preset, hub id or folder, as given."""
    architecture: str | None = None
    """Class name in the model's configuration."""
    row: str | None = None
    """Row of the table of supported models."""
    config_source: str | None = None
    """Where the configuration came from: `preset`, hub or folder."""
    revision: str | None = None
    """Hub revision."""
    load_format: str | None = None
    """`auto` for checkpoint weights, `dummy` for random ones."""
    processor: dict[str, JsonValue] = {}
    """Overrides of the image processor."""
    dtype: str | None = None
    """Dtype asked for, `auto` included."""
    attn_backend: str | None = None
    """Attention backend asked for; null where the choice was left open."""
    compile: bool = False
    """The repeated block was compiled, in every mode alike."""
    packing: str | None = None
    """Packing policy."""
    token_budgets: dict[str, tuple[Count, ...]] = {}
    """Budgets of each path, ascending, in tokens."""
    max_vision_items_per_batch: Count | None = None
    """Items that a replay may hold."""
    max_frames_per_batch: Count | None = None
    """Video frames that a replay may hold; 0 is image-only."""
    slot_tiers: bool = True
    """Each budget was captured with several numbers of segment slots."""
    video_pruning_rate: Share = 0.0
    """Share of video tokens that the server prunes; above 0 videos run eagerly."""
    graphs: Count | None = None
    """Graphs to capture."""
    requests_per_call: Count | None = 1
    """Requests that are encoded together."""
    rounds: Count | None = None
    """Times that every call is measured in every series."""
    ranks: Count = 1
    """Processes that share every call, each with a device and a whole encoder of its own."""
    assignment: str | None = None
    """Who encodes what on several ranks: `size`, by pixel rows, or `cost`, by predicted latency."""
    monolithic: MonolithicPlan | None = None
    """The graphs of both paths in one, where they were measured too."""


THROTTLE_REASONS = ("hw_slowdown", "hw_thermal_slowdown", "sw_thermal_slowdown")
"""Reasons that make a run invalid; a power cap under full load is how the card is set, and only recorded."""


class GpuState(Section):
    """One reading of the driver's tool."""

    values: dict[str, str]
    """Query name to text, as `nvidia-smi` prints it: power in W, temperature in °C, clocks in MHz."""
    other_processes: Count
    """Processes of other programs that computed on the GPU."""

    @property
    def throttled_by(self) -> tuple[str, ...]:
        """Active slowdown reasons, thermal or hardware."""
        return tuple(name for name in THROTTLE_REASONS if self.values.get(f"clocks_event_reasons.{name}") == "Active")


class CompileCache(Section):
    """What torch's cache of compiled code did."""

    hits: Count
    """Compilations whose code came from the cache."""
    misses: Count
    """Compilations whose code was made anew."""


class Compiled(Section):
    """What regional compilation did."""

    blocks: Count
    """Blocks that were compiled."""
    seconds: Time | None = None
    """Time of torch's compiler in the whole run, in s."""
    compilations: Count | None = None
    """How often it compiled; once for each kind of block, more where lengths needed code of their own."""
    cache: CompileCache | None = None
    """What torch's cache of compiled code did."""
    cache_dir: str | None = None
    """Folder of that cache; null where it is torch's temporary one."""
    fusions: dict[str, bool | Count] = {}
    """What was fused beyond torch's own choices: by fusion, whether or how often in a block."""


class AttentionChoice(Section):
    """The backend of the attention calls of one shape."""

    rows: Count
    """Packed rows."""
    slots: Count
    """Segment slots."""
    longest: Count
    """Upper bound of the segment lengths, in rows."""
    is_graph: bool
    """It is the shape of a graph's calls; else of eager ones near it."""
    backend: str
    """The fastest backend."""
    milliseconds: dict[str, Time]
    """Time of a mean call in ms, by backend, eagerly what it adds to a layer; empty where a near shape decided."""
    calls: Count = 0
    """Calls of this shape that were expected, of which the time is the mean; 0 where none were known."""


class Encoder(Section):
    """The encoder that ran."""

    dtype: str
    """Dtype that ran."""
    parameters: Count | None = None
    """Parameters of the encoder."""
    weight_bytes: Count | None = None
    """Memory of its weights, in bytes."""
    attn_backend_requested: str | None = None
    """Attention backend asked for."""
    attn_backend: str | None = None
    """Attention backend that ran."""
    attn_implementation: str | None = None
    """What stands behind it: package and version."""
    attn_selection: tuple[dict[str, JsonValue], ...] | None = None
    """Where `auto` chose by measuring: what it found of each candidate."""
    attn_choices: tuple[AttentionChoice, ...] | None = None
    """Which backend each shape of a call went to, where there is a choice: in graphs, and eagerly."""
    attn_plan_build_ms: Time | None = None
    """Time that the backend spent building plans before anything was timed, in ms."""
    compiled: Compiled | None = None
    """What compilation did; null where nothing was compiled."""

    @property
    def compiled_blocks(self) -> int:
        """Blocks that were compiled; 0 where none was."""
        return self.compiled.blocks if self.compiled is not None else 0


class GraphKey(Section):
    """One graph. A graph is named by these four."""

    path: str
    """Encoder path; `default` where the model has one path."""
    token_budget: Count
    """Output tokens that the graph can hold."""
    segment_slots: Count
    """Attention segments that the graph can hold; 0 on paths without segments."""
    axis_key: tuple[Count, ...] = ()
    """Key on the model's further capture axes; empty without any."""


class DroppedGraph(GraphKey):
    """A graph that could not be captured."""

    reason: str
    """Why."""


class Rank(Section):
    """One process of those that shared the items."""

    rank: Count
    """Its number."""
    host: str
    """Name of its host."""
    device: str
    """Its device, as torch names it."""
    device_name: str
    """Name of the GPU, or `CPU`."""
    attn_backend: str | None = None
    """Attention backend that ran."""
    captured: Count = 0
    """Graphs that it captured."""
    dropped: tuple[DroppedGraph, ...] = ()
    """Graphs that it could not capture."""
    pool_bytes: Count | None = None
    """Memory of its graphs' pool, in bytes."""
    buffer_bytes: Count | None = None
    """Memory of its static buffers, in bytes."""
    capture_s: Time | None = None
    """Time of its captures, warm-up included, in s."""
    problems: tuple[str, ...] = ()
    """What makes its times invalid: throttling, other processes; empty in a sound run."""


class Environment(Section):
    """What was measured on and with. Facts of a GPU are null on a CPU; of several ranks they are rank 0's."""

    device: str
    """Name of the GPU, or `CPU`."""
    device_type: Literal["cuda", "cpu"]
    """Type of the device."""
    python: str | None = None
    """Version of Python."""
    platform: str | None = None
    """Operating system."""
    cpu: str | None = None
    """Processor of the host."""
    cpu_count: Count | None = None
    """Cores of the host."""
    libraries: dict[str, str | None] = {}
    """Version of each library that matters; null where it is not installed."""
    gpu_memory_bytes: Count | None = None
    """Memory of the GPU, in bytes."""
    multiprocessors: Count | None = None
    """Streaming multiprocessors of the GPU."""
    compute_capability: str | None = None
    """Compute capability of the GPU."""
    cuda: str | None = None
    """Version of CUDA that torch was built with."""
    cudnn: Count | None = None
    """Version of cuDNN, as torch numbers it."""
    gpu_states: tuple[GpuState, ...] = ()
    """What the driver's tool said before the run and while measuring; empty where there is no GPU."""
    matrix_rate_tflops: Time | None = None
    """Matrix rate measured on the device in the run's dtype, in TFLOP/s."""
    encoder: Encoder | None = None
    """The encoder that ran; null where none was loaded, or each row has its own."""
    ranks: tuple[Rank, ...] = ()
    """The processes that shared the items, by rank; empty in a run of one process."""
    calibration_differences: tuple[str, ...] | None = None
    """Where this run is not what the calibration was measured with, in words; null without one."""


# -- the requests ------------------------------------------------------------------------------------------------------


class SkippedItem(Section):
    """An item that was left out."""

    source: str
    """Which one."""
    reason: str
    """Why."""


class Workload(Section):
    """The requests, their sizes and where they come from."""

    name: str
    """Short name."""
    fingerprint: str
    """Hash of the ordered sizes of the requests' items. Two runs are comparable only where it is equal."""
    requests: Count
    """Requests."""
    calls: Count
    """Encoder calls that they make."""
    items: Count
    """Images and videos in them."""
    requests_brought: Count | None = None
    """Requests of the workload; more than `requests` where the model's processor takes no item of one."""
    items_brought: Count | None = None
    """Items that the workload names: `items` and those of `skipped`."""
    images: Count
    """Items of one frame."""
    videos: Count
    """Items of several frames."""
    skipped: tuple[SkippedItem, ...] = ()
    """Items that were left out."""
    provenance: dict[str, JsonValue] = {}
    """Where the requests come from: facts by name."""
    tokens_per_request: dict[str, Time] = {}
    """Percentiles of the output tokens of a request, by name (`p50`)."""
