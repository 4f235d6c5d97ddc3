"""Finds what two saved bench runs differ in: what rules a comparison out, and what can be the thing compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vitgraph.records.record import BenchRecord
from vitgraph.records.sections import value_at

Facts = Mapping[str, str | Callable[[BenchRecord], Any]]
"""What is compared under one name: facts in words, each by its place in the record or what reads it."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Something in which two runs are not equal."""

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
    ruled_out = (_difference(name, facts, first, second) for name, facts in REQUIRED.items())
    factors = (_difference(name, facts, first, second) for name, facts in FACTORS.items())
    return tuple(filter(None, ruled_out)), tuple(filter(None, factors))


def join_differences(differences: Sequence[Difference]) -> str:
    """Differences on one line; `nothing` where there are none."""
    return ", ".join(map(str, differences)) or "nothing"


def _difference(name: str, facts: Facts, first: BenchRecord, second: BenchRecord) -> Difference | None:
    found = {
        fact: tuple(where(one) if callable(where) else value_at(one, where) for one in (first, second))
        for fact, where in facts.items()
    }
    unequal = {fact: values for fact, values in found.items() if values[0] != values[1]}
    if not unequal:
        return None
    # A fact called as the difference itself needs no second name.
    named = [("" if fact == name else f"{fact} ", *map(_words, values)) for fact, values in unequal.items()]
    return Difference(
        name, ", ".join(fact + one for fact, one, _ in named), ", ".join(fact + other for fact, _, other in named)
    )


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


def _driver(name: str, unit: str = "") -> Callable[[BenchRecord], str | None]:
    """Reads what the driver said before the run."""

    def read(record: BenchRecord) -> str | None:
        states = record.environment.gpu_states if record.environment is not None else ()
        found = states[0].values.get(name) if states else None
        return None if found is None else f"{found}{unit}"

    return read


REQUIRED: dict[str, Facts] = {
    "device": {"device": "environment.device"},
    "graph mode": {"graph mode": "result.graph.mode"},
    "workload fingerprint": {"workload fingerprint": "workload.fingerprint"},
    "measured items": {
        "requests": "workload.requests",
        "items": "workload.items",
        "skipped": lambda one: one.workload and len(one.workload.skipped),
    },
    "requests per call": {"requests per call": "resolved.requests_per_call"},
}
"""What must be equal in two runs, by the name that messages give it."""

FACTORS: dict[str, Facts] = {
    "model": {"model": "resolved.model"},
    "weights": {"load format": "resolved.load_format", "revision": "resolved.revision"},
    "processor": {"processor": "resolved.processor"},
    "dtype": {"dtype": lambda one: value_at(one, "environment.encoder.dtype") or value_at(one, "resolved.dtype")},
    "backend": {
        "backend": "environment.encoder.attn_backend",
        "implementation": "environment.encoder.attn_implementation",
    },
    "compile": {"compile": "resolved.compile"},
    "budgets": {
        "token budgets": "resolved.token_budgets",
        "max vision items per batch": "resolved.max_vision_items_per_batch",
        "max frames per batch": "resolved.max_frames_per_batch",
        "slot tiers": "resolved.slot_tiers",
        "video pruning rate": "resolved.video_pruning_rate",
    },
    "packing": {"packing": "resolved.packing"},
    "ranks": {"ranks": "resolved.ranks"},
    "assignment": {"assignment": "resolved.assignment"},
    "software": {
        **{name: f"environment.libraries.{name}" for name in ("torch", "transformers", "triton")},
        "CUDA": "environment.cuda",
        "cuDNN": "environment.cudnn",
        "driver": _driver("driver_version"),
    },
    "vitgraph": {"vitgraph": "vitgraph_version"},
    "power-limit": {"power-limit": _driver("power.limit", " W")},
}
"""What two runs can be compared across, by the name that `--across` takes."""
