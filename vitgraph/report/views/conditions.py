"""What was run, in phrases: the first lines of every report, whatever it is of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from vitgraph.records.record import CompareRecord, Record
from vitgraph.records.sections import DroppedGraph, GpuState, GraphKey, choices_text, value_at
from vitgraph.report import say
from vitgraph.report.document import Document, Facts, Section, document, section

GRAPHS_LISTED = 8


class Ran:
    """What the run of a record was, each fact as a phrase, which is empty where it is not known.

    Attributes:
        device: The device, and how many of them shared the calls.
        is_cpu: True where graphs were stood in for on a CPU, where there are no launches to save.
        backend_used: The attention backend that ran; None where there is not one for all.
        backend: The attention backend that ran, and the one asked for where that is another.
        chosen: Where `auto` had a choice: what it took for which calls, and what one backend alone would have cost.
        dtype: The dtype that ran; None where the run ended before it was chosen and was not told.
        weights: What the weights are: `random weights, bfloat16`, or nothing.
        compiled: Whether the repeated blocks were compiled, in every series alike.
        packing: How calls were packed, and how they were shared among ranks.
        budgets: Token budgets in few words.
        per_call: How many requests are encoded together.
        measured: How much was measured: the workload, its requests and rounds.
        skipped: How many items were left out, and why the first.
        warning: Why the record is incomplete; empty where it is complete.
    """

    def __init__(self, record: Record) -> None:
        self.record = record
        at, workload, status = self.at, record.workload, record.status
        self.ranks: int = at("resolved.ranks") or 1
        device = at("environment.device") or "unknown device"
        self.device: str = device if self.ranks == 1 else f"{self.ranks} × {device}"
        self.is_cpu = "cpu-replay" in (at("result.graph.mode"), at("result.comparison.mode"))
        self.model: str = at("resolved.model") or "unknown model"
        self.workload: str = at("workload.name") or "no workload"
        self.backend_used: str | None = at("environment.encoder.attn_backend")
        self.backend = backend_text(at("resolved.attn_backend"), self.backend_used)
        self.chosen = choices_text(at("environment.encoder.attn_choices") or ())
        dtype: str | None = at("environment.encoder.dtype") or at("resolved.dtype")
        self.dtype = None if dtype == "auto" else dtype
        self.weights = say.joined("random weights" if at("resolved.load_format") == "dummy" else "", self.dtype)
        self.compiled = compiled_text(at("resolved.compile"))
        packing, assignment = at("resolved.packing"), at("resolved.assignment")
        shared = f"shared by {assignment}" if assignment and self.ranks > 1 else ""
        self.packing = say.joined(f"{packing} packing", shared) if packing is not None else ""
        self.budgets = budgets_of(at("resolved.token_budgets") or {})
        together, several = at("resolved.requests_per_call"), "calls of several sizes" if record.resolved else ""
        self.per_call = several if together is None else f"{say.count(together, 'request')} a call"
        rounds = say.count(at("resolved.rounds") or 0, "round") if at("resolved.rounds") else ""
        self.measured = say.joined(workload.name, say.count(workload.requests, "request"), rounds) if workload else ""
        left = workload.skipped if workload else ()
        self.skipped = f"{len(left)}, first: {left[0].source}: {left[0].reason}" if left else ""
        self.warning = "" if status == "complete" else f"{status.capitalize()}: {record.status_reason}"

    def at(self, path: str) -> Any:
        """A field of the record; None where something on the way to it is missing."""
        return value_at(self.record, path)

    def conditions(self, *without: str) -> tuple[str, ...]:
        """What was run: device, backend, compiled or not, packing, budgets, requests a call, weights, workload."""
        names = ["device", "backend", "compiled", "packing", "budgets", "per_call", "weights", "measured"]
        if self.record.workload is None:
            names.remove("per_call")
        found = (getattr(self, name) for name in names if name not in without)
        return tuple(part for part in found if part and part != say.NO_VALUE)

    def subtitle(self, *more: str, without: str = "") -> str:
        """What was measured on what, in one line for a chart; `without` as of `conditions`."""
        names = (name for name in ("device", "backend", "compiled", "measured") if name != without)
        note = "replay on a CPU, no speed-up claimed" if self.is_cpu else ""
        return say.joined(
            self.model.rsplit("/", 1)[-1], *(getattr(self, name) for name in names), *more, note, by=" · "
        )

    def document(self, name: str, *found: Section | None, after: Sequence[Section] = (), **more: Any) -> Document:
        """The report of the record: its title, conditions, command and environment, unless `more` says otherwise.

        Args:
            found: Its sections; those without a block are left out.
            after: Sections behind that of the environment.
        """
        environment = section("Environment", environment_facts(self), is_detail=True)
        title = f"{self.model} on {self.device}, workload {self.workload}"
        usual = {"what": self.conditions(), "warning": self.warning, "command": self.record.command}
        return document(name, more.pop("title", title), *found, environment, *after, **{**usual, **more})


def backend_text(requested: str | None, used: str | None) -> str:
    """The attention backend that ran, and the one asked for where that is another."""
    return used or say.NO_VALUE if requested in (None, used) else f"{used or 'none ran'} (asked for {requested})"


def compiled_text(is_compiled: Any) -> str:
    """Whether blocks were compiled."""
    return "blocks compiled" if is_compiled else "blocks not compiled"


def budgets_of(token_budgets: Mapping[str, Sequence[int]]) -> str:
    """Token budgets in few words: how many, and their ends, by path where there are several."""
    parts = []
    for path, budgets in token_budgets.items():
        ends = f"{budgets[0]} to {budgets[-1]}" if len(budgets) > 1 else " ".join(map(str, budgets))
        parts.append(f"{say.path(path)}{say.count(len(budgets), 'budget')}{f' {ends}' if ends else ''}")
    return ", ".join(parts)


def limits_text(items: int | None, frames: int | None) -> str:
    """How much a replay may hold."""
    return f"{say.NO_VALUE if items is None else items} / {frames or 'image-only'}"


def list_graphs(keys: Sequence[GraphKey]) -> str:
    """Graphs on one line, the first of them by path, budget, slots and axis key, each where it says something."""
    names = []
    for key in keys[:GRAPHS_LISTED]:
        axis = f", {'×'.join(map(str, key.axis_key))}" if key.axis_key else ""
        names.append(f"{say.path(key.path)}{key.token_budget} ({say.count(key.segment_slots, 'slot')}{axis})")
    more = len(keys) - GRAPHS_LISTED
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")


def dropped_lines(dropped: Iterable[DroppedGraph]) -> list[str]:
    """The graphs that could not be captured, those of one reason together."""
    by_reason: dict[str, list[GraphKey]] = {}
    for graph in dropped:
        by_reason.setdefault(graph.reason, []).append(graph)
    return [f"Not captured: {list_graphs(graphs)}: {reason}" for reason, graphs in by_reason.items()]


def misses_text(miss: Any) -> str:
    """The items that miss for one reason: `items`, `text`, and of many calls `share` and the ends of their tokens."""
    share, low, high = (value_at(miss, name) for name in ("share", "smallest_tokens", "largest_tokens"))
    of, sizes = "" if share is None else f" ({say.share(share)})", "" if low is None else f", {low} to {high} tokens"
    return f"Misses: {say.count(value_at(miss, 'items'), 'item')}{of}{sizes}: {value_at(miss, 'text')}"


def items_text(items: Iterable[Sequence[int]]) -> str:
    """The items of a call as a user would name them: `20 × 336×336`."""
    parts = []
    for size, group in groupby(tuple(item) for item in items):
        count = len(list(group))
        width, height, frames = size
        name = f"{width}×{height}" + (f"×{frames} frames" if frames > 1 else "")
        parts.append(name if count == 1 else f"{count} × {name}")
    return ", ".join(parts)


def reference_text(record: CompareRecord) -> str:
    """What outputs were checked against."""
    reference = record.result.comparison.reference
    if reference is None:
        return ""
    return (
        f"{say.count(reference.calls, 'call')} with every series against the same tower in {reference.dtype}; "
        f"relative L2 up to {say.error(reference.limit)} passes ({reference.backend} in this dtype: "
        f"{say.error(reference.own_error)})"
    )


def environment_facts(ran: Ran) -> Facts:
    """What the figures were measured on and with."""
    record, environment, workload = ran.record, ran.record.environment, ran.record.workload
    if environment is None:
        return Facts(())
    state = environment.gpu_states[0].values if environment.gpu_states else {}
    rate, memory, compiled = environment.matrix_rate_tflops, environment.gpu_memory_bytes, ran.compiled
    if blocks := ran.at("environment.encoder.compiled.blocks"):
        seconds = ran.at("environment.encoder.compiled.seconds")
        compiled = say.count(blocks, "block") + (f" in {say.number(seconds, 1)} s" if seconds is not None else "")
    implementation = ran.at("environment.encoder.attn_implementation")
    facts: list[tuple[str, str | None]] = [
        ("Device", environment.device),
        ("GPU memory", say.size(memory) if memory else None),
        ("Driver, CUDA, cuDNN", say.joined(state.get("driver_version"), environment.cuda, environment.cudnn)),
        ("Power limit", f"{state['power.limit']} W" if state.get("power.limit") else None),
        ("While measuring", _states_text(environment.gpu_states)),
        ("Matrix rate", f"{say.number(rate, 0)} TFLOP/s measured" if rate else None),
        ("Attention", ", ".join(filter(None, dict.fromkeys((ran.backend, implementation))))),
        ("Chosen", ran.chosen),
        ("Dtype", ran.dtype),
        ("Compiled", compiled),
        ("Libraries", say.joined(*(f"{name} {of}" for name, of in environment.libraries.items() if of))),
        ("Python, platform", say.joined(environment.python, environment.platform)),
        ("vitgraph", record.vitgraph_version),
        ("Measured", record.created_at),
    ]
    if workload is not None:
        media = ", ".join(say.count(n, name) for name, n in (("image", workload.images), ("video", workload.videos)))
        facts += [
            ("Workload", f"{workload.name}, fingerprint {workload.fingerprint}"),
            ("Requests", of_text(workload.requests, workload.requests_brought, "request")),
            ("Items", f"{of_text(workload.items, workload.items_brought, 'item')}: {media}"),
            ("Where they come from", say.sentence(str(workload.provenance.get("statement") or ""))),
        ]
    return Facts.of([*facts, ("Token budgets", say.budgets(ran.at("resolved.token_budgets") or {}))])


def of_text(count: int, brought: int | None, name: str) -> str:
    """A count, and of how many where some were left out: `6 of 10 requests`."""
    return say.count(count, name) if brought in (None, count) else f"{count:,} of {say.count(brought or 0, name)}"


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
