"""The result of `vitgraph verify`."""

from __future__ import annotations

from typing import Literal

from vitgraph.records.sections import AttentionChoice, Count, Number, Section, Time


class Check(Section):
    """One named check."""

    name: str
    """Its name."""
    status: Literal["ok", "failed", "skipped", "error"]
    """How it ended."""
    max_rel_l2: Number | None = None
    """Largest relative L2 distance from eager that it found; null where it compared none."""
    compared: Count = 0
    """Outputs that it compared."""
    failures: Count = 0
    """Faults that it found."""
    detail: str = ""
    """What it did, why it was skipped, or its first fault, in words."""


class VerifiedModel(Section):
    """The verification of one encoder."""

    architecture: str
    """Architecture name of the model."""
    row: str | None = None
    """Row of the table of supported models."""
    preset: str | None = None
    """Preset, folder or hub id that was verified."""
    device: str | None = None
    """Where it ran."""
    dtype: str | None = None
    """Dtype of the encoder."""
    backend_requested: str | None = None
    """Attention backend asked for."""
    backend_used: str | None = None
    """What really ran."""
    compiled_blocks: Count = 0
    """Blocks that were compiled; 0 unless it was asked for."""
    status: Literal["ok", "failed", "error"]
    """`ok`, `failed` where a check failed, or `error` where it could not be verified to the end."""
    max_rel_l2: Number | None = None
    """Largest relative L2 distance from eager of any output; null where none was compared."""
    attn_choices: tuple[AttentionChoice, ...] | None = None
    """Which backend each shape of an attention call went to, where there was a choice."""
    tolerance: Number | None = None
    """Largest distance that passes."""
    own_error: Number | None = None
    """Distance of eager itself from float32 on the items beyond the tolerance, for which 1.5 times as much passes; null
    where there was none."""
    checks: tuple[Check, ...] = ()
    """The named checks, in the order in which they ran."""
    budgets: dict[str, tuple[Count, ...]] = {}
    """Token budgets of each path."""
    graphs_captured: Count = 0
    """Graphs captured."""
    graphs_dropped: Count = 0
    """Graphs planned that did not fit in memory."""
    calls: Count = 0
    """Random calls compared."""
    items: Count = 0
    """Items encoded by the graph path, over all checks."""
    replays: Count = 0
    """Graphs replayed in these; a model with none is not verified."""
    seed: Count = 0
    """Seed of weights, pixels and draws."""
    seconds: Time | None = None
    """Wall time, in s."""
    error: str | None = None
    """Class and message of what ended it early."""
    ranks: Count = 1
    """Processes that shared the calls."""

    @property
    def failed_checks(self) -> list[str]:
        """Names of the checks that failed."""
        return [check.name for check in self.checks if check.status == "failed"]


class VerifyResult(Section):
    """One entry a model that was verified."""

    models: tuple[VerifiedModel, ...] = ()
    """The models, in the order in which they were verified."""
