"""`bench --compile-rows`: eager and graph, each plain and with compiled blocks, on one workload, interleaved.

Two encoders of the same weights run side by side, measured and checked as backends are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from vitgraph.measure.candidate import Candidate
from vitgraph.measure.compare import Comparison, PreparedCompare
from vitgraph.measure.preparation import PreparedBench
from vitgraph.measure.progress import Progress
from vitgraph.models.compile.compilation import compile_facts
from vitgraph.records.candidates import contrast, series_name
from vitgraph.records.record import CompareKind, CompareRecord
from vitgraph.records.sample_table import EAGER, GRAPH, Samples
from vitgraph.specs import CompareSpec

if TYPE_CHECKING:
    import torch

    from vitgraph.measure.calls import CallInputs
    from vitgraph.planning.accounting import GraphCounters
    from vitgraph.records.sections import Encoder
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

    def _note_encoder(self, facts: Encoder) -> None:
        super()._note_encoder(facts)
        self.row = self.row.but(compiled=facts.compiled)

    def count(self, counters: Mapping[str, GraphCounters]) -> None:
        super().count(counters)
        if self.row.compiled is not None:
            # Lengths that no sample call had may have been compiled for since.
            self.row = self.row.but(compiled=self.row.compiled.but(**compile_facts()))


class CompileComparison(Comparison):
    """The four rows in progress."""

    kind: ClassVar[CompareKind] = "compile-rows"

    def make_candidate(self, place: int, inputs: CallInputs) -> Candidate:
        return CompileCandidate(place, self.draft, self.prepared, inputs)

    def summarize(
        self, samples: Samples, counters: Mapping[str, GraphCounters], invalid_reasons: Sequence[str]
    ) -> None:
        super().summarize(samples, counters, invalid_reasons)
        self._note_comparison(
            contrasts=contrast(self.draft.record.result, samples, CONTRASTS, self.prepared.spec.model.seed),
            speed_of_light_ms=self.speed_of_light_ms(),
        )


def run_compile_matrix(prepared: PreparedBench, folder: Path, progress: Progress) -> CompareRecord:
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
    return CompileComparison.of(PreparedCompare(spec, prepared), progress).record(folder)
