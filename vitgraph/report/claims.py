"""What a report may claim of a run, in words: its verdict, its improvements, and the conditions they hold for.

Improvements are positive where graph mode is faster, as upstream prints them; the record holds the opposite sign.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from vitgraph.records.bench_record import RunRecord
from vitgraph.records.stats import P99_MIN_SAMPLES
from vitgraph.report.units import NO_VALUE, count_text, ms_text, share_text, signed_pct_text

NO_VERDICT = "none"
LAUNCH_GAP_MEANING = "wall time of a replay over its GPU-busy time"
IMPROVEMENT_NOTE = "Positive = graph faster; milliseconds a request, eager→graph."


@dataclass(frozen=True, slots=True)
class Claim:
    """One improvement and what may be said of it.

    Attributes:
        metric: What was compared: `Mean`, `P99`, or `Max` where there are too few requests for a P99.
        improvement: Percent with its sign, or a dash.
        times: Both times, `5.13→4.52 ms`; empty where nothing was compared.
        verdict: `faster`, `slower`, `same`, `undecided`, `invalid`, or `none` where no GPU was measured.
        interval: The 95 % interval of the improvement, or empty.
    """

    metric: str
    improvement: str
    times: str
    verdict: str
    interval: str

    @property
    def headline(self) -> str:
        """The improvement as upstream prints it."""
        return f"{self.improvement} ({self.times})" if self.times else self.improvement

    @property
    def qualifier(self) -> str:
        """What may be claimed of it, without its interval; empty where nothing was compared."""
        if not self.times:
            return ""
        label = f"max (n<{P99_MIN_SAMPLES}), " if self.metric == "Max" else ""
        return label + ("not a GPU" if self.verdict == NO_VERDICT else self.verdict)

    @property
    def note(self) -> str:
        """What may be claimed of it; empty where nothing was compared."""
        return ", ".join(part for part in (self.qualifier, self.interval) if part)


@dataclass(frozen=True, slots=True)
class VerdictText:
    """The verdict on a run.

    Attributes:
        verdict: `faster`, `slower`, `same`, `undecided`, `invalid`, or `none`.
        headline: One short sentence.
        reason: Why, in words.
    """

    verdict: str
    headline: str
    reason: str


_SLOWING_WASTE = 0.2
"""Waste that likely explains slower graphs: they compute a quarter more rows than eager."""

_HEADLINES = {
    "faster": "Graphs are faster",
    "slower": "Graphs are slower",
    "same": "Graphs and eager take the same time",
    "undecided": "Undecided",
    "invalid": "No verdict: the measurement is not valid",
}


def claim_of(record: RunRecord, metric: str) -> Claim:
    """The improvement of a run in `mean` or `p99`, with a maximum in place of a P99 of too few requests."""
    comparison = record["comparison"] or {}
    name = "Mean" if metric == "mean" else "P99"
    if not comparison.get("requests"):
        return Claim(name, NO_VALUE, "", NO_VERDICT, "")
    eager, graph = record["summary"]["eager"], record["summary"]["graph"]
    entry = comparison[metric]
    improvement, key = entry["improvement_pct"], f"{metric}_ms"
    if metric == "p99" and not eager["p99_supported"]:
        name, key = "Max", "max_ms"
        improvement = 100 * (1 - graph[key] / eager[key]) if eager[key] else None
    times = f"{ms_text(eager[key])}→{ms_text(graph[key])} ms"
    verdict = NO_VERDICT if record.is_cpu_replay else entry["verdict"]
    interval = ""
    if entry["ci95"] is not None and verdict not in (NO_VERDICT, "invalid"):
        interval = interval_text(entry["ci95"])
    return Claim(name, signed_pct_text(improvement), times, verdict, interval)


def interval_text(ci95: Sequence[float]) -> str:
    """The interval of a delta, turned into one of the improvement."""
    low, high = (signed_pct_text(0.0 - end) for end in reversed(ci95))
    return f"95% CI {low.removesuffix('%')} … {high}"


def verdict_of(record: RunRecord) -> VerdictText:
    """The verdict on a run; an incomplete one says why it ended."""
    correctness = record["correctness"] or {}
    if correctness.get("status") == "incorrect":
        return VerdictText(NO_VERDICT, "Outputs are wrong: nothing was timed", str(record["status_reason"]))
    comparison = record["comparison"] or {}
    if not comparison.get("requests"):
        reason = record["status_reason"] or "no request was measured in both modes"
        return VerdictText(NO_VERDICT, "Nothing was compared", str(reason))
    if record.is_cpu_replay:
        return VerdictText(NO_VERDICT, "No verdict: replayed on a CPU", str(comparison["verdict_reason"]))
    verdict = comparison["verdict"]
    cause = _cause_of_slower(record) if verdict == "slower" else ""
    return VerdictText(verdict, _HEADLINES[verdict], str(comparison["verdict_reason"]) + cause)


def _cause_of_slower(record: RunRecord) -> str:
    """Why graphs are likely slower, to go on with after the reason of the verdict; empty where waste is no cause."""
    graph = record["graph"]
    waste = graph["waste"] or 0.0
    if waste < _SLOWING_WASTE:
        return ""
    factor = graph["budget_tokens_replayed"] / graph["tokens_replayed"]
    return (
        f"; likely because the graphs compute {factor:.1f} times the rows of eager (waste {share_text(waste)}) and "
        "GPU time binds, not launches: use budgets nearer to the items' sizes"
    )


def remark_of(record: RunRecord) -> str:
    """Why a run is incomplete, not valid or no measurement of a GPU; empty where a reader need not be told anything."""
    if record["status"] != "complete":
        return f"{record['status']}: {record['status_reason']}"
    verdict = verdict_of(record)
    return f"no verdict: {verdict.reason}" if verdict.verdict in (NO_VERDICT, "invalid") else ""


def backend_text(record: RunRecord) -> str:
    """The attention backend that ran, and the one asked for where that is another."""
    used, requested = record.backend_used, record.backend_requested
    if requested in (None, used):
        return used or NO_VALUE
    return f"{used or 'none ran'} (asked for {requested})"


def dtype_of(record: RunRecord) -> str | None:
    """The dtype that ran; None where the run ended before it was chosen and was not told."""
    dtype = record["environment"].get("dtype") or record["settings"]["model"].get("dtype")
    return None if dtype == "auto" else dtype


def model_text(record: RunRecord) -> str:
    """What the weights are, in brackets after the model's name, or nothing: `random weights, bfloat16`."""
    is_random = record["settings"]["model"].get("load_format") == "dummy"
    return ", ".join(part for part in ("random weights" if is_random else None, dtype_of(record)) if part)


def workload_name(record: RunRecord) -> str:
    """Short name of the workload."""
    return str(record["workload"].get("name", "unknown"))


def size_text(record: RunRecord) -> str:
    """How much was measured: requests, warm-ups, rounds, requests a call."""
    settings = record["settings"]
    rounds = (record["comparison"] or {}).get("rounds") or settings["bench"]["rounds"]
    together = settings["bench"]["requests_per_call"]
    parts = [
        count_text(record["workload"]["requests"], "request"),
        count_text(settings["workload"]["num_warmups"], "warm-up"),
        count_text(rounds, "round"),
        f"{together} requests a call" if together > 1 else None,
    ]
    return ", ".join(part for part in parts if part)


def scenario_of(record: RunRecord) -> tuple[str, str, str, str, str, str]:
    """What runs in one table share: device, model, its weights, workload, how much of it, and its fingerprint."""
    return (
        record.device_name or "unknown device",
        record.model_name,
        model_text(record),
        workload_name(record),
        size_text(record),
        str(record["workload"].get("fingerprint")),
    )


def command_text(command: Sequence[str]) -> str:
    """A command as a shell takes it, one option a line."""
    lines: list[list[str]] = [[]]
    for word in command:
        if word.startswith("--"):
            lines.append([])
        lines[-1].append(shlex.quote(word))
    return " \\\n  ".join(" ".join(line) for line in lines if line)
