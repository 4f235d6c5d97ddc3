"""What was run, in phrases: the first lines of every report, whatever it is of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from vitgraph.records.attention_choices import choices_text
from vitgraph.records.record import Record
from vitgraph.records.sections import DroppedGraph, Environment, GpuState, GraphKey, Resolved, Workload
from vitgraph.report.columns import NO_VALUE, budgets_text, bytes_text, count_text, number_text
from vitgraph.report.document import Facts, sentence

UNKNOWN_DEVICE = "unknown device"
GRAPHS_LISTED = 8


def device_of(record: Record) -> str:
    """The device, and how many of them shared the calls."""
    device = record.environment.device if record.environment else UNKNOWN_DEVICE
    ranks = record.resolved.ranks if record.resolved else 1
    return device if ranks == 1 else f"{ranks} × {device}"


def model_of(record: Record) -> str:
    """The model as given."""
    return record.resolved.model if record.resolved else "unknown model"


def workload_of(record: Record) -> str:
    """Short name of the workload."""
    return record.workload.name if record.workload else "no workload"


def backend_of(record: Record) -> str:
    """The attention backend that ran, and the one asked for where that is another."""
    encoder = record.environment.encoder if record.environment else None
    used = encoder.attn_backend if encoder else None
    requested = record.resolved.attn_backend if record.resolved else None
    if requested in (None, used):
        return used or NO_VALUE
    return f"{used or 'none ran'} (asked for {requested})"


def dtype_of(record: Record) -> str | None:
    """The dtype that ran; None where the run ended before it was chosen and was not told."""
    encoder = record.environment.encoder if record.environment else None
    dtype = encoder.dtype if encoder else record.resolved.dtype if record.resolved else None
    return None if dtype == "auto" else dtype


def weights_of(record: Record) -> str:
    """What the weights are: `random weights, bfloat16`, or nothing."""
    is_random = record.resolved is not None and record.resolved.load_format == "dummy"
    return ", ".join(part for part in ("random weights" if is_random else None, dtype_of(record)) if part)


def compiled_of(record: Record) -> str:
    """Whether the repeated blocks were compiled, in every series alike."""
    is_compiled = record.resolved is not None and record.resolved.compile
    return "blocks compiled" if is_compiled else "blocks not compiled"


def packing_of(record: Record) -> str:
    """How calls were packed, and how they were shared among ranks."""
    resolved = record.resolved
    if resolved is None or resolved.packing is None:
        return ""
    shared = f", shared by {resolved.assignment}" if resolved.assignment and resolved.ranks > 1 else ""
    return f"{resolved.packing} packing{shared}"


def budgets_of(token_budgets: Mapping[str, Sequence[int]]) -> str:
    """Token budgets in few words: how many, and their ends, by path where there are several."""
    parts = []
    for path, budgets in token_budgets.items():
        name = "" if path == "default" else f"{path} "
        ends = f"{budgets[0]} to {budgets[-1]}" if len(budgets) > 1 else " ".join(map(str, budgets))
        parts.append(f"{name}{count_text(len(budgets), 'budget')}{f' {ends}' if ends else ''}")
    return ", ".join(parts)


def per_call_of(resolved: Resolved) -> str:
    """How many requests are encoded together."""
    number = resolved.requests_per_call
    return "calls of several sizes" if number is None else f"{count_text(number, 'request')} a call"


def measured_of(record: Record) -> str:
    """How much was measured: the workload, its requests and rounds."""
    if record.workload is None:
        return ""
    rounds = record.resolved.rounds if record.resolved else None
    parts = [workload_of(record), count_text(record.workload.requests, "request")]
    return ", ".join([*parts, *([count_text(rounds, "round")] if rounds else [])])


def conditions(record: Record, *, with_backend: bool = True, with_compiled: bool = True) -> tuple[str, ...]:
    """What was run: device, backend, compiled or not, packing, budgets, requests a call, weights, workload.

    Args:
        record: The record.
        with_backend: False where each row has a backend of its own.
        with_compiled: False where rows are compiled and not.
    """
    resolved = record.resolved
    found = [
        device_of(record),
        backend_of(record) if with_backend else None,
        compiled_of(record) if with_compiled else None,
        packing_of(record),
        budgets_of(resolved.token_budgets) if resolved else None,
        per_call_of(resolved) if resolved and record.workload else None,
        weights_of(record),
        measured_of(record),
    ]
    return tuple(part for part in found if part and part != NO_VALUE)


def subtitle_of(record: Record, *more: str, with_backend: bool = True, with_compiled: bool = True) -> str:
    """What was measured on what, in one line for a chart."""
    parts = (
        model_of(record).rsplit("/", 1)[-1],
        device_of(record),
        backend_of(record) if with_backend else "",
        compiled_of(record) if with_compiled else "",
        measured_of(record),
        *more,
    )
    return " · ".join(part for part in parts if part and part != NO_VALUE)


def warning_of(record: Record) -> str:
    """Why a record is incomplete; empty where it is complete."""
    return "" if record.status == "complete" else f"{record.status.capitalize()}: {record.status_reason}"


def limits_text(items: int | None, frames: int | None) -> str:
    """How much a replay may hold."""
    return f"{NO_VALUE if items is None else items} / {frames or 'image-only'}"


def graph_name(key: GraphKey | Any) -> str:
    """Path, budget and axis key of a graph, each where it says something."""
    path = "" if key.path == "default" else f"{key.path} "
    axis = f", {'×'.join(map(str, key.axis_key))}" if key.axis_key else ""
    return f"{path}{key.token_budget} ({count_text(key.segment_slots, 'slot')}{axis})"


def list_graphs(keys: Sequence[GraphKey]) -> str:
    """Graphs on one line, the first of them by name."""
    more = len(keys) - GRAPHS_LISTED
    return ", ".join(map(graph_name, keys[:GRAPHS_LISTED])) + (f" and {more} more" if more > 0 else "")


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
    environment, workload, resolved = record.environment, record.workload, record.resolved
    if environment is None:
        return Facts(())
    encoder = environment.encoder
    driver = environment.gpu_states[0].values.get("driver_version") if environment.gpu_states else None
    power = environment.gpu_states[0].values.get("power.limit") if environment.gpu_states else None
    rate = environment.matrix_rate_tflops
    implementation = encoder.attn_implementation if encoder else None
    return Facts.of(
        (
            ("Device", environment.device),
            ("GPU memory", bytes_text(environment.gpu_memory_bytes) if environment.gpu_memory_bytes else None),
            ("Driver, CUDA, cuDNN", _joined(driver, environment.cuda, environment.cudnn)),
            ("Power limit", f"{power} W" if power else None),
            ("While measuring", _states_text(environment.gpu_states)),
            ("Matrix rate", f"{number_text(rate, 0)} TFLOP/s measured" if rate else None),
            ("Attention", _joined(*dict.fromkeys((backend_of(record), implementation)))),
            ("Chosen", choices_text(encoder.attn_choices) if encoder and encoder.attn_choices else None),
            ("Dtype", dtype_of(record)),
            ("Compiled", _compiled_text(environment) or compiled_of(record)),
            ("Libraries", _joined(*(f"{name} {of}" for name, of in environment.libraries.items() if of))),
            ("Python, platform", _joined(environment.python, environment.platform)),
            ("vitgraph", record.vitgraph_version),
            ("Measured", record.created_at),
            *(_workload_facts(workload) if workload else ()),
            ("Token budgets", budgets_text(resolved.token_budgets) if resolved else None),
        )
    )


def _workload_facts(workload: Workload) -> Iterable[tuple[str, str | None]]:
    media = ", ".join(count_text(n, name) for name, n in (("image", workload.images), ("video", workload.videos)))
    statement = workload.provenance.get("statement")
    return (
        ("Workload", f"{workload.name}, fingerprint {workload.fingerprint}"),
        ("Requests", of_text(workload.requests, workload.requests_brought, "request")),
        ("Items", f"{of_text(workload.items, workload.items_brought, 'item')}: {media}"),
        ("Where they come from", sentence(str(statement)) if statement else None),
    )


def of_text(count: int, brought: int | None, name: str) -> str:
    """A count, and of how many where some were left out: `6 of 10 requests`."""
    return count_text(count, name) if brought in (None, count) else f"{count:,} of {count_text(brought or 0, name)}"


def _compiled_text(environment: Environment) -> str:
    compiled = environment.encoder.compiled if environment.encoder else None
    if compiled is None or not compiled.blocks:
        return ""
    seconds = f" in {number_text(compiled.seconds, 1)} s" if compiled.seconds is not None else ""
    return f"{count_text(compiled.blocks, 'block')}{seconds}"


def _joined(*parts: object) -> str:
    return ", ".join(str(part) for part in parts if part)


def _states_text(states: Sequence[GpuState]) -> str:
    """Ranges of what the driver reported; empty without a reading."""
    parts = []
    for name, label, unit in (
        ("clocks.sm", "SM clock", "MHz"),
        ("temperature.gpu", "temperature", "°C"),
        ("power.draw", "power", "W"),
    ):
        values = [float(text) for state in states if _is_float(text := state.values.get(name, ""))]
        if values:
            parts.append(f"{label} {min(values):.0f} to {max(values):.0f} {unit}")
    capped = sum(state.values.get("clocks_event_reasons.sw_power_cap") == "Active" for state in states)
    if capped:
        parts.append(f"held by the power limit in {capped} of {len(states)} readings")
    return ", ".join(parts)


def _is_float(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
