"""Finds what two saved bench runs differ in: what rules a comparison out, and what can be the thing compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vitgraph.records.record import BenchRecord

Facts = Mapping[str, Any]

SOFTWARE = ("torch", "transformers", "triton")


@dataclass(frozen=True, slots=True)
class Difference:
    """Something in which two runs are not equal.

    Attributes:
        name: Name of the requirement or factor.
        first: What the first run has, in words.
        second: What the second run has.
    """

    name: str
    first: str
    second: str

    def __str__(self) -> str:
        return f"{self.name} ({self.first} against {self.second})"


def find_differences(first: BenchRecord, second: BenchRecord) -> tuple[tuple[Difference, ...], tuple[Difference, ...]]:
    """What two runs are not equal in.

    Returns:
        The differences that rule a comparison out, and those that can be what is compared.
    """
    ruled_out = (_difference(name, read(first), read(second)) for name, read in REQUIRED.items())
    factors = (_difference(name, read(first), read(second)) for name, read in FACTORS.items())
    return tuple(filter(None, ruled_out)), tuple(filter(None, factors))


def join_differences(differences: Sequence[Difference]) -> str:
    """Differences on one line; `nothing` where there are none."""
    return ", ".join(map(str, differences)) or "nothing"


def _difference(name: str, first: Facts, second: Facts) -> Difference | None:
    keys = [key for key in {**first, **second} if first.get(key) != second.get(key)]
    if not keys:
        return None

    def words(facts: Facts) -> str:
        # A fact called as the difference itself needs no second name.
        return ", ".join(f"{'' if key == name else f'{key} '}{_words(facts.get(key))}" for key in keys)

    return Difference(name, words(first), words(second))


def _words(value: Any) -> str:
    if value is None:
        return "not recorded"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, Mapping):
        if list(value) == ["default"]:
            return _words(value["default"])
        return ", ".join(f"{key} {_words(entry)}" for key, entry in value.items()) or "none"
    if isinstance(value, list | tuple):
        return " ".join(map(str, value)) or "automatic"
    return str(value)


def _resolved(name_of_fact: str, field: str) -> Callable[[BenchRecord], Facts]:
    return lambda record: {name_of_fact: getattr(record.resolved, field, None)}


def _items(record: BenchRecord) -> Facts:
    workload = record.workload
    if workload is None:
        return {}
    return {"requests": workload.requests, "items": workload.items, "skipped": len(workload.skipped)}


def _weights(record: BenchRecord) -> Facts:
    run = record.resolved
    return {} if run is None else {"load format": run.load_format, "revision": run.revision}


def _encoder(record: BenchRecord, field: str) -> Any:
    return getattr(record.environment.encoder, field, None) if record.environment is not None else None


def _dtype(record: BenchRecord) -> Facts:
    return {"dtype": _encoder(record, "dtype") or getattr(record.resolved, "dtype", None)}


def _backend(record: BenchRecord) -> Facts:
    return {"backend": _encoder(record, "attn_backend"), "implementation": _encoder(record, "attn_implementation")}


def _budgets(record: BenchRecord) -> Facts:
    run = record.resolved
    if run is None:
        return {}
    limits = ("max_vision_items_per_batch", "max_frames_per_batch", "slot_tiers", "video_pruning_rate")
    return {"token budgets": run.token_budgets, **{name.replace("_", " "): getattr(run, name) for name in limits}}


def _software(record: BenchRecord) -> Facts:
    environment = record.environment
    if environment is None:
        return {}
    versions = {name: environment.libraries.get(name) for name in SOFTWARE}
    driver = _reading(record, "driver_version")
    return {**versions, "CUDA": environment.cuda, "cuDNN": environment.cudnn, "driver": driver}


def _reading(record: BenchRecord, name: str) -> str | None:
    states = record.environment.gpu_states if record.environment is not None else ()
    return states[0].values.get(name) if states else None


def _power_limit(record: BenchRecord) -> Facts:
    limit = _reading(record, "power.limit")
    return {"power-limit": None if limit is None else f"{limit} W"}


REQUIRED: dict[str, Callable[[BenchRecord], Facts]] = {
    "device": lambda record: {"device": getattr(record.environment, "device", None)},
    "graph mode": lambda record: {"graph mode": record.result.graph.mode},
    "workload fingerprint": lambda record: {"workload fingerprint": getattr(record.workload, "fingerprint", None)},
    "measured items": _items,
    "requests per call": _resolved("requests per call", "requests_per_call"),
}
"""What must be equal in two runs, by the name that messages give it."""

FACTORS: dict[str, Callable[[BenchRecord], Facts]] = {
    "model": _resolved("model", "model"),
    "weights": _weights,
    "processor": _resolved("processor", "processor"),
    "dtype": _dtype,
    "backend": _backend,
    "compile": _resolved("compile", "compile"),
    "budgets": _budgets,
    "packing": _resolved("packing", "packing"),
    "ranks": _resolved("ranks", "ranks"),
    "assignment": _resolved("assignment", "assignment"),
    "software": _software,
    "vitgraph": lambda record: {"vitgraph": record.vitgraph_version},
    "power-limit": _power_limit,
}
"""What two runs can be compared across, by the name that `--across` takes."""
