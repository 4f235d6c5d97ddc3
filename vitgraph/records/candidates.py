"""What follows from the samples of a comparison: latencies, gains, standings against the best, and the advice.

A candidate (an attention backend, or the tower compiled or not) has two series, one a mode: `FLASH_ATTN/graph`. All
series are compared on the calls that every one of them has measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from vitgraph.errors import BackendError, IncorrectOutputError, NothingReplayedError, VitgraphError
from vitgraph.records import stats
from vitgraph.records.resampling import RESAMPLES
from vitgraph.records.results import (
    COMPARED_MODES,
    OK,
    Candidate,
    CandidateMode,
    CompareResult,
    NoiseFloor,
    Recommendation,
    RowStatus,
    Standing,
)
from vitgraph.records.sample_table import EAGER, GRAPH, FloatArray, IntArray, PairedTimes, Samples
from vitgraph.records.series import Pair
from vitgraph.records.stats import Judge, Metric, Noise, latency_of, noise_of
from vitgraph.specs.parts import SAME_MARGIN_PCT

COMPARE_KIND, COMPILE_KIND = "compare-backends", "compile-rows"
UNAVAILABLE: RowStatus = "unavailable"
UNSUPPORTED: RowStatus = "unsupported"
CAPTURE_FAILED: RowStatus = "capture_failed"
INCORRECT: RowStatus = "incorrect"
OUT_OF_MEMORY: RowStatus = "out_of_memory"
ERROR: RowStatus = "error"
CLEAR, UNDECIDED, SLOWER = "clear", "undecided", "slower"
NOTHING_MEASURED = "No recommendation: no request was measured."
GAIN_METRICS: tuple[Metric, ...] = ("mean", "p99", "trimmed_mean")
NOT_YET = "the run ended before its turn"

ModeNoises = Mapping[str, tuple[Noise, float | None]]
"""By mode, what it differs from itself by, and a request of it."""
_RESAMPLE_ELEMENTS = 1_000_000


def series_name(candidate: str, mode: str) -> str:
    """A candidate's mode as samples name it."""
    return f"{candidate}/{mode}"


def mode_of(series: str) -> str:
    """The mode of a series."""
    return series.rpartition("/")[2]


def before_its_turn(name: str) -> Candidate:
    """What is known of a candidate before its turn; both modes are `error` until they are measured."""
    mode = CandidateMode(status=ERROR, reason=NOT_YET)
    return Candidate(name=name, status=ERROR, reason=NOT_YET, eager=mode, graph=mode)


def measured_series(rows: Sequence[Candidate]) -> list[str]:
    """Series of the modes that are `ok`, in the order of the rows."""
    return [series_name(row.name, mode) for row in rows for mode in COMPARED_MODES if row.mode(mode).status == OK]


def derive_results(
    result: CompareResult, samples: Samples, seed: int, ranks: int = 1, margin_pct: float = SAME_MARGIN_PCT
) -> CompareResult:
    """The result with what the samples tell of its candidates; nothing else in it is changed.

    Args:
        result: The candidates, of which each mode whose status is not `ok` gets no figures, and the comparison, whose
            `isolated` and `invalid_reasons` are read: any reason makes every verdict `invalid`.
    """
    series = measured_series(result.candidates)
    wall, gpu = samples.paired(series), samples.paired(series, "gpu_ms")
    noises = mode_noises(samples, result.comparison.isolated, seed)
    reasons = result.comparison.invalid_reasons
    judge = Judge(wall, bool(reasons), margin_pct, seed)
    latency = {}
    for name in series if len(wall.calls) else ():
        sharing = samples.sharing(name, ranks) if ranks > 1 else None
        latency[name] = latency_of(wall, gpu, name).but(sharing=sharing)

    def derived(row: Candidate) -> Candidate:
        names = {mode: series_name(row.name, mode) for mode in COMPARED_MODES}
        modes = {mode: row.mode(mode).but(latency=latency.get(name)) for mode, name in names.items()}
        if not latency.keys() >= set(names.values()):
            return row.but(**modes, gain=None)
        noise, request_noise = noises[EAGER]
        gain = judge.pair(names[EAGER], names[GRAPH], noise, GAIN_METRICS, request_noise)
        return row.but(**modes, gain=gain.but(base=EAGER, series=GRAPH))

    standings = _standings(judge, series, noises) if latency else ()
    return result.but(
        candidates=tuple(map(derived, result.candidates)),
        comparison=result.comparison.but(
            **judge.compared(reasons),
            noise_floor={
                mode: NoiseFloor(mean=noise.floors.get("mean"), p99=noise.floors.get("p99"))
                for mode, (noise, _) in noises.items()
            },
            standings=standings,
        ),
        recommendation=_recommend(standings, wall, reasons, seed),
    )


def mode_noises(samples: Samples, isolated: bool, seed: int) -> ModeNoises:
    """What each mode differs from itself, and a request of it; of several processes, the noisiest one counts."""
    found = {}
    for mode in COMPARED_MODES:
        series = [name for name in samples.series if mode_of(name) == mode]
        together = noise_of(samples, series, seed)
        if isolated:
            alone = [noise_of(samples, [name], seed)[0] for name in series]
            known = [noise for noise in alone if noise.floors.get("mean") is not None]
            together = (Noise.largest(known) if known else together[0]), together[1]
        found[mode] = together
    return found


def contrast(result: CompareResult, samples: Samples, pairs: Sequence[tuple[str, str]], seed: int) -> tuple[Pair, ...]:
    """Pairs of series of different candidates, on the calls that all measured series have."""
    measured = measured_series(result.candidates)
    judge = Judge(samples.paired(measured), bool(result.comparison.invalid_reasons), seed=seed)
    if not len(judge.times.calls):
        return ()
    noises = mode_noises(samples, result.comparison.isolated, seed)
    wanted = [pair for pair in pairs if set(pair) <= set(measured)]
    return tuple(judge.pair(*pair, _noise_between(*pair, noises), GAIN_METRICS) for pair in wanted)


def _noise_between(base: str, series: str, noises: ModeNoises) -> Noise:
    return Noise.largest([noises[mode][0] for mode in {mode_of(base), mode_of(series)}])


def failure(result: CompareResult) -> VitgraphError | None:
    """What a finished comparison must not exit with 0 for: nothing measured, or no graph replayed."""
    rows = result.candidates
    if any(row.graph.status == OK for row in rows):
        return None
    reasons = "; ".join(f"{row.name}: {row.reason}" for row in rows)
    if any(row.eager.status == OK for row in rows):
        return NothingReplayedError(f"no backend could be replayed as graphs, only eager was measured ({reasons})")
    if any(row.status == INCORRECT for row in rows):
        return IncorrectOutputError(f"no backend's outputs are right, so nothing was timed ({reasons})")
    return BackendError(f"no backend could be measured ({reasons})")


def fastest_shares(times: Sequence[FloatArray], requests: IntArray, seed: int) -> list[float]:
    """Bootstrap over calls: the share of the resamples in which each series has the smallest mean of a request.

    Args:
        times: Milliseconds a request, one value a call for each series; `[n]` each, of the same calls.
        requests: Requests of each call; `[n]`.
    """
    n = int(times[0].size)
    rng = np.random.default_rng(seed)
    wins = np.zeros(len(times))
    chunk = max(1, _RESAMPLE_ELEMENTS // n)
    for start in range(0, RESAMPLES, chunk):
        picks = rng.integers(0, n, size=(min(chunk, RESAMPLES - start), n), dtype=np.int32)
        # The sum over requests decides, since all series have the same ones.
        sums = np.stack([(values * requests)[picks].sum(axis=1) for values in times])
        wins += np.bincount(sums.argmin(axis=0), minlength=len(times))
    return [float(share) for share in wins / RESAMPLES]


def _standings(judge: Judge, series: Sequence[str], noises: ModeNoises) -> tuple[Standing, ...]:
    """Every series against the one with the smallest mean, the best first."""
    times = judge.times
    means = {name: float(np.average(times.times[name], weights=times.requests)) for name in series}
    best, *others = sorted(series, key=means.__getitem__)
    against = {name: judge.improvement(best, name, _noise_between(best, name, noises)) for name in others}
    parts = {name: name.rpartition("/") for name in (best, *others)}
    found = [
        {"name": candidate, "mode": mode, "mean_ms": means[name], "against_best": against.get(name)}
        for name, (candidate, _, mode) in parts.items()
    ]
    return tuple(map(Standing.model_validate, found))


def _recommend(
    standings: Sequence[Standing], wall: PairedTimes, invalid_reasons: Sequence[str], seed: int
) -> Recommendation:
    """Which candidate and mode to use, how sure that is, and why in a sentence or two."""
    if not standings:
        return Recommendation(text=NOTHING_MEASURED)
    if invalid_reasons:
        return Recommendation(text=f"No recommendation: {'; '.join(invalid_reasons)}.")
    best, others = standings[0], standings[1:]
    advice = f"Use {best.name} in {best.mode} mode ({best.mean_ms:.2f} ms a request)"
    if not others:
        text = f"{advice}: nothing else could be measured, so there was no choice."
        return Recommendation(name=best.name, mode=best.mode, text=text)
    arrays = [wall.times[series_name(entry.name, entry.mode)] for entry in standings]
    share = fastest_shares(arrays, wall.requests, seed)[0]
    close = [entry for entry in others if entry.verdict != SLOWER]
    often = f"it is the fastest in {100 * share:.0f}% of the bootstrap's resamples"
    if close:
        named = ", ".join(_standing_text(entry) for entry in close)
        text = f"{advice}, but this is undecided: {named} cannot be told apart from it in this run; {often}."
    else:
        text = (
            f"{advice}. This is clear: everything else is slower beyond the noise, the nearest is "
            f"{_standing_text(others[0])}; {often}."
        )
    found = {"name": best.name, "mode": best.mode, "sure": UNDECIDED if close else CLEAR, "fastest_in_share": share}
    return Recommendation.model_validate({**found, "text": text + _tail_text(standings, arrays, wall.requests)})


def _standing_text(entry: Standing) -> str:
    gain = entry.against_best
    assert gain is not None
    interval = "" if gain.ci95 is None else f", 95% CI {gain.ci95[0]:+.1f} … {gain.ci95[1]:+.1f}%"
    shown = "?" if gain.improvement_pct is None else f"{gain.improvement_pct:+.1f}%"
    return f"{entry.name} {entry.mode} ({shown}{interval})"


def _tail_text(standings: Sequence[Standing], arrays: Sequence[FloatArray], requests: IntArray) -> str:
    """A word about P99 where it is supported and another series has the lowest."""
    found = [stats.summarize(values, requests) for values in arrays]
    tails = [summary.p99_ms for summary in found]
    if not found[0].p99_supported or None in tails:
        return ""
    known = [tail for tail in tails if tail is not None]
    lowest = int(np.argmin(known))
    if lowest == 0:
        return ""
    entry = standings[lowest]
    return f" P99 is lowest with {entry.name} in {entry.mode} mode: {known[lowest]:.2f} ms against {known[0]:.2f} ms."
