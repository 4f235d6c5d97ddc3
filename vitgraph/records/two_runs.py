"""Opens saved bench runs, and compares two of them, or several of either setting: what differs, the gains, a verdict.

Two runs are compared only where a difference in latency has a cause that can be named. What they were measured on and
with must be equal; of the settings one may differ, or those that the user names. A positive
improvement means that the second run is faster. Calls weigh as many requests as they have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitgraph.errors import UsageError
from vitgraph.records import stats
from vitgraph.records.record import BenchRecord
from vitgraph.records.resampling import compare_samples
from vitgraph.records.sample_table import EAGER, FIRST, GRAPH, HF, SECOND, FloatArray, IntArray, Samples, read_samples
from vitgraph.records.sections import value_at
from vitgraph.records.series import Improvement
from vitgraph.records.stats import METRICS, Metric, Noise
from vitgraph.records.store import SAMPLES_FILE, beside, read_record, record_file
from vitgraph.specs.parts import SAME_MARGIN_PCT

BENCH_KIND = "bench"


@dataclass(frozen=True, slots=True)
class SavedRun:
    """A run with its samples.

    Attributes:
        name: Shortest end of its path that no other of the opened runs has.
        samples: Its samples; None where the file is missing.
        notes: What had to be left out, in words.
    """

    name: str
    record: BenchRecord
    samples: Samples | None
    notes: tuple[str, ...] = ()


def open_runs(paths: Sequence[Path]) -> list[SavedRun]:
    """Opens runs by their folders or their `run.json` files.

    Raises:
        UsageError: A path is no record, is one of another command or of a newer version, or is given twice.
    """
    files = [record_file(path) for path in paths]
    folders = [file.parent for file in files]
    for folder in folders:
        if folders.count(folder) > 1:
            raise UsageError(f"{folder} is given {folders.count(folder)} times; give each run once")
    return [_open(name, file) for name, file in zip(_names(folders), files, strict=True)]


def _open(name: str, file: Path) -> SavedRun:
    record = read_record(file, BENCH_KIND)
    assert isinstance(record, BenchRecord)
    if record.samples_file is None or not beside(file, record.samples_file).exists():
        missing = record.samples_file or SAMPLES_FILE
        note = f"{name}: {missing} is missing, so there are no samples and no plots of latency"
        return SavedRun(name, record, None, (note,))
    samples = read_samples(beside(file, record.samples_file))
    return SavedRun(name, record, samples, (f"{name}: {samples.warning}",) if samples.warning else ())


def _names(folders: Sequence[Path]) -> list[str]:
    """The last part of each path, with as many parents before it as tell it from the others."""
    depth = 1
    while True:
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(names)) == len(names) or depth >= max(len(folder.parts) for folder in folders):
            return names
        depth += 1


# -- what two of them differ in ----------------------------------------------------------------------------------------

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


def _driver(record: BenchRecord, name: str) -> str | None:
    """What the driver said before the run."""
    states = record.environment.gpu_states if record.environment is not None else ()
    return states[0].values.get(name) if states else None


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
        "driver": lambda one: _driver(one, "driver_version"),
    },
    "vitgraph": {"vitgraph": "vitgraph_version"},
    "power-limit": {"power-limit": lambda one: (found := _driver(one, "power.limit")) and f"{found} W"},
}
"""What two runs can be compared across, by the name that `--across` takes."""


# -- a comparison ------------------------------------------------------------------------------------------------------

GRAPH_ONLY_FACTORS = frozenset({"budgets", "packing"})
"""Factors that leave eager mode as it is: there, eager against eager measures the noise between the two runs."""


@dataclass(frozen=True, slots=True)
class DeltaRow:
    """One metric of one mode on both sides.

    Attributes:
        n: Requests that were measured in all runs.
        first_ms: The metric on the first side over these requests, milliseconds a request; a mean over its runs.
        second_ms: The same on the second side.
        found: What the second side gains. Its noise floor is what two measurements of the same thing differ by here; of
            several runs, what those of one side do.
        is_control: Both sides did the same in this mode, so the delta is noise between runs.
    """

    mode: str
    metric: Metric
    n: int
    first_ms: float
    second_ms: float
    found: Improvement
    is_control: bool


@dataclass(frozen=True, slots=True)
class RunComparison:
    """What two sides differ in, and by how much.

    Attributes:
        firsts: The runs that percentages refer to.
        seconds: The runs that are judged.
        differing: The factors in which they differ: what is compared. Empty for a repeat.
        requests: Requests that were measured in eager and graph mode in all runs.
        noise_source: Where the noise floors come from, in words.
        verdict_reason: Why the verdict on the mean latency in graph mode, in words.
    """

    firsts: tuple[SavedRun, ...]
    seconds: tuple[SavedRun, ...]
    differing: tuple[Difference, ...]
    requests: int
    rows: tuple[DeltaRow, ...]
    noise_source: str
    verdict_reason: str

    @property
    def runs(self) -> tuple[SavedRun, ...]:
        """All of them; what those of a side were given is equal."""
        return self.firsts + self.seconds

    def row(self, mode: str, metric: Metric) -> DeltaRow:
        """The delta of one metric in one mode."""
        return next(row for row in self.rows if (row.mode, row.metric) == (mode, metric))

    @property
    def verdict(self) -> stats.Verdict:
        """The verdict on the mean latency in graph mode."""
        return self.row(GRAPH, "mean").found.verdict


class _InAll(NamedTuple):
    """Calls that all runs measured: their requests, `[n]`, and by series the times of either side, `[runs, n]`."""

    requests: IntArray
    times: dict[str, tuple[FloatArray, FloatArray]]


def compare_sides(
    firsts: Sequence[SavedRun],
    seconds: Sequence[SavedRun],
    across: Sequence[str] = (),
    margin_pct: float = SAME_MARGIN_PCT,
) -> RunComparison:
    """Compares runs of the same requests on the same device with runs of other settings, each a process of its own.

    Several runs a side measure the noise between processes; of one run a side, only that within it is known.

    Args:
        across: Factors that may differ between the sides, by name; empty allows any one of them.

    Raises:
        UsageError: Runs of one side differ in something, or the sides are unlike; the message names every difference
            that stands in the way.
    """
    for first, other in ((side[0], other) for side in (firsts, seconds) for other in side[1:]):
        if unlike := [one for found in find_differences(first.record, other.record) for one in found]:
            raise UsageError(
                f"{first.name} and {other.name} are given as runs of one side, but differ in "
                f"{', '.join(map(str, unlike))}; a side is one setting, measured several times"
            )
    differing = _allowed_differences(firsts[0], seconds[0], across)
    tables = [[run.samples or Samples.of([]) for run in side] for side in (firsts, seconds)]
    runs, is_repeated = (*firsts, *seconds), len(firsts) + len(seconds) > 2
    common, stock = _in_all(tables, [EAGER, GRAPH]), _in_all(tables, [HF])
    if not common.requests.size:
        counts = (table.paired([EAGER, GRAPH]).request_count for side in tables for table in side)
        counted = " and ".join(f"{count} in {run.name}" for count, run in zip(counts, runs, strict=True))
        raise UsageError(
            f"{' and '.join(run.name for run in runs)} have no request that {'all' if is_repeated else 'both'} "
            f"measured in eager and graph mode ({counted}); compare runs that ended with a result"
        )
    is_controlled = {difference.name for difference in differing} <= GRAPH_ONLY_FACTORS
    noise = None if is_repeated else _noise([table for side in tables for table in side], common, is_controlled)
    said = ((run.name, run.record.result.comparison) for run in runs)
    invalid = [f"{name}: {found.verdict_reason}" for name, found in said if found.verdict == "invalid"]
    rows, reason = [], "; ".join(invalid)
    for mode, both in {EAGER: common, GRAPH: common, **({HF: stock} if stock.requests.size else {})}.items():
        for metric in METRICS:
            found, why = _judge(both, mode, metric, noise, bool(invalid), margin_pct)
            first_ms, second_ms = (
                float(np.mean([getattr(stats.summarize(times, both.requests), f"{metric}_ms") for times in side]))
                for side in both.times[mode]
            )
            is_control = is_controlled and mode != GRAPH
            rows.append(DeltaRow(mode, metric, int(both.requests.sum()), first_ms, second_ms, found, is_control))
            if (mode, metric) == (GRAPH, "mean"):
                reason = reason or why
    unmeasured = "; the noise between the two runs was not measured, since their eager modes differ too"
    between = " and between the two runs" if is_controlled else unmeasured
    source = (
        f"the spread of the runs of one side, {len(firsts)} and {len(seconds)} of them; every interval holds it, so "
        "that a verdict asks for no more"
        if is_repeated
        else f"the larger of eager against eager in each run{between}; with one run a side the noise between processes "
        "is unknown: --compare A1,A2 B1,B2 measures it"
    )
    requests = int(common.requests.sum())
    return RunComparison(tuple(firsts), tuple(seconds), differing, requests, tuple(rows), source, reason)


def _judge(
    both: _InAll, mode: str, metric: Metric, noise: Noise | None, is_invalid: bool, margin_pct: float
) -> tuple[Improvement, str]:
    """What the second side gains and why that verdict; without the noise of single runs, of several a side."""
    firsts, seconds = both.times[mode]
    if noise is not None:
        judged = noise.judge(firsts[0], seconds[0], metric, both.requests, margin_pct=margin_pct)
        return judged.section(is_invalid), judged.reason()
    found, spread = compare_samples(firsts, seconds, both.requests, metric)
    # The interval holds the noise between processes: beyond zero is beyond noise.
    judged = stats.Judgement(found, 0.0, margin_pct, both.requests.size)
    interval = "the 95% interval of the mean over runs and calls"
    reason = (
        judged.reason()
        if found.ci95 is None
        else {
            "same": f"{interval} lies wholly within ±{margin_pct:g}%",
            "undecided": f"{interval} is too wide for a claim: measure more runs of either side",
        }.get(judged.verdict, f"{interval} excludes zero, the noise between processes included")
    )
    return judged.section(is_invalid).model_copy(update={"noise_floor_pct": spread}), reason


def _allowed_differences(first: SavedRun, second: SavedRun, across: Sequence[str]) -> tuple[Difference, ...]:
    unknown = [name for name in across if name not in FACTORS]
    if unknown:
        raise UsageError(f"--across has {unknown[0]!r}; two runs can be compared across {', '.join(FACTORS)}")
    ruled_out, differing = find_differences(first.record, second.record)
    pair = f"{first.name} and {second.name}"
    if ruled_out:
        raise UsageError(
            f"{pair} are not comparable: they differ in {', '.join(map(str, ruled_out))}. "
            "Measure both with the same requests on the same device"
        )
    names = [difference.name for difference in differing]
    idle = [name for name in across if name not in names]
    found = ", ".join(map(str, differing)) or "nothing"
    if idle:
        raise UsageError(f"--across has {idle[0]!r}, but {pair} have the same {idle[0]}; they differ in {found}")
    unnamed = [difference for difference in differing if difference.name not in across]
    if unnamed and (across or len(differing) > 1):
        raise UsageError(
            f"{pair} differ in {found}, so a difference in latency has no single cause. Measure a pair that differs in "
            f"one, or name all that you compare: --across {','.join(names)}"
        )
    return differing


def _in_all(tables: Sequence[Sequence[Samples]], series: Sequence[str]) -> _InAll:
    """The calls that all runs measured in all of some series."""
    paired = [[table.paired(series) for table in side] for side in tables]
    common = reduce(np.intersect1d, (one.calls for side in paired for one in side))

    def stacked(name: str, side: int) -> FloatArray:
        return np.stack([one.times[name][np.isin(one.calls, common)] for one in paired[side]])

    times = {name: (stacked(name, 0), stacked(name, 1)) for name in series}
    return _InAll(paired[0][0].requests[np.isin(paired[0][0].calls, common)], times)


def _noise(tables: Sequence[Samples], common: _InAll, is_controlled: bool) -> Noise:
    """The largest of what the same thing was seen to differ by; None where too little of it was measured."""
    repeats = [table.repeated([EAGER]) for table in tables]
    within = [Noise.of(one.times[FIRST], one.times[SECOND], one.requests, METRICS) for one in repeats]
    if not is_controlled:
        return Noise.largest(within)
    (first,), (second,) = common.times[EAGER]
    between = Noise.of(first, second, common.requests, METRICS)
    # Between the runs is the noise that matters; without it, what each run had is no bound.
    return Noise(
        {
            metric: None if floor is None else max(floor, *(one.floors[metric] or 0.0 for one in within))
            for metric, floor in between.floors.items()
        }
    )
