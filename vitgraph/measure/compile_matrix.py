"""`bench --compile-rows`: eager and graph, each plain and with compiled blocks, on one workload, interleaved.

Two encoders of the same weights run side by side, measured and checked as backends are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from vitgraph.measure.bench import mean_request_flops
from vitgraph.measure.candidate import Candidate
from vitgraph.measure.compare import Comparison, run_compare
from vitgraph.measure.compare_results import GAIN_METRICS, INVALID, measured_series
from vitgraph.measure.compare_spec import PreparedCompare
from vitgraph.measure.preparation import PreparedBench
from vitgraph.measure.progress import Progress
from vitgraph.models.compile.compilation import compile_facts
from vitgraph.records import stats
from vitgraph.records.compare_record import COMPILE_KIND, CompareRecord
from vitgraph.records.compare_samples import BackendSample, Series, series_name, series_times
from vitgraph.records.samples import EAGER, GRAPH
from vitgraph.specs import CompareSpec

if TYPE_CHECKING:
    import torch

    from vitgraph.measure.calls import CallInputs
    from vitgraph.measure.experiment import Experiment
    from vitgraph.planning.accounting import GraphCounters
    from vitgraph.specs import ModelSpec

PLAIN, COMPILED = "plain", "compiled"

ROWS: Mapping[Series, str] = {
    (PLAIN, EAGER): "eager",
    (COMPILED, EAGER): "eager+compile",
    (PLAIN, GRAPH): "graph",
    (COMPILED, GRAPH): "graph+compile",
}
"""Names of the four series, in the order of the table."""

CONTRASTS: Sequence[tuple[Series, Series]] = (
    ((PLAIN, EAGER), (PLAIN, GRAPH)),
    ((COMPILED, EAGER), (COMPILED, GRAPH)),
    ((PLAIN, EAGER), (COMPILED, EAGER)),
    ((PLAIN, GRAPH), (COMPILED, GRAPH)),
    ((PLAIN, EAGER), (COMPILED, GRAPH)),
)
"""What is compared with what: graphs on either tower, compilation in either mode, and both together."""


class CompileCandidate(Candidate):
    """The tower as it is, or with its blocks compiled; both with the attention backend that was asked for."""

    def model_spec(self, device: torch.device) -> ModelSpec:
        return replace(self._prepared.spec.model, compile=self.name == COMPILED)

    def _load(self, device: torch.device, dtype: torch.dtype) -> None:
        super()._load(device, dtype)
        if self.name == COMPILED:
            self.row |= compile_facts()

    def count(self, counters: Mapping[str, GraphCounters]) -> None:
        super().count(counters)
        if self.name == COMPILED:
            # Lengths that no sample call had may have been compiled for since.
            self.row |= compile_facts()


class CompileComparison(Comparison):
    """The four rows in progress."""

    kind: ClassVar[str] = COMPILE_KIND

    def make_candidate(self, name: str, inputs: CallInputs) -> Candidate:
        return CompileCandidate(name, self.prepared.bench, inputs)

    def summarize(self, experiment: Experiment, problems: Sequence[str]) -> None:
        super().summarize(experiment, problems)
        comparison = self.record.data["comparison"]
        seed = self.prepared.spec.bench.model.seed
        comparison["contrasts"] = contrasts(self.record.rows, comparison, self.samples, seed)
        comparison["speed_of_light_ms"] = self._speed_of_light_ms()

    def _speed_of_light_ms(self) -> float | None:
        """The arithmetic of a mean request at the measured rate of a large matrix product; None on a CPU."""
        from vitgraph.measure.timing import matrix_rate_flops

        rate = matrix_rate_flops(self.device, self.dtype)
        if rate is None:
            return None
        self.record.data["environment"]["matrix_rate_tflops"] = rate / 1e12
        return mean_request_flops(self.prepared.bench.source.rule(), self.calls) / rate * 1e3


def contrasts(
    rows: Sequence[dict[str, Any]], comparison: Mapping[str, Any], samples: Sequence[BackendSample], seed: int
) -> list[dict[str, Any]]:
    """Deltas between the rows, on the requests that all of them have.

    Args:
        rows: The rows of the record.
        comparison: Its `comparison`, for the noise floors and for reasons against any verdict.
        samples: All samples.
        seed: Seed of the bootstraps.

    Returns:
        For each of `CONTRASTS` whose rows were both measured: `first`, `second` (names of `ROWS`), `metric`,
        `delta_pct` (second minus first, negative = second faster), `ci95`, `noise_floor_pct` and `verdict`.
    """
    measured = measured_series(rows)
    times = series_times(samples, measured)
    found = []
    for first, second in CONTRASTS:
        if not times.requests or first not in measured or second not in measured:
            continue
        before, after = (times.times[series_name(series)] for series in (first, second))
        for metric in GAIN_METRICS:
            gain = stats.improvement(before, after, metric, seed=seed)
            floors = [comparison["noise_floor_pct"][mode][metric] for mode in {first[1], second[1]}]
            floor = None if None in floors else max(floors)
            verdict = stats.verdict(gain, floor)
            found.append(
                {
                    "first": ROWS[first],
                    "second": ROWS[second],
                    "metric": metric,
                    "delta_pct": None if gain.improvement_pct is None else 0.0 - gain.improvement_pct,
                    "ci95": None if gain.ci95 is None else [0.0 - end for end in reversed(gain.ci95)],
                    "noise_floor_pct": floor,
                    "verdict": INVALID if comparison["invalid_reasons"] else verdict,
                }
            )
    return found


def run_compile_matrix(
    prepared: PreparedBench, folder: Path, command: Sequence[str], progress: Progress
) -> CompareRecord:
    """Measures the four rows and saves the record in `folder`, whatever ends it.

    Returns:
        A record of kind `compile-rows`, in the shape of a backend comparison: the entries of `backends` are `compiled`
        (with `compile_s`, `compilations`, `compile_cache` and `compile_cache_dir`) and `plain`; `comparison` also has
        `contrasts` and `speed_of_light_ms`. What cannot run keeps its row with the reason.

    Raises:
        VitgraphError: The model itself cannot be loaded or checked.
    """
    # The plain tower is loaded last: transformers finds an attention function by name, and compiled blocks have their
    # own name for it, so each tower calls the backend that it was given.
    spec = CompareSpec(prepared.spec, (COMPILED, PLAIN))
    return run_compare(PreparedCompare(spec, prepared), folder, command, progress, comparison=CompileComparison)
