"""Results of a verification: its named checks, and the comparison that decides to which of them a fault belongs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vitgraph.verify.probes import Probe

OK, FAILED, SKIPPED, ERROR = "ok", "failed", "skipped", "error"

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


@dataclass(slots=True)
class CheckResult:
    """One named check.

    Attributes:
        name: Its name.
        status: `ok`, `failed` or `skipped`.
        max_rel_l2: Largest relative L2 distance that it measured; None where it compared nothing.
        compared: Item outputs that it compared.
        failures: Faults that it found.
        detail: The first fault with the place where it was found, or what was checked, or why it was skipped.
    """

    name: str
    status: str = SKIPPED
    max_rel_l2: float | None = None
    compared: int = 0
    failures: int = 0
    detail: str = "not reached"

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "status": self.status,
            "max_rel_l2": json_number(self.max_rel_l2),
            "compared": self.compared,
            "failures": self.failures,
            "detail": self.detail,
        }


def json_number(value: float | None) -> float | str | None:
    """The number as saved files hold it: one that is not finite becomes a string."""
    return value if value is None or math.isfinite(value) else str(value)


@dataclass(slots=True)
class VerifyResult:
    """What the verification of one encoder found.

    Attributes:
        architecture: Architecture name of the model.
        row: Row of the compatibility matrix.
        preset: Preset, folder or hub id that was verified.
        device: Where it ran.
        dtype: Dtype of the encoder.
        backend_requested: Attention backend asked for.
        backend_used: What really ran.
        compiled_blocks: Blocks that were compiled; 0 unless it was asked for.
        status: `ok`, `failed` (a check failed) or `error` (it could not be verified to the end).
        max_rel_l2: Largest relative L2 distance from eager of any output; None where none was compared.
        tolerance: Largest distance that passes.
        checks: The named checks, in the order in which they ran.
        budgets: Token budgets of each path.
        graphs_captured: Graphs captured.
        graphs_dropped: Graphs planned that did not fit in memory.
        calls: Random calls compared.
        items: Items encoded by the graph path, over all checks.
        replays: Graphs replayed in these.
        seed: Seed of weights, pixels and draws.
        seconds: Wall time.
        error: Class and message of what ended it early, or None.
    """

    architecture: str
    row: str | None = None
    preset: str | None = None
    device: str | None = None
    dtype: str | None = None
    backend_requested: str | None = None
    backend_used: str | None = None
    compiled_blocks: int = 0
    status: str = ERROR
    max_rel_l2: float | None = None
    tolerance: float | None = None
    checks: list[CheckResult] = field(default_factory=list)
    budgets: dict[str, list[int]] = field(default_factory=dict)
    graphs_captured: int = 0
    graphs_dropped: int = 0
    calls: int = 0
    items: int = 0
    replays: int = 0
    seed: int = 0
    seconds: float | None = None
    error: str | None = None

    @property
    def failed_checks(self) -> list[str]:
        """Names of the checks that failed."""
        return [check.name for check in self.checks if check.status == FAILED]

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON takes it."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return values | {
            "max_rel_l2": json_number(self.max_rel_l2),
            "failed_checks": self.failed_checks,
            "checks": [check.as_dict() for check in self.checks],
        }


@dataclass(slots=True)
class CheckBook:
    """Results of all checks of one verification.

    Attributes:
        tolerance: Largest relative L2 distance from eager that passes.
        checks: Results by name, in the order in which the checks run.
    """

    tolerance: float
    checks: dict[str, CheckResult] = field(default_factory=dict)

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
        check = self.checks[name]
        check.failures += 1
        if check.status != FAILED:
            check.status, check.detail = FAILED, detail

    def measure(self, name: str, distance: float) -> None:
        """Notes a distance that check `name` measured."""
        check = self.checks[name]
        check.compared += 1
        if math.isfinite(distance):
            check.max_rel_l2 = max(check.max_rel_l2 or 0.0, distance)

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
        passed = True
        for index, (output, probe) in enumerate(zip(outputs, probes, strict=True)):
            distance, is_finite = measured.get(index, (math.nan, True))
            place = f"item {index} ({probe.candidate.size}, pixel seed {probe.seed}), {where}, found by {name}"
            if is_finite:
                self.measure(name, distance)
                if distance <= self.tolerance:
                    continue
            passed = False
            if not is_finite:
                self.fail(finite, f"values that are not finite: {place}")
            elif (owner := self._owner(output, references, index)) is not None:
                self.fail(ORDER, f"the output holds the rows of item {owner}: {place}")
            elif index in measured:
                self.fail(name, f"relative L2 {distance:.3g} from eager, above {self.tolerance:g}: {place}")
            else:
                shape, wanted = (" x ".join(map(str, tensor.shape)) for tensor in (output, probe.reference))
                self.fail(name, f"the output is {shape}, eager gives {wanted}: {place}")
        return passed

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
