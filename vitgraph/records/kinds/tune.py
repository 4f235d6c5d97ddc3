"""The result of `vitgraph tune-budgets`."""

from __future__ import annotations

from typing import Literal

from vitgraph.records.graph_facts import GraphUse
from vitgraph.records.latency import Interval, Latency, Pair
from vitgraph.records.sections import AttentionChoice, Count, Environment, Finite, Number, Section, Share, Time

TuneVerdict = Literal["use_graphs", "no_graphs", "measure_first", "depends"]
"""`measure_first`: predictions are too uncertain to act on. `depends`: on how many requests a call has."""


class GraphSettings(Section):
    """Settings of graph mode."""

    token_budgets: tuple[Count, ...] | dict[str, tuple[Count, ...]]
    """Budgets in tokens, ascending; by path where paths have their own."""
    max_vision_items_per_batch: Count
    """Items that a replay may hold."""
    max_frames_per_batch: Count
    """Video frames that a replay may hold; 0 is image-only."""
    packing: str
    """Packing policy."""


class PredictedLatency(Section):
    """Predicted latency over the workload's requests."""

    mean_ms: Time
    """Mean, in ms a request."""
    p50_ms: Time
    """Median, in ms."""
    p99_ms: Time
    """99th percentile, in ms."""
    requests: Count | None = None
    """Requests that it is of."""


class AgainstEager(Section):
    """A plan against eager, as predicted."""

    latency: PredictedLatency
    """The plan's latency."""
    improvement_pct: Finite
    """What it gains over eager in percent, positive = faster."""
    slower_share: Share
    """Requests that it makes slower than eager."""
    closed_to_oracle_mean: Number | None = None
    """Share of the way from automatic budgets to the oracle that it goes, of the mean; null where there is no way."""
    closed_to_oracle_median: Number | None = None
    """The same of the median."""


class Evaluation(Section):
    """Settings and what the cost model predicts of them."""

    settings: GraphSettings
    """The settings."""
    latency: PredictedLatency
    """Their latency, as the search scored it."""
    score: Finite
    """The objective over eager's; below 1 is faster."""
    graphs: Count
    """Graphs."""
    memory_bytes: Time
    """Memory of pool and buffers, in bytes."""
    capture_s: Time
    """Time of the captures, in s."""
    is_within_limits: bool
    """They stay within the limits."""
    against_eager: AgainstEager | None = None
    """Against eager over the whole workload; null where only the search scored them."""


class PredictionError(Section):
    """How far predictions are from measurements."""

    n: Count
    """Calls compared."""
    median_pct: Number | None = None
    """Median of the absolute error, in percent."""
    p90_pct: Number | None = None
    """90th percentile of it, in percent."""
    bias_pct: Number | None = None
    """Median of the signed error in percent: positive = predicted too long."""


class ModelError(Section):
    """Error of the cost model on calls that it has not seen."""

    graph: PredictionError
    """Of graph mode."""
    eager: PredictionError
    """Of eager."""
    both: PredictionError
    """Of both."""

    def __str__(self) -> str:
        """One line for every prediction that is printed."""
        if self.both.median_pct is None:
            return "the profile holds no calls to check the model with, so its error is unknown"
        return (
            f"model error on {self.both.n // 2} calls it has not seen: median {self.both.median_pct:.1f}%, "
            f"P90 {self.both.p90_pct:.1f}% (graph {self.graph.median_pct:.1f}%, eager {self.eager.median_pct:.1f}%)"
        )


class MissReason(Section):
    """Items that miss for one reason."""

    reason: str
    """The reason."""
    text: str
    """The same in words."""
    items: Count
    """Items."""
    share: Share
    """Share of all items."""
    smallest_tokens: Count
    """Output tokens of the smallest of them."""
    median_tokens: Time
    """Median of their output tokens."""
    largest_tokens: Count
    """Output tokens of the largest of them."""


class Search(Section):
    """How the settings were searched."""

    evaluations: Count
    """Settings that were scored."""
    is_exact: bool
    """Every call was predicted, and not a sample of them."""
    is_exhaustive: bool
    """Every candidate was scored."""


class Baselines(Section):
    """What the tuned settings are compared with, as predicted."""

    automatic: Evaluation | None = None
    """Automatic budgets."""
    seed_nine: Evaluation | None = None
    """The nine budgets of vLLM's design document."""
    eager: PredictedLatency
    """No graphs."""
    oracle: PredictedLatency
    """The faster of eager and a graph of exactly the call's size, for each call."""


class VllmAnswer(Section):
    """The best settings that vLLM can express."""

    verdict: TuneVerdict
    """Whether they pay."""
    best: Evaluation
    """The settings."""
    baselines: dict[str, Evaluation]
    """Baselines with vLLM's manager, by name."""
    compilation_config: str
    """JSON for `--compilation-config`."""
    assumed_overheads: str
    """What its manager is assumed to cost, in words."""
    attn_backend: str | None = None
    """The one attention backend to give it; null where none is named."""


class BeyondVllm(Section):
    """What the best settings need that vLLM does not have."""

    points: tuple[str, ...]
    """What that is, in words."""
    loss_pct: Finite
    """How much longer its own best settings take, in percent."""
    mean_ms: Time
    """Their mean, in ms a request."""


class Strategy(Section):
    """One way to run the measured calls."""

    latency: Latency
    """Its latency."""
    against_eager: Pair | None = None
    """Against eager; null for eager itself and the oracle."""
    graphs: Count | None = None
    """Graphs of its plan; null without one."""
    graphs_captured: Count | None = None
    """Those of them that the measured calls need."""
    dropped: Count | None = None
    """Graphs that did not fit."""
    memory_bytes: Count | None = None
    """Memory of its graphs, in bytes."""
    capture_s: Time | None = None
    """Time of its captures, in s."""
    predicted_mean_ms: Time | None = None
    """Its predicted mean over the same calls, in ms a request."""
    prediction_error: PredictionError | None = None
    """Prediction against measurement, call by call."""


class Closed(Section):
    """Share of the way from automatic budgets to the oracle that the tuned settings go."""

    mean: Number | None = None
    """Of the mean; null where there is no way to go."""
    mean_ci95: Interval | None = None
    """95 % interval of it."""
    median: Number | None = None
    """Of the median."""
    median_ci95: Interval | None = None
    """95 % interval of it."""


class Measured(Section):
    """The tuned settings and their baselines, measured."""

    mode: Literal["cuda", "cpu-replay"]
    """`cuda`; `cpu-replay` where graphs were stood in for on a CPU, which saves no launches."""
    manager: str
    """Whose graph manager ran."""
    calls: Count
    """Calls measured."""
    calls_left_out: Count
    """Calls that were chosen and for which time ran out."""
    calls_of_workload: Count
    """Calls of the workload."""
    choice: str
    """How the calls were chosen, in words."""
    is_interrupted: bool
    """The user stopped it."""
    max_rel_l2: Number | None = None
    """Largest relative L2 distance of replay from eager."""
    request_noise_pct: Number | None = None
    """How far 95 % of the calls stay from themselves when eager is repeated, in percent."""
    strategies: dict[str, Strategy]
    """By name: `eager`, `oracle`, `tuned` and the baselines."""
    closed: Closed
    """Share of the way to the oracle."""
    overhead_ms: Finite | None = None
    """What the manager adds to a replay, in the median, in ms a request."""
    problems: tuple[str, ...] = ()
    """What makes the times invalid; empty in a sound run."""
    attn_choices: tuple[AttentionChoice, ...] | None = None
    """Which backend each shape of an attention call went to, where there was a choice."""
    elapsed_s: Time
    """How long it took, in s."""


class Unseen(Section):
    """How the settings do on calls that they were not made for."""

    method: Literal["split", "cross-validation", "none"]
    """How calls were held back from the search; `none` where there are too few."""
    share: Share
    """Share of the calls that a search saw."""
    seed: Count
    """Seed of the choice."""
    calls: Count
    """Calls that the figures are of."""
    improvement_seen_pct: Finite
    """What the settings gain on the calls that were searched on, in percent, positive = faster."""
    improvement_pct: Finite
    """What they gain on the others."""
    text: str
    """The same in a sentence."""


class AdvisedCalls(Section):
    """The advice for one number of requests a call."""

    requests_per_call: Count
    """Requests that are encoded together."""
    calls: Count | None = None
    """Calls that it was made from."""
    verdict: TuneVerdict
    """Whether graphs pay."""
    improvement_pct: Finite
    """What the settings gain over eager in percent, positive = faster."""
    slower_share: Share
    """Requests that they make slower than eager."""
    best: GraphSettings | None = None
    """The settings made for such calls; null where one list is tried on all."""


class OtherTraffic(Section):
    """What the settings do on another shipped trace, one request a call."""

    name: str
    """The trace."""
    requests: Count
    """Requests of it; 0 where none is served."""
    verdict: TuneVerdict | None
    """Whether graphs pay there."""
    improvement_pct: Finite | None = None
    """What they gain over eager in percent, positive = faster."""
    slower_share: Share | None = None
    """Requests that they make slower than eager."""
    text: str
    """The same in a sentence."""


class UsedProfile(Section):
    """The calibration that predictions come from."""

    label: str
    """Model, device and backend in a few words."""
    created_at: str
    """When it was made, ISO 8601 in UTC."""
    is_synthetic: bool
    """Its numbers are made up, for tests."""
    is_cpu: bool
    """It was measured on a CPU, where replays save no launches."""
    environment: Environment
    """What it was measured on and with."""


class TuneResult(Section):
    """The best settings for a workload, what they are predicted to gain, and what was measured of that."""

    target: str
    """Whose graph manager the settings are for: `vitgraph` or `vllm`."""
    objective: str
    """What was minimised."""
    limits: dict[str, Number | None]
    """What the settings stay within, by limit; null where there is none."""
    verdict: TuneVerdict
    """Whether graphs pay."""
    verdict_text: str
    """The same in a sentence."""
    settings_for: str
    """Which calls `best` is for, in words; what is measured and what is to be pasted are for the same."""
    best: Evaluation
    """The best settings found for these calls."""
    runners_up: tuple[Evaluation, ...]
    """The next best, one for each policy and number of graphs."""
    error: ModelError
    """Error of the cost model."""
    error_text: str
    """The same in words."""
    baselines: Baselines
    """What the settings are compared with."""
    by_budget: tuple[GraphUse, ...]
    """How each graph is used over the workload, as predicted."""
    hits: Count
    """Items all of whose paths are replayed."""
    items: Count
    """Items of the workload."""
    waste: Number | None
    """Share of the replayed rows that is padding."""
    misses: tuple[MissReason, ...]
    """Items that miss, by reason."""
    pareto: tuple[Evaluation, ...]
    """Settings of which none has both fewer graphs, or both less memory, and a better score."""
    search: Search
    """How the settings were searched."""
    vllm: VllmAnswer
    """The best settings that vLLM can express."""
    unseen: Unseen
    """The settings on calls that they were not made for."""
    by_requests_per_call: tuple[AdvisedCalls, ...] = ()
    """The advice for other numbers of requests a call; empty where the number was given."""
    list_for_all: tuple[AdvisedCalls, ...] = ()
    """The one list for vLLM that does best over all of them, for each."""
    other_traffic: tuple[OtherTraffic, ...] = ()
    """The settings on the other shipped traces."""
    compilation_config: str | None
    """JSON for `--compilation-config`; null where nothing should be pasted yet."""
    serve_line: str | None
    """A whole `vllm serve` command; null where nothing should be pasted yet."""
    beyond_vllm: BeyondVllm | None = None
    """What the settings need that vLLM does not have; null where they are for vLLM."""
    profile: UsedProfile
    """The calibration that predictions come from."""
    notes: tuple[str, ...] = ()
    """What a reader should know, in words."""
    measured: Measured | None = None
    """The settings measured; null where they were not."""
