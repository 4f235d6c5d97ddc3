"""Results of a verification: its named checks, and the comparison that decides to which of them a fault belongs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from vitgraph.measure.correctness import OWN_ROUNDING_FACTOR
from vitgraph.records.kinds.verify import Check
from vitgraph.verify.probes import Probe

OK: Final = "ok"
FAILED: Final = "failed"
SKIPPED: Final = "skipped"
ERROR: Final = "error"

PREDICTED_TOKENS = "predicted_tokens"
FROZEN_SCALARS = "frozen_scalars"
STALE_METADATA = "stale_metadata"
EVERY_GRAPH = "every_graph"
SMALL_LARGE_SMALL = "small_large_small"
ORDER = "order"
ALIASING = "aliasing"
MULTI_PATH = "multi_path"
RANDOM_PACKINGS = "random_packings"
COUNTERS = "counters"
STATIC_BUFFERS = "static_buffers"
FINITE = "finite"
MEMORY_RETURNED = "memory_returned"


class SkipCheck(Exception):  # noqa: N818 (no error, but the reason why a check has nothing to do)
    """A check has nothing to check here; the text says why."""


def unreached(name: str) -> Check:
    """A check that nothing has come to yet."""
    return Check(name=name, status=SKIPPED, detail="not reached")


@dataclass(slots=True)
class CheckBook:
    """Results of all checks of one verification.

    Attributes:
        tolerance: Largest relative L2 distance from eager that passes.
        rounding: What an item's eager output is from float32; `OWN_ROUNDING_FACTOR` times as much passes for an item
            beyond the tolerance. None where the tolerance holds for all.
        own_error: The largest such rounding that was asked for.
        checks: Results by name, in the order in which the checks run.
    """

    tolerance: float
    rounding: Callable[[Probe], float] | None = None
    own_error: float | None = None
    checks: dict[str, Check] = field(default_factory=dict)

    @property
    def max_rel_l2(self) -> float | None:
        measured = [check.max_rel_l2 for check in self.checks.values() if check.max_rel_l2 is not None]
        return max(measured, default=None)

    @property
    def total_failures(self) -> int:
        return sum(check.failures for check in self.checks.values())

    def has_failed(self, name: str) -> bool:
        return self.checks[name].failures > 0

    def fail(self, name: str, detail: str) -> None:
        """Counts a fault of check `name`; the first one's text is kept."""
        self._note(name, failures=self.checks[name].failures + 1)
        self.end(name, FAILED, detail)

    def end(self, name: str, status: str, detail: str) -> None:
        """Notes how check `name` ended, unless it has failed before."""
        if self.checks[name].status != FAILED:
            self._note(name, status=status, detail=detail)

    def _note(self, name: str, **changes: Any) -> None:
        self.checks[name] = self.checks[name].model_copy(update=changes)

    def measure(self, name: str, distance: float) -> None:
        """Notes a distance that check `name` measured."""
        check = self.checks[name]
        largest = max(check.max_rel_l2 or 0.0, distance) if math.isfinite(distance) else check.max_rel_l2
        self._note(name, compared=check.compared + 1, max_rel_l2=largest)

    def compare(
        self, name: str, probes: Sequence[Probe], outputs: Sequence[torch.Tensor], where: str, *, finite: str = FINITE
    ) -> bool:
        """Compares a call's outputs with each item's eager output alone; True where all agree.

        A fault goes to the check that it speaks of: values that are not finite to `finite`, rows that are another
        item's to `order`, and everything else to `name`.

        Args:
            name: The check under way.
            probes: Items of the call.
            outputs: Their outputs, in the same order.
            where: Graph and call, for the report.
            finite: Check that values which are not finite belong to.
        """
        if len(outputs) != len(probes):
            self.fail(name, f"{len(outputs)} outputs for {len(probes)} items ({where})")
            return False
        references = [probe.reference for probe in probes]
        same_shape = [index for index, output in enumerate(outputs) if output.shape == references[index].shape]
        measured = dict(zip(same_shape, distances(outputs, references, same_shape), strict=True))
        passed, limit = True, self.tolerance
        for index, (output, probe) in enumerate(zip(outputs, probes, strict=True)):
            distance, is_finite = measured.get(index, (math.nan, True))
            place = f"item {index} ({probe.candidate.size}, pixel seed {probe.seed}), {where}, found by {name}"
            if is_finite:
                self.measure(name, distance)
                limit = self._limit(probe, distance)
                if distance <= limit:
                    continue
            passed = False
            if not is_finite:
                self.fail(finite, f"values that are not finite: {place}")
            elif (owner := self._owner(output, references, index)) is not None:
                self.fail(ORDER, f"the output holds the rows of item {owner}: {place}")
            elif index in measured:
                self.fail(name, f"relative L2 {distance:.3g} from eager, above {limit:.3g}: {place}")
            else:
                shape, wanted = (" x ".join(map(str, tensor.shape)) for tensor in (output, probe.reference))
                self.fail(name, f"the output is {shape}, eager gives {wanted}: {place}")
        return passed

    def _limit(self, probe: Probe, distance: float) -> float:
        """Largest distance that passes for an item that was measured."""
        if distance <= self.tolerance or self.rounding is None:
            return self.tolerance
        own_error = self.rounding(probe)
        self.own_error = max(self.own_error or 0.0, own_error)
        return max(self.tolerance, OWN_ROUNDING_FACTOR * own_error)

    def _owner(self, output: torch.Tensor, references: Sequence[torch.Tensor], index: int) -> int | None:
        """The other item of the call whose reference `output` equals, or None."""
        others = [j for j, one in enumerate(references) if j != index and one.shape == output.shape]
        repeated = [output] * len(references)
        for other, (distance, _) in zip(others, distances(repeated, references, others), strict=True):
            if distance <= self.tolerance:
                return other
        return None


def distances(
    values: Sequence[torch.Tensor], references: Sequence[torch.Tensor], indices: Sequence[int]
) -> list[tuple[float, bool]]:
    """Relative L2 distance in float32, and whether the value is finite, of each chosen pair; one synchronisation."""
    found = []
    for index in indices:
        value, reference = values[index].float(), references[index].float()
        found.append((value - reference).norm() / reference.norm().clamp(min=1e-30))
        found.append(value.isfinite().all().float())
    if not found:
        return []
    numbers = torch.stack(found).tolist()
    return [(distance, bool(is_finite)) for distance, is_finite in zip(numbers[::2], numbers[1::2], strict=True)]
