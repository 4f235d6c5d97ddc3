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
Interval = tuple[Number, Number]
Verdict = Literal["faster", "slower", "same", "undecided", "invalid"]
Metric = Literal["mean", "p50", "p99"]


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


# -- latencies and gains -----------------------------------------------------------------------------------------------


class RankPart(Section):
    """One rank's part of a series; times are means in ms a request, counts are of one round."""

    rank: Count
    """Its number."""
    encode_ms: Time
    """Encoding of its share, in ms: between events on a GPU, wall clock on a CPU."""
    wait_ms: Time
    """From there to the moment that the last rank came to the gather, in ms."""
    wall_ms: Time
    """From the common start to the end of the gather on this rank, in ms."""
    idle_calls: Count
    """Calls in which it had no items."""
    items: Count
    """Items of its shares."""
    tokens: Count
    """Their output tokens."""
    hits: Count
    """Its items that were replayed on every path; 0 where nothing is replayed."""
    misses: Count
    """Its items with an eager path; 0 where nothing is replayed."""
    replays: Count
    """Its graph replays."""


class Sharing(Section):
    """How the calls of a series were shared among the ranks."""

    gather_ms: Time
    """Mean time of the gather in ms a request, from the moment that the last rank came to it."""
    time_imbalance: Finite
    """Mean over the calls of the longest encoding of a rank over the ranks' mean; 1 is even."""
    input_imbalance: Finite
    """The same of the ranks' pixel rows."""
    ranks: tuple[RankPart, ...]
    """Each rank's part."""


class Latency(Section):
    """Latency of one series over requests: a call counts as often as it has requests, each with its share of the time.

    A request that was measured in several rounds counts once, with its mean. Times are null where nothing was measured.
    """

    mean_ms: Time | None
    """Mean wall time of a request, in ms."""
    p50_ms: Time | None
    """Median, in ms."""
    p90_ms: Time | None
    """90th percentile, in ms."""
    p99_ms: Time | None
    """99th percentile in ms, always the plain one; see `p99_supported`."""
    p99_supported: bool
    """There are enough requests to speak of a P99; below that, speak of `max_ms`."""
    max_ms: Time | None
    """Largest value, in ms."""
    std_ms: Time | None
    """Standard deviation, in ms."""
    requests: Count
    """Requests that these figures describe."""
    calls: Count
    """Encoder calls that these requests were measured in."""
    outliers: Count
    """Requests beyond 1.5 interquartile ranges of the quartiles; counted, never removed."""
    gpu_mean_ms: Time | None = None
    """Mean time between device events in ms a request; null on a CPU."""
    speed_of_light_ms: Time | None = None
    """Time of the arithmetic of a mean request, without padding, at the measured matrix rate, in ms."""
    times_speed_of_light: Time | None = None
    """`mean_ms` over `speed_of_light_ms`."""
    sharing: Sharing | None = None
    """How the calls were shared among the ranks; null in a run of one process."""


class Improvement(Section):
    """What the second of two series gains over the first, in one metric. Positive = the second is faster."""

    improvement_pct: Number | None
    """(first - second) / first, in percent; null where it is not known."""
    ci95: Interval | None = None
    """Lower and upper end of its 95 % interval in percent, from a bootstrap; null where there are too few calls."""
    noise_floor_pct: Number | None = None
    """What a series differs from itself in this run, in percent; null where it is not known."""
    verdict: Verdict
    """`faster` or `slower` where the whole interval lies beyond the noise floor, `same` where it lies within a margin,
    else `undecided`; `invalid` where the times must not be compared."""


class SlowerRequests(Section):
    """Requests that the second of two series made slower."""

    requests: Count
    """Requests compared."""
    threshold_pct: Number | None
    """Request noise in percent: how far 95 % of the requests stay from themselves when eager is repeated."""
    count: Count | None
    """Requests slower by more than the threshold; null where the noise is not known."""
    share: Share | None
    """`count` over `requests`."""
    over_2pct_count: Count
    """Requests slower by more than 2 %."""
    over_2pct_share: Share | None
    """`over_2pct_count` over `requests`."""


class Pair(Section):
    """Two series of the same calls, compared."""

    base: str
    """The series that percentages refer to."""
    series: str
    """The series that is judged."""
    mean: Improvement
    """The mean latency."""
    p50: Improvement | None = None
    """The median latency."""
    p99: Improvement | None = None
    """The 99th percentile."""
    trimmed_mean: Improvement | None = None
    """The mean without the requests whose calls changed most and least, a share of them at either end."""
    slower: SlowerRequests | None = None
    """Requests that `series` made slower than `base`."""

    def metric(self, name: Metric) -> Improvement | None:
        """The improvement in one metric; None where it was not compared."""
        found: Improvement | None = getattr(self, name)
        return found


class Compared(Section):
    """Which calls the series of a run were compared on."""

    requests: Count = 0
    """Requests measured in all compared series."""
    calls: Count = 0
    """Calls that these requests were measured in."""
    rounds: Count = 0
    """Rounds in which they were."""
    unpaired_samples: Count = 0
    """Samples left out because another compared series is missing in that round."""
    invalid_reasons: tuple[str, ...] = ()
    """Why the times must not be compared; empty in a sound run."""


# -- graphs ------------------------------------------------------------------------------------------------------------


class PathUse(Section):
    """How one encoder path was used."""

    path: str
    """Encoder path."""
    items: Count
    """Items that have rows on the path."""
    hits: Count
    """Items whose rows on the path were replayed."""
    runs: Count
    """Executions of it, replayed or eager."""
    replays: Count
    """Executions of the path that were replayed."""
    tokens_replayed: Count
    """Real output rows of its replays."""
    budget_tokens_replayed: Count
    """Rows that its replays computed, padding included."""
    waste: Number | None
    """Share of the rows of its replays that was padding."""
    replay_ms: Time | None = None
    """Its graphs' replays alone, in ms a request; null unless each of them was timed."""


class PartUse(Section):
    """The rows of one of a model's paths inside monolithic graphs."""

    path: str
    """Encoder path."""
    tokens_replayed: Count
    """Real output rows."""
    budget_tokens_replayed: Count
    """Rows that the replays computed, padding included."""
    waste: Number | None
    """Share of the rows of the replays that was padding."""


class GraphUse(GraphKey):
    """How one graph was used; times are of a replay alone."""

    replays: Count
    """Replays of the graph."""
    items: Count
    """Items in its replays."""
    tokens: Count
    """Real output rows of its replays."""
    segments: Count
    """Real segments in them."""
    waste: Number | None
    """Share of the rows of its replays that was padding."""
    replay_ms: Time | None = None
    """Wall time of a replay, in ms."""
    gpu_busy_ms: Time | None = None
    """Time in it in which the GPU computed, in ms."""
    kernels: Count | None = None
    """GPU kernels of a replay."""
    launch_gap: Time | None = None
    """`replay_ms` over `gpu_busy_ms`."""
    break_even_tokens: Count | None = None
    """Fewest tokens of a single image from which on a replay is predicted to be no slower than eager."""


class Counters(Section):
    """Hits, misses and replays of one round over the workload."""

    items: Count = 0
    """Items seen."""
    hits: Count = 0
    """Items all of whose non-empty paths were replayed."""
    misses: Count = 0
    """Items with an eager path; hits and misses are all items."""
    hit_rate: Share | None = None
    """`hits` over `items`; null of no items."""
    misses_by_reason: dict[str, Count] = {}
    """Misses by reason; they add up to `misses`."""
    partial_hits: Count = 0
    """Misses of which some path was replayed."""
    replays: Count = 0
    """Graph replays."""
    path_runs: Count = 0
    """Executions of a path, replayed or eager."""
    path_replays: Count = 0
    """Executions of a path that were replayed."""
    tokens_replayed: Count = 0
    """Real output rows of the replays."""
    budget_tokens_replayed: Count = 0
    """Rows that the replays computed, padding included."""
    waste: Number | None = None
    """Share of the rows of the replays that was padding; null where nothing was replayed."""
    per_path: tuple[PathUse, ...] = ()
    """One entry an encoder path."""
    per_budget: tuple[GraphUse, ...] = ()
    """One entry a graph that was replayed."""
    parts: tuple[PartUse, ...] = ()
    """The rows of each of the model's paths inside monolithic graphs; else empty."""

    def model_post_init(self, context: Any) -> None:
        """Refuses counters that contradict one another."""
        if self.hits + self.misses != self.items:
            raise ValueError(f"{self.hits} hits + {self.misses} misses are not {self.items} items")
        if (by_reason := sum(self.misses_by_reason.values())) != self.misses:
            raise ValueError(f"misses by reason add up to {by_reason}, misses are {self.misses}")
        rate = self.hits / self.items if self.items else None
        if (self.hit_rate is None) != (rate is None) or abs((self.hit_rate or 0) - (rate or 0)) > 1e-6:
            raise ValueError(f"hit_rate is {self.hit_rate}; {self.hits} of {self.items} items make it {rate}")


class CapturedGraph(GraphKey):
    """A graph that was captured."""

    capture_ms: Time
    """Time of its capture, warm-up included, in ms."""
    pool_bytes: Count | None = None
    """What it added to the pool, in bytes."""
    buffer_bytes: Count | None = None
    """Static buffers that it uses, in bytes; graphs share them."""


class CallOverhead(Section):
    """What a call takes beside its replays."""

    items: Count
    """Items of the call."""
    tokens: Count
    """Its output tokens."""
    replays: Count
    """Its replays."""
    call_ms: Time
    """The whole call, in ms."""
    replays_ms: Time
    """Its replays alone, in ms."""
    overhead_ms: Finite
    """The difference, in ms."""


class GraphFacts(Counters):
    """The graphs of a series: what was captured, how it was used, and what a replay costs."""

    mode: Literal["cuda", "cpu-replay"] | None = None
    """`cuda`; `cpu-replay` where graphs were stood in for on a CPU, which saves no launches; null before capturing."""
    policy: str
    """Packing policy."""
    graphs: Count = 0
    """Graphs that were captured."""
    captured: tuple[CapturedGraph, ...] = ()
    """They, in the order of capture; empty in kinds that keep their number only."""
    dropped: tuple[DroppedGraph, ...] = ()
    """Graphs that were planned and could not be captured."""
    pool_bytes: Count | None = None
    """Memory of the graphs' pool, in bytes."""
    buffer_bytes: Count | None = None
    """Memory of the static buffers, in bytes."""
    capture_s: Time | None = None
    """Time of all captures, warm-up included, in s."""
    launch_gap: Time | None = None
    """Wall time of a replay over the GPU's busy time in it, averaged by use."""
    replay_ms: Time | None = None
    """Wall time of a replay, averaged over the most used graphs by use, in ms."""
    gpu_busy_ms: Time | None = None
    """GPU-busy time of a replay, averaged in the same way, in ms."""
    call_overheads: tuple[CallOverhead, ...] | None = None
    """What some whole calls take beside their replays."""
    host_steps_ms: dict[str, Time] | None = None
    """Host time of each step of a graph call, in ms; `call` is the whole."""
