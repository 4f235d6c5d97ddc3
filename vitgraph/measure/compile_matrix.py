"""`bench --compile-rows`: eager and graph, each plain and with compiled blocks, on one workload, interleaved.

Two encoders of the same weights run side by side, measured and checked as backends are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from vitgraph.measure.bench import mean_request_flops
from vitgraph.measure.candidate import Candidate
from vitgraph.measure.compare import Comparison, run_compare
from vitgraph.measure.compare_spec import PreparedCompare
from vitgraph.measure.preparation import PreparedBench
from vitgraph.measure.progress import Progress
from vitgraph.models.compile.compilation import compile_facts
from vitgraph.records.candidates import COMPILE_KIND, contrast, series_name
from vitgraph.records.draft import compiled_of
from vitgraph.records.record import CompareRecord
from vitgraph.records.sample_table import EAGER, GRAPH, Samples
from vitgraph.specs import CompareSpec

if TYPE_CHECKING:
    import torch

    from vitgraph.measure.calls import CallInputs
    from vitgraph.measure.experiment import Experiment
    from vitgraph.planning.accounting import GraphCounters
    from vitgraph.specs import ModelSpec

PLAIN, COMPILED = "plain", "compiled"

CONTRASTS: Sequence[tuple[str, str]] = tuple(
    (series_name(*base), series_name(*series))
    for base, series in (
        ((PLAIN, EAGER), (PLAIN, GRAPH)),
        ((COMPILED, EAGER), (COMPILED, GRAPH)),
        ((PLAIN, EAGER), (COMPILED, EAGER)),
        ((PLAIN, GRAPH), (COMPILED, GRAPH)),
        ((PLAIN, EAGER), (COMPILED, GRAPH)),
    )
)
"""What is compared with what: graphs on either tower, compilation in either mode, and both together."""


class CompileCandidate(Candidate):
    """The tower as it is, or with its blocks compiled; both with the attention backend that was asked for."""

    def model_spec(self, device: torch.device) -> ModelSpec:
        return replace(self._prepared.spec.model, compile=self.name == COMPILED)

    def _load(self, device: torch.device, dtype: torch.dtype) -> None:
        super()._load(device, dtype)
        if self.name == COMPILED:
            self.row["compiled"] = compiled_of(compile_facts())

    def count(self, counters: Mapping[str, GraphCounters]) -> None:
        super().count(counters)
        if self.name == COMPILED:
            # Lengths that no sample call had may have been compiled for since.
            self.row["compiled"] = compiled_of(compile_facts())


class CompileComparison(Comparison):
    """The four rows in progress."""

    kind: ClassVar[str] = COMPILE_KIND

    def make_candidate(self, name: str, inputs: CallInputs) -> Candidate:
        return CompileCandidate(name, self.prepared.bench, inputs)

    def summarize(self, experiment: Experiment, samples: Samples, problems: Sequence[str]) -> None:
        super().summarize(experiment, samples, problems)
        comparison, seed = self.draft.result["comparison"], self.prepared.spec.bench.model.seed
        comparison["contrasts"] = contrast(samples, self.rows, CONTRASTS, comparison, seed)
        comparison["speed_of_light_ms"] = self._speed_of_light_ms()

    def _speed_of_light_ms(self) -> float | None:
        """The arithmetic of a mean request at the measured rate of a large matrix product; None on a CPU."""
        from vitgraph.measure.timing import matrix_rate_flops

        rate = matrix_rate_flops(self.device, self.dtype)
        if rate is None:
            return None
        self.draft.environment["matrix_rate_tflops"] = rate / 1e12
        return mean_request_flops(self.prepared.bench.source.rule(), self.calls) / rate * 1e3


def run_compile_matrix(
    prepared: PreparedBench, folder: Path, command: Sequence[str], progress: Progress
) -> CompareRecord:
    """Measures the four rows and saves the record in `folder`, whatever ends it.

    Returns:
        A record of kind `compile-rows`, in the shape of a backend comparison, whose candidates are `compiled` and
        `plain`. What cannot run keeps its row with the reason.

    Raises:
        VitgraphError: The model itself cannot be loaded or checked.
    """
    # The plain tower is loaded last: transformers finds an attention function by name, and compiled blocks have their
    # own name for it, so each tower calls the backend that it was given.
    spec = CompareSpec(prepared.spec, (COMPILED, PLAIN))
    return run_compare(PreparedCompare(spec, prepared), folder, command, progress, comparison=CompileComparison)
