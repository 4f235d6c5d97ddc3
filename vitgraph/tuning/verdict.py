"""Whether to use graphs, by what settings are predicted or were measured to do with calls they were not made for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from vitgraph.records.tune_result import Measured, TuneVerdict
from vitgraph.tuning.objective import Kept, is_surely_more

USE_GRAPHS: Final = "use_graphs"
NO_GRAPHS: Final = "no_graphs"
MEASURE_FIRST: Final = "measure_first"
DEPENDS: Final = "depends"
TUNED, AUTOMATIC, SEED_NINE, EAGER, ORACLE = "tuned", "automatic", "seed_nine", "eager", "oracle"
"""What is compared: the settings found, those that people use without tuning, and the bounds on both sides."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What settings are predicted to do, against eager.

    Attributes:
        improvement_pct: Of the objective, in percent of eager's; positive = faster.
        kept: How many requests become slower, and what the tail does.
        margin_pct: Error and noise that a gain must exceed.
        most_slower: Share of the requests that may become slower.
        doubts: Why predictions are not to be acted on.
    """

    improvement_pct: float
    kept: Kept
    margin_pct: float
    most_slower: float
    doubts: tuple[str, ...] = ()

    @property
    def is_kept(self) -> bool:
        """Whether not surely too many requests become slower, and the tail does not."""
        return not self.kept.broken(self.most_slower)

    @property
    def verdict(self) -> TuneVerdict:
        """`use_graphs`, `no_graphs` (also where it is not sure that eager is never better), `measure_first`."""
        if self.doubts:
            return MEASURE_FIRST
        return USE_GRAPHS if self.improvement_pct > self.margin_pct and self.is_kept else NO_GRAPHS

    def __str__(self) -> str:
        if self.verdict == MEASURE_FIRST:
            return f"measure it first: {'; '.join(self.doubts)}"
        if self.improvement_pct <= 0.0:
            loss = abs(self.improvement_pct)
            return f"leave graphs off: the best settings found are predicted {loss:.1f}% slower than eager"
        gain = f"predicted {self.improvement_pct:.1f}% faster than eager"
        slower = f"{self.kept.slower_share:.1%} of the requests slower"
        if self.verdict == USE_GRAPHS:
            return f"use graphs: {gain}, {slower}"
        if self.improvement_pct <= self.margin_pct:
            return (
                f"leave graphs off: {gain}, {slower}, which is within the error of the prediction and the noise of "
                f"eager ({self.margin_pct:.1f}%)"
            )
        return f"leave graphs off: the best list is {gain} in the mean, but {self.kept.broken(self.most_slower)}"


def measured_verdict(measured: Measured, most_slower: float) -> tuple[TuneVerdict, str] | None:
    """Whether to use graphs by what was measured, and the same in a sentence; None where nothing was compared.

    Args:
        most_slower: Share of the requests that may become slower; only what is surely more counts.
    """
    tuned = measured.strategies.get(TUNED)
    pair = tuned.against_eager if tuned else None
    if pair is None or pair.mean.improvement_pct is None:
        return None
    if measured.problems or pair.mean.verdict == "invalid":
        return MEASURE_FIRST, f"measured, but the times are not valid: {'; '.join(measured.problems)}"
    found, gain, slower = pair.mean.verdict, pair.mean.improvement_pct, pair.slower
    ends = "" if pair.mean.ci95 is None else f" (95% CI {pair.mean.ci95[0]:+.1f}% to {pair.mean.ci95[1]:+.1f}%)"
    # Slower by more than noise and by more than what counts.
    shares = [] if slower is None else [one for one in (slower.share, slower.over_2pct_share) if one is not None]
    share = min(shares, default=None)
    said = "requests not compared one by one" if share is None else f"{share:.1%} of the requests slower"
    what = f"measured {gain:+.1f}%{ends} against eager on {measured.calls} calls, {said}"
    if found == "faster":
        broken = share is not None and slower is not None and is_surely_more(share, slower.requests, most_slower)
        broken |= pair.p99 is not None and pair.p99.verdict == "slower"
        why = f"leave graphs off: {what}, P99 {'not known' if pair.p99 is None else pair.p99.verdict}"
        return (NO_GRAPHS, why) if broken else (USE_GRAPHS, f"use graphs: {what}")
    if found in ("slower", "same"):
        return NO_GRAPHS, f"leave graphs off: {what}: {found}"
    return MEASURE_FIRST, f"undecided: {what}; measure more with --verify-calls and --time-limit"
