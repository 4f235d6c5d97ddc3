"""What `compare-backends` is asked for, planned before a device is touched, and the record that it starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vitgraph.errors import UsageError
from vitgraph.measure.preparation import PreparedBench, prepare_bench, resolved_bench, workload_of
from vitgraph.measure.setup import resolve_device
from vitgraph.records.candidates import NOTHING_MEASURED, before_its_turn
from vitgraph.records.draft import Draft
from vitgraph.records.kinds.compare import CompareResult, Recommendation
from vitgraph.records.record import CompareKind, CompareRecord
from vitgraph.records.store import SAMPLES_FILE
from vitgraph.specs import CompareSpec


@dataclass(frozen=True, slots=True)
class PreparedCompare:
    """A comparison that was planned without touching a device.

    Attributes:
        spec: The settings.
        bench: Model, calls and plan, shared by all backends.
    """

    spec: CompareSpec
    bench: PreparedBench

    def describe(self) -> dict[str, Any]:
        """Resolved settings, plan, expected packing and what each backend says about this device, for `--dry-run`."""
        from vitgraph.attention.registry import describe_backends

        described = describe_backends(resolve_device(self.spec.bench.model.device))
        chosen = [row for row in described if row["name"] in self.spec.backends]
        return self.bench.describe() | {"settings": self.spec.as_dict(), "backends": chosen}


def choose_backends(names: Sequence[str]) -> tuple[str, ...]:
    """The backends that are named, `auto` among them where it is; every registered one where none is.

    Raises:
        BackendError: An unknown name.
        UsageError: One twice.
    """
    from vitgraph.attention.registry import AUTO, BACKENDS, backend_class

    if not names:
        return tuple(BACKENDS)
    for name in names:
        if list(names).count(name) > 1:
            raise UsageError(f"--backends names {name} twice; name each backend once")
        if name != AUTO:
            backend_class(name)
    return tuple(names)


def prepare_compare(spec: CompareSpec) -> PreparedCompare:
    """Everything that can be decided and refused before a device is touched."""
    return PreparedCompare(spec, prepare_bench(spec.bench))


def new_draft(prepared: PreparedCompare, kind: CompareKind = "compare-backends") -> Draft[CompareRecord]:
    """A record of a comparison that has not measured anything yet."""
    return Draft(
        CompareRecord(
            kind=kind,
            settings=prepared.spec.as_dict(),
            resolved=resolved_bench(prepared.bench).but(attn_backend=None),
            workload=workload_of(prepared.bench),
            samples_file=SAMPLES_FILE,
            result=CompareResult(
                candidates=tuple(map(before_its_turn, prepared.spec.backends)),
                recommendation=Recommendation(text=NOTHING_MEASURED),
            ),
        )
    )
