"""What was run, in phrases: the first lines of every report, whatever it is of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from vitgraph.records.attention_choices import choices_text
from vitgraph.records.record import Record
from vitgraph.records.sections import DroppedGraph, GpuState, GraphKey, Resolved, Workload
from vitgraph.report import say
from vitgraph.report.columns import value_at
from vitgraph.report.document import Document, Facts, Section, section, sections, sentence

UNKNOWN_DEVICE = "unknown device"
GRAPHS_LISTED = 8


@dataclass(frozen=True, slots=True)
class Ran:
    """What the run of a record was, each fact as a phrase.

    Attributes:
        record: The record.
    """

    record: Record

    @property
    def device(self) -> str:
        """The device, and how many of them shared the calls."""
        device = self.record.environment.device if self.record.environment else UNKNOWN_DEVICE
        return device if self.ranks == 1 else f"{self.ranks} × {device}"

    @property
    def ranks(self) -> int:
        """Processes that shared every call."""
        return self.record.resolved.ranks if self.record.resolved else 1

    @property
    def is_cpu(self) -> bool:
        """True where graphs were stood in for on a CPU, where there are no launches to save."""
        return "cpu-replay" in (
            value_at(self.record, "result.graph.mode"),
            value_at(self.record, "result.comparison.mode"),
        )

    @property
    def model(self) -> str:
        """The model as given."""
        return self.record.resolved.model if self.record.resolved else "unknown model"

    @property
    def workload(self) -> str:
        """Short name of the workload."""
        return self.record.workload.name if self.record.workload else "no workload"

    @property
    def backend_used(self) -> str | None:
        """The attention backend that ran; None where there is not one for all."""
        encoder = self.record.environment.encoder if self.record.environment else None
        return encoder.attn_backend if encoder else None

    @property
    def backend(self) -> str:
        """The attention backend that ran, and the one asked for where that is another."""
        return backend_text(self.record.resolved.attn_backend if self.record.resolved else None, self.backend_used)

    @property
    def dtype(self) -> str | None:
        """The dtype that ran; None where the run ended before it was chosen and was not told."""
        encoder = self.record.environment.encoder if self.record.environment else None
        dtype = encoder.dtype if encoder else self.record.resolved.dtype if self.record.resolved else None
        return None if dtype == "auto" else dtype

    @property
    def weights(self) -> str:
        """What the weights are: `random weights, bfloat16`, or nothing."""
        is_random = self.record.resolved is not None and self.record.resolved.load_format == "dummy"
        return _joined("random weights" if is_random else None, self.dtype)

    @property
    def compiled(self) -> str:
        """Whether the repeated blocks were compiled, in every series alike."""
        return compiled_text(self.record.resolved is not None and self.record.resolved.compile)

    @property
    def packing(self) -> str:
        """How calls were packed, and how they were shared among ranks."""
        resolved = self.record.resolved
        if resolved is None or resolved.packing is None:
            return ""
        return _joined(
            f"{resolved.packing} packing",
            f"shared by {resolved.assignment}" if resolved.assignment and self.ranks > 1 else "",
        )

    @property
    def budgets(self) -> str:
        """Token budgets in few words."""
        return budgets_of(self.record.resolved.token_budgets) if self.record.resolved else ""

    @property
    def per_call(self) -> str:
        """How many requests are encoded together."""
        return per_call_of(self.record.resolved) if self.record.resolved else ""

    @property
    def measured(self) -> str:
        """How much was measured: the workload, its requests and rounds."""
        workload, resolved = self.record.workload, self.record.resolved
        if workload is None:
            return ""
        rounds = say.count(resolved.rounds, "round") if resolved and resolved.rounds else ""
        return _joined(workload.name, say.count(workload.requests, "request"), rounds)

    @property
    def title(self) -> str:
        """Model, device and workload."""
        return f"{self.model} on {self.device}, workload {self.workload}"

    @property
    def warning(self) -> str:
        """Why the record is incomplete; empty where it is complete."""
        status = self.record.status
        return "" if status == "complete" else f"{status.capitalize()}: {self.record.status_reason}"

    def conditions(self, *without: str) -> tuple[str, ...]:
        """What was run: device, backend, compiled or not, packing, budgets, requests a call, weights, workload.

        Args:
            without: Names of those that are left out, as each row of the report has its own.
        """
        names = ["device", "backend", "compiled", "packing", "budgets", "per_call", "weights", "measured"]
        if self.record.workload is None:
            names.remove("per_call")
        found = (getattr(self, name) for name in names if name not in without)
        return tuple(part for part in found if part and part != say.NO_VALUE)

    def subtitle(self, *more: str, without: str = "") -> str:
        """What was measured on what, in one line for a chart; `without` as of `conditions`."""
        names = ("device", "backend", "compiled", "measured")
        parts = (self.model.rsplit("/", 1)[-1], *(getattr(self, name) for name in names if name != without), *more)
        return " · ".join(part for part in parts if part and part != say.NO_VALUE)

    def document(self, name: str, *found: Section | None, after: Sequence[Section] = (), **more: Any) -> Document:
        """The report of the record: its title, conditions, command and environment, unless `more` says otherwise.

        Args:
            name: What made it.
            found: Its sections; those without a block are left out.
            after: Sections behind that of the environment.
            more: Further parts of the document.
        """
        environment = section("Environment", environment_facts(self.record), is_detail=True)
        usual: dict[str, Any] = {"title": self.title, "what": self.conditions(), "command": self.record.command}
        usual |= {"warning": self.warning, "sections": sections(*found, environment, *after)}
        return Document(name, **{**usual, **more})


def backend_text(requested: str | None, used: str | None) -> str:
    """The attention backend that ran, and the one asked for where that is another."""
    return used or say.NO_VALUE if requested in (None, used) else f"{used or 'none ran'} (asked for {requested})"


def compiled_text(is_compiled: bool) -> str:
    """Whether blocks were compiled."""
    return "blocks compiled" if is_compiled else "blocks not compiled"


def budgets_of(token_budgets: Mapping[str, Sequence[int]]) -> str:
    """Token budgets in few words: how many, and their ends, by path where there are several."""
    parts = []
    for path, budgets in token_budgets.items():
        name = "" if path == "default" else f"{path} "
        ends = f"{budgets[0]} to {budgets[-1]}" if len(budgets) > 1 else " ".join(map(str, budgets))
        parts.append(f"{name}{say.count(len(budgets), 'budget')}{f' {ends}' if ends else ''}")
    return ", ".join(parts)


def per_call_of(resolved: Resolved) -> str:
    """How many requests are encoded together."""
    number = resolved.requests_per_call
    return "calls of several sizes" if number is None else f"{say.count(number, 'request')} a call"


def limits_text(items: int | None, frames: int | None) -> str:
    """How much a replay may hold."""
    return f"{say.NO_VALUE if items is None else items} / {frames or 'image-only'}"


def list_graphs(keys: Sequence[GraphKey]) -> str:
    """Graphs on one line, the first of them by path, budget, slots and axis key, each where it says something."""
    names = []
    for key in keys[:GRAPHS_LISTED]:
        path = "" if key.path == "default" else f"{key.path} "
        axis = f", {'×'.join(map(str, key.axis_key))}" if key.axis_key else ""
        names.append(f"{path}{key.token_budget} ({say.count(key.segment_slots, 'slot')}{axis})")
    more = len(keys) - GRAPHS_LISTED
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")


def dropped_lines(dropped: Iterable[DroppedGraph]) -> list[str]:
    """The graphs that could not be captured, those of one reason together."""
    by_reason: dict[str, list[GraphKey]] = {}
    for graph in dropped:
        by_reason.setdefault(graph.reason, []).append(graph)
    return [f"Not captured: {list_graphs(graphs)}: {reason}" for reason, graphs in by_reason.items()]


def skipped_text(workload: Workload | None) -> str:
    """How many items were left out, and why the first."""
    skipped = workload.skipped if workload else ()
    return f"{len(skipped)}, first: {skipped[0].source}: {skipped[0].reason}" if skipped else ""


def items_text(items: Iterable[Sequence[int]]) -> str:
    """The items of a call as a user would name them: `20 × 336×336`."""
    parts = []
    for size, group in groupby(tuple(item) for item in items):
        count = len(list(group))
        width, height, frames = size
        name = f"{width}×{height}" + (f"×{frames} frames" if frames > 1 else "")
        parts.append(name if count == 1 else f"{count} × {name}")
    return ", ".join(parts)


def environment_facts(record: Record) -> Facts:
    """What the figures were measured on and with."""
    environment, workload, resolved, ran = record.environment, record.workload, record.resolved, Ran(record)
    if environment is None:
        return Facts(())
    state = environment.gpu_states[0].values if environment.gpu_states else {}
    rate, encoder = environment.matrix_rate_tflops, environment.encoder
    compiled = ran.compiled
    if encoder and encoder.compiled and encoder.compiled.blocks:
        seconds = encoder.compiled.seconds
        compiled = say.count(encoder.compiled.blocks, "block")
        compiled += f" in {say.number(seconds, 1)} s" if seconds is not None else ""
    facts: list[tuple[str, str | None]] = [
        ("Device", environment.device),
        ("GPU memory", say.size(environment.gpu_memory_bytes) if environment.gpu_memory_bytes else None),
        ("Driver, CUDA, cuDNN", _joined(state.get("driver_version"), environment.cuda, environment.cudnn)),
        ("Power limit", f"{state['power.limit']} W" if state.get("power.limit") else None),
        ("While measuring", _states_text(environment.gpu_states)),
        ("Matrix rate", f"{say.number(rate, 0)} TFLOP/s measured" if rate else None),
        ("Attention", _joined(*dict.fromkeys((ran.backend, encoder.attn_implementation if encoder else None)))),
        ("Chosen", chosen_text(record)),
        ("Dtype", ran.dtype),
        ("Compiled", compiled),
        ("Libraries", _joined(*(f"{name} {of}" for name, of in environment.libraries.items() if of))),
        ("Python, platform", _joined(environment.python, environment.platform)),
        ("vitgraph", record.vitgraph_version),
        ("Measured", record.created_at),
    ]
    if workload is not None:
        media = ", ".join(say.count(n, name) for name, n in (("image", workload.images), ("video", workload.videos)))
        statement = workload.provenance.get("statement")
        facts += [
            ("Workload", f"{workload.name}, fingerprint {workload.fingerprint}"),
            ("Requests", of_text(workload.requests, workload.requests_brought, "request")),
            ("Items", f"{of_text(workload.items, workload.items_brought, 'item')}: {media}"),
            ("Where they come from", sentence(str(statement)) if statement else None),
        ]
    return Facts.of([*facts, ("Token budgets", say.budgets(resolved.token_budgets) if resolved else None)])


def of_text(count: int, brought: int | None, name: str) -> str:
    """A count, and of how many where some were left out: `6 of 10 requests`."""
    return say.count(count, name) if brought in (None, count) else f"{count:,} of {say.count(brought or 0, name)}"


def _joined(*parts: object) -> str:
    return ", ".join(str(part) for part in parts if part)


def chosen_text(record: Record) -> str | None:
    """Where `auto` had a choice: what it took for which calls, and what one backend alone would have cost."""
    encoder = record.environment.encoder if record.environment else None
    return choices_text(encoder.attn_choices) if encoder and encoder.attn_choices else None


def _states_text(states: Sequence[GpuState]) -> str:
    """Ranges of what the driver reported; empty without a reading."""
    parts = []
    for name, label, unit in (
        ("clocks.sm", "SM clock", "MHz"),
        ("temperature.gpu", "temperature", "°C"),
        ("power.draw", "power", "W"),
    ):
        said = (state.values.get(name, "") for state in states)
        values = [float(text) for text in said if re.fullmatch(r"-?\d+(\.\d*)?", text)]
        if values:
            parts.append(f"{label} {min(values):.0f} to {max(values):.0f} {unit}")
    capped = sum(state.values.get("clocks_event_reasons.sw_power_cap") == "Active" for state in states)
    if capped:
        parts.append(f"held by the power limit in {capped} of {len(states)} readings")
    return ", ".join(parts)
