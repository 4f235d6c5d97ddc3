"""The result of `vitgraph tune-budgets`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vitgraph.records.sections import (
    AttentionChoice,
    Count,
    Environment,
    Finite,
    Number,
    ReplayMode,
    Section,
    Share,
    Time,
)
from vitgraph.records.series import GraphUse, Interval, Latency, Pair

TuneVerdict = Literal["use_graphs", "no_graphs", "measure_first", "depends"]
"""`measure_first`: predictions are too uncertain to act on. `depends`: on how many requests a call has."""


class GraphSettings(Section):
    """Settings of graph mode."""

    token_budgets: tuple[Count, ...] | dict[str, tuple[Count, ...]]
    """Budgets in tokens, ascending; by path where paths have their own."""
    max_vision_items_per_batch: Count = Field(description="Items that a replay may hold.")
    max_frames_per_batch: Count = Field(description="Video frames that a replay may hold; 0 is image-only.")
    packing: str = Field(description="Packing policy.")


class PredictedLatency(Section):
    """Predicted latency over the workload's requests."""

    mean_ms: Time = Field(description="Mean, in ms a request.")
    p50_ms: Time = Field(description="Median, in ms.")
    p99_ms: Time = Field(description="99th percentile, in ms.")
    requests: Count | None = Field(default=None, description="Requests that it is of.")


class AgainstEager(Section):
    """A plan against eager, as predicted."""

    latency: PredictedLatency = Field(description="The plan's latency.")
    improvement_pct: Finite = Field(description="What it gains over eager in percent, positive = faster.")
    slower_share: Share = Field(description="Requests that it makes slower than eager.")
    closed_to_oracle_mean: Number | None = None
    """Share of the way from automatic budgets to the oracle that it goes, of the mean; null where there is no way."""
    closed_to_oracle_median: Number | None = Field(default=None, description="The same of the median.")


class Evaluation(Section):
    """Settings and what the cost model predicts of them."""

    settings: GraphSettings = Field(description="The settings.")
    latency: PredictedLatency = Field(description="Their latency, as the search scored it.")
    score: Finite = Field(description="The objective over eager's; below 1 is faster.")
    graphs: Count = Field(description="Graphs.")
    memory_bytes: Time = Field(description="Memory of pool and buffers, in bytes.")
    capture_s: Time = Field(description="Time of the captures, in s.")
    is_within_limits: bool = Field(description="They stay within the limits.")
    against_eager: AgainstEager | None = None
    """Against eager over the whole workload; null where only the search scored them."""


class PredictionError(Section):
    """How far predictions are from measurements."""

    n: Count = Field(description="Calls compared.")
    median_pct: Number | None = Field(default=None, description="Median of the absolute error, in percent.")
    p90_pct: Number | None = Field(default=None, description="90th percentile of it, in percent.")
    bias_pct: Number | None = Field(default=None, description="Median signed error in percent: + = predicted too long.")


class ModelError(Section):
    """Error of the cost model on calls that it has not seen."""

    graph: PredictionError = Field(description="Of graph mode.")
    eager: PredictionError = Field(description="Of eager.")
    both: PredictionError = Field(description="Of both.")

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

    reason: str = Field(description="The reason.")
    text: str = Field(description="The same in words.")
    items: Count = Field(description="Items.")
    share: Share = Field(description="Share of all items.")
    smallest_tokens: Count = Field(description="Output tokens of the smallest of them.")
    median_tokens: Time = Field(description="Median of their output tokens.")
    largest_tokens: Count = Field(description="Output tokens of the largest of them.")


class Search(Section):
    """How the settings were searched."""

    evaluations: Count = Field(description="Settings that were scored.")
    is_exact: bool = Field(description="Every call was predicted, and not a sample of them.")
    is_exhaustive: bool = Field(description="Every candidate was scored.")


class Baselines(Section):
    """What the tuned settings are compared with, as predicted."""

    automatic: Evaluation | None = Field(default=None, description="Automatic budgets.")
    seed_nine: Evaluation | None = Field(default=None, description="The nine budgets of vLLM's design document.")
    eager: PredictedLatency = Field(description="No graphs.")
    oracle: PredictedLatency = Field(description="For each call the faster of eager and a graph of its very size.")


class VllmAnswer(Section):
    """The best settings that vLLM can express."""

    verdict: TuneVerdict = Field(description="Whether they pay.")
    best: Evaluation = Field(description="The settings.")
    baselines: dict[str, Evaluation] = Field(description="Baselines with vLLM's manager, by name.")
    compilation_config: str = Field(description="JSON for `--compilation-config`.")
    assumed_overheads: str = Field(description="What its manager is assumed to cost, in words.")
    attn_backend: str | None = Field(default=None, description="The one attention backend to give it; null for none.")


class BeyondVllm(Section):
    """What the best settings need that vLLM does not have."""

    points: tuple[str, ...] = Field(description="What that is, in words.")
    loss_pct: Finite = Field(description="How much longer its own best settings take, in percent.")
    mean_ms: Time = Field(description="Their mean, in ms a request.")


class Strategy(Section):
    """One way to run the measured calls."""

    latency: Latency = Field(description="Its latency.")
    against_eager: Pair | None = Field(default=None, description="Against eager; null for eager itself and the oracle.")
    graphs: Count | None = Field(default=None, description="Graphs of its plan; null without one.")
    graphs_captured: Count | None = Field(default=None, description="Those of them that the measured calls need.")
    dropped: Count | None = Field(default=None, description="Graphs that did not fit.")
    memory_bytes: Count | None = Field(default=None, description="Memory of its graphs, in bytes.")
    capture_s: Time | None = Field(default=None, description="Time of its captures, in s.")
    predicted_mean_ms: Time | None = Field(default=None, description="Predicted mean of these calls, in ms a request.")
    prediction_error: PredictionError | None = Field(default=None, description="Its prediction of each call.")


class Closed(Section):
    """Share of the way from automatic budgets to the oracle that the tuned settings go."""

    mean: Number | None = Field(default=None, description="Of the mean; null where there is no way to go.")
    mean_ci95: Interval | None = Field(default=None, description="95 % interval of it.")
    median: Number | None = Field(default=None, description="Of the median.")
    median_ci95: Interval | None = Field(default=None, description="95 % interval of it.")


class Measured(Section):
    """The tuned settings and their baselines, measured."""

    mode: ReplayMode = Field(description="`cpu-replay`: on a CPU, which saves no launches.")
    manager: str = Field(description="Whose graph manager ran.")
    calls: Count = Field(description="Calls measured.")
    calls_left_out: Count = Field(description="Calls that were chosen and for which time ran out.")
    calls_of_workload: Count = Field(description="Calls of the workload.")
    choice: str = Field(description="How the calls were chosen, in words.")
    is_interrupted: bool = Field(description="The user stopped it.")
    max_rel_l2: Number | None = Field(default=None, description="Largest relative L2 distance of replay from eager.")
    request_noise_pct: Number | None = Field(default=None, description="What 95 % of repeated calls stay within, in %.")
    strategies: dict[str, Strategy] = Field(description="By name: `eager`, `oracle`, `tuned` and the baselines.")
    closed: Closed = Field(description="Share of the way to the oracle.")
    overhead_ms: Finite | None = Field(default=None, description="Median that the manager adds, in ms a request.")
    problems: tuple[str, ...] = Field(default=(), description="What makes the times invalid; empty in a sound run.")
    attn_choices: tuple[AttentionChoice, ...] | None = None
    """Which backend each shape of an attention call went to, where there was a choice."""
    elapsed_s: Time = Field(description="How long it took, in s.")


class Unseen(Section):
    """How the settings do on calls that they were not made for."""

    method: Literal["split", "cross-validation", "none"] = Field(description="How calls were held back from search.")
    share: Share = Field(description="Share of the calls that a search saw.")
    seed: Count = Field(description="Seed of the choice.")
    calls: Count = Field(description="Calls that the figures are of.")
    improvement_seen_pct: Finite = Field(description="Their gain on the calls searched on, in percent, + = faster.")
    improvement_pct: Finite = Field(description="What they gain on the others.")
    text: str = Field(description="The same in a sentence.")


class AdvisedCalls(Section):
    """The advice for one number of requests a call."""

    requests_per_call: Count = Field(description="Requests that are encoded together.")
    calls: Count | None = Field(default=None, description="Calls that it was made from.")
    verdict: TuneVerdict = Field(description="Whether graphs pay.")
    improvement_pct: Finite = Field(description="What the settings gain over eager in percent, positive = faster.")
    slower_share: Share = Field(description="Requests that they make slower than eager.")
    best: GraphSettings | None = Field(default=None, description="Settings made for these calls; null for one list.")


class OtherTraffic(Section):
    """What the settings do on another shipped trace, one request a call."""

    name: str = Field(description="The trace.")
    requests: Count = Field(description="Requests of it; 0 where none is served.")
    verdict: TuneVerdict | None = Field(description="Whether graphs pay there.")
    improvement_pct: Finite | None = Field(default=None, description="Their gain over eager in percent, + = faster.")
    slower_share: Share | None = Field(default=None, description="Requests that they make slower than eager.")
    text: str = Field(description="The same in a sentence.")


class UsedProfile(Section):
    """The calibration that predictions come from."""

    label: str = Field(description="Model, device and backend in a few words.")
    created_at: str = Field(description="When it was made, ISO 8601 in UTC.")
    is_synthetic: bool = Field(description="Its numbers are made up, for tests.")
    is_cpu: bool = Field(description="It was measured on a CPU, where replays save no launches.")
    environment: Environment = Field(description="What it was measured on and with.")


class TuneResult(Section):
    """The best settings for a workload, what they are predicted to gain, and what was measured of that."""

    target: str = Field(description="Whose graph manager the settings are for: `vitgraph` or `vllm`.")
    objective: str = Field(description="What was minimised.")
    limits: dict[str, Number | None] = Field(description="What the settings stay within, by limit; null for none.")
    verdict: TuneVerdict = Field(description="Whether graphs pay.")
    verdict_text: str = Field(description="The same in a sentence.")
    settings_for: str = Field(description="Which calls `best`, what is measured and what is pasted are for, in words.")
    best: Evaluation = Field(description="The best settings found for these calls.")
    runners_up: tuple[Evaluation, ...] = Field(description="The next best, one for each policy and number of graphs.")
    error: ModelError = Field(description="Error of the cost model.")
    error_text: str = Field(description="The same in words.")
    baselines: Baselines = Field(description="What the settings are compared with.")
    by_budget: tuple[GraphUse, ...] = Field(description="How each graph is used over the workload, as predicted.")
    hits: Count = Field(description="Items all of whose paths are replayed.")
    items: Count = Field(description="Items of the workload.")
    waste: Number | None = Field(description="Share of the replayed rows that is padding.")
    misses: tuple[MissReason, ...] = Field(description="Items that miss, by reason.")
    pareto: tuple[Evaluation, ...] = Field(description="Settings that none beats in graphs or memory and in score.")
    search: Search = Field(description="How the settings were searched.")
    vllm: VllmAnswer = Field(description="The best settings that vLLM can express.")
    unseen: Unseen = Field(description="The settings on calls that they were not made for.")
    by_requests_per_call: tuple[AdvisedCalls, ...] = ()
    """The advice for other numbers of requests a call; empty where the number was given."""
    list_for_all: tuple[AdvisedCalls, ...] = Field(default=(), description="vLLM's best one list, for each of them.")
    other_traffic: tuple[OtherTraffic, ...] = Field(default=(), description="The settings on the other shipped traces.")
    compilation_config: str | None = Field(description="JSON for `--compilation-config`; null where nothing is.")
    serve_line: str | None = Field(description="A whole `vllm serve` command; null where nothing should be pasted yet.")
    beyond_vllm: BeyondVllm | None = Field(default=None, description="What they need beyond vLLM; null where for vLLM.")
    profile: UsedProfile = Field(description="The calibration that predictions come from.")
    notes: tuple[str, ...] = Field(default=(), description="What a reader should know, in words.")
    measured: Measured | None = Field(default=None, description="The settings measured; null where they were not.")
