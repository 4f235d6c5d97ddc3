"""The result of `vitgraph verify`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vitgraph.records.sections import AttentionChoice, Count, Number, Section, Time


class Check(Section):
    """One named check."""

    name: str = Field(description="Its name.")
    status: Literal["ok", "failed", "skipped", "error"] = Field(description="How it ended.")
    max_rel_l2: Number | None = Field(default=None, description="Largest relative L2 distance from eager; null: none.")
    compared: Count = Field(default=0, description="Outputs that it compared.")
    failures: Count = Field(default=0, description="Faults that it found.")
    detail: str = Field(default="", description="What it did, why it was skipped, or its first fault, in words.")


class VerifiedModel(Section):
    """The verification of one encoder."""

    architecture: str = Field(description="Architecture name of the model.")
    row: str | None = Field(default=None, description="Row of the table of supported models.")
    preset: str | None = Field(default=None, description="Preset, folder or hub id that was verified.")
    device: str | None = Field(default=None, description="Where it ran.")
    dtype: str | None = Field(default=None, description="Dtype of the encoder.")
    backend_requested: str | None = Field(default=None, description="Attention backend asked for.")
    backend_used: str | None = Field(default=None, description="What really ran.")
    compiled_blocks: Count = Field(default=0, description="Blocks that were compiled; 0 unless it was asked for.")
    status: Literal["ok", "failed", "error"] = Field(description="`failed` a check, or `error`: it was not completed.")
    max_rel_l2: Number | None = Field(default=None, description="Largest relative L2 distance from eager; null: none.")
    attn_choices: tuple[AttentionChoice, ...] | None = None
    """Which backend each shape of an attention call went to, where there was a choice."""
    tolerance: Number | None = Field(default=None, description="Largest distance that passes.")
    own_error: Number | None = None
    """Distance of eager itself from float32 on the items beyond the tolerance, for which 1.5 times as much passes; null
    where there was none."""
    checks: tuple[Check, ...] = Field(default=(), description="The named checks, in the order in which they ran.")
    budgets: dict[str, tuple[Count, ...]] = Field(default={}, description="Token budgets of each path.")
    graphs_captured: Count = Field(default=0, description="Graphs captured.")
    graphs_dropped: Count = Field(default=0, description="Graphs planned that did not fit in memory.")
    calls: Count = Field(default=0, description="Random calls compared.")
    items: Count = Field(default=0, description="Items encoded by the graph path, over all checks.")
    replays: Count = Field(default=0, description="Graphs replayed in these; a model with none is not verified.")
    seed: Count = Field(default=0, description="Seed of weights, pixels and draws.")
    seconds: Time | None = Field(default=None, description="Wall time, in s.")
    error: str | None = Field(default=None, description="Class and message of what ended it early.")
    ranks: Count = Field(default=1, description="Processes that shared the calls.")

    @property
    def failed_checks(self) -> list[str]:
        """Names of the checks that failed."""
        return [check.name for check in self.checks if check.status == "failed"]


class VerifyResult(Section):
    """One entry a model that was verified."""

    models: tuple[VerifiedModel, ...] = Field(default=(), description="The models, in the order of verification.")
