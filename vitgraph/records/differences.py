"""Finds what two saved bench runs differ in: what rules a comparison out, and what can be the thing compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vitgraph.records.bench_record import RunRecord

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


def find_differences(first: RunRecord, second: RunRecord) -> tuple[tuple[Difference, ...], tuple[Difference, ...]]:
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


def _setting(name_of_fact: str, *path: str, default: Any = None) -> Callable[[RunRecord], Facts]:
    def read(record: RunRecord) -> Facts:
        value: Any = record["settings"]
        for name in path:
            value = value.get(name, {} if name != path[-1] else default)
        return {name_of_fact: value}

    return read


def _device(record: RunRecord) -> Facts:
    return {"device": record.device_name}


def _graph_mode(record: RunRecord) -> Facts:
    return {"graph mode": (record["graph"] or {}).get("mode")}


def _items(record: RunRecord) -> Facts:
    workload = record["workload"]
    return {name: workload.get(name) for name in ("requests", "items")} | {"skipped": len(workload.get("skipped", []))}


def _weights(record: RunRecord) -> Facts:
    model = record["settings"]["model"]
    return {"load format": model.get("load_format"), "revision": model.get("revision")}


def _dtype(record: RunRecord) -> Facts:
    return {"dtype": record["environment"].get("dtype") or record["settings"]["model"].get("dtype")}


def _backend(record: RunRecord) -> Facts:
    return {"backend": record.backend_used, "implementation": record["environment"].get("attn_implementation")}


def _budgets(record: RunRecord) -> Facts:
    graph, resolved = record["settings"]["graph"], record["settings"]["resolved"]
    limits = ("max_vision_items_per_batch", "max_frames_per_batch")
    return {
        "token budgets": resolved["token_budgets"],
        **{name.replace("_", " "): resolved[name] for name in limits},
        "slot tiers": graph.get("slot_tiers", True),
        "video pruning rate": graph.get("video_pruning_rate", 0.0),
    }


def _software(record: RunRecord) -> Facts:
    environment = record["environment"]
    libraries = environment.get("libraries", {})
    driver = (environment.get("gpu_state") or {}).get("driver_version")
    versions = {name: libraries.get(name) for name in SOFTWARE}
    return {**versions, "CUDA": environment.get("cuda"), "cuDNN": environment.get("cudnn"), "driver": driver}


def _power_limit(record: RunRecord) -> Facts:
    limit = (record["environment"].get("gpu_state") or {}).get("power.limit")
    return {"power-limit": None if limit is None else f"{limit} W"}


REQUIRED: dict[str, Callable[[RunRecord], Facts]] = {
    "device": _device,
    "graph mode": _graph_mode,
    "workload fingerprint": lambda record: {"workload fingerprint": record["workload"].get("fingerprint")},
    "measured items": _items,
    "requests per call": _setting("requests per call", "bench", "requests_per_call"),
}
"""What must be equal in two runs, by the name that messages give it."""

FACTORS: dict[str, Callable[[RunRecord], Facts]] = {
    "model": _setting("model", "model", "model"),
    "weights": _weights,
    "processor": _setting("processor", "model", "mm_processor_kwargs", default={}),
    "dtype": _dtype,
    "backend": _backend,
    "compile": _setting("compile", "model", "compile", default=False),
    "budgets": _budgets,
    "packing": _setting("packing", "graph", "packing"),
    "ranks": _setting("ranks", "parallel", "ranks", default=1),
    "assignment": _setting("assignment", "parallel", "assignment", default="size"),
    "software": _software,
    "vitgraph": lambda record: {"vitgraph": record["vitgraph_version"]},
    "power-limit": _power_limit,
}
"""What two runs can be compared across, by the name that `--across` takes."""
