"""Measures what the verdicts are worth: how often they claim what is not so, find what is, and cover the truth.

Series of known difference are drawn with several kinds of noise and judged as a run judges its own: with the calls that
a run measures twice as the control. Run `python tests/drills/simulate_verdicts.py` to write
`docs/how-sure-is-a-verdict.md` anew; `--trials 20` is a quick look at it, to the terminal.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from vitgraph.measure.experiment import Control
from vitgraph.records.stats import Noise, conclude
from vitgraph.specs.parts import SAME_MARGIN_PCT

Rng = np.random.Generator
SIZES = (30, 100, 300, 3000)
IMPROVEMENTS_PCT = (0.0, 5.0)
TRIALS = 300
LONG_RUN = 1000
SPREAD = 0.03
PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-sure-is-a-verdict.md"


def gaussian(rng: Rng, n: int) -> np.ndarray:
    return 1.0 + SPREAD * rng.standard_normal((3, n))


def slow_calls(rng: Rng, n: int) -> np.ndarray:
    is_slow = rng.random((3, n)) < 0.01
    return gaussian(rng, n) * np.where(is_slow, rng.uniform(2.0, 10.0, (3, n)), 1.0)


def pareto(rng: Rng, n: int) -> np.ndarray:
    return 1.0 + SPREAD * rng.pareto(1.5, (3, n))


def drift(rng: Rng, n: int) -> np.ndarray:
    """All three series slow down by a tenth over the run; they take turns, so a call's are close in time."""
    return gaussian(rng, n) * (1.0 + 0.1 * np.arange(3 * n).reshape(n, 3).T / (3 * n))


def autocorrelated(rng: Rng, n: int) -> np.ndarray:
    steps = rng.standard_normal((3, n)) * np.sqrt(1 - 0.7**2)
    steps[:, 0] = rng.standard_normal(3)
    for place in range(1, n):
        steps[:, place] += 0.7 * steps[:, place - 1]
    return 1.0 + SPREAD * steps


def bursts(rng: Rng, n: int) -> np.ndarray:
    """Somewhere in every hundred calls on average, ten in a row of one series take twice as long."""
    times = gaussian(rng, n)
    for series in times:
        for start in np.flatnonzero(rng.random(n) < 0.01 / 3):
            series[start : start + 10] *= 2.0
    return times


NOISES: dict[str, Callable[[Rng, int], np.ndarray]] = {
    "Gaussian, 3 %": gaussian,
    "1 % of calls 2 to 10 times slower": slow_calls,
    "Pareto, exponent 1.5": pareto,
    "drift of 10 %": drift,
    "autocorrelated, 0.7": autocorrelated,
    "bursts of 10 slow calls": bursts,
}
"""From a generator and a number of calls to the factors on eager, the other series and eager again: `[3, n]`."""


@dataclass
class Cell:
    """What came of all trials of one noise, size and true improvement."""

    verdicts: Counter[str] = field(default_factory=Counter)
    of_mean: Counter[str] = field(default_factory=Counter)
    covered: Counter[str] = field(default_factory=Counter)
    widths: list[float] = field(default_factory=list)


def run_trials(noise: Callable[[Rng, int], np.ndarray], n: int, true_pct: float, trials: int, seed: int) -> Cell:
    """Draws and judges `trials` runs of `n` calls whose second series is `true_pct` faster."""
    cell, rng = Cell(), np.random.default_rng(seed)
    every = Control.of(["eager"], calls=n, rounds=1).every
    for _ in range(trials):
        sizes = rng.lognormal(1.5, 0.5, n)
        eager, other, repeat = sizes * noise(rng, n) * [[1.0], [1.0 - true_pct / 100.0], [1.0]]
        control = Noise.of(eager[::every], repeat[::every], metrics=("mean", "trimmed_mean"))
        mean, trimmed = (control.judge(eager, other, metric) for metric in ("mean", "trimmed_mean"))
        cell.verdicts[conclude(mean, trimmed)[0]] += 1
        cell.of_mean[mean.verdict] += 1
        for name, judged in (("mean", mean), ("trimmed", trimmed)):
            low, high = judged.improvement.ci95 or (np.nan, np.nan)
            cell.covered[name] += low <= true_pct <= high
            if name == "mean":
                cell.widths.append((high - low) / 2)
    return cell


def row(name: str, n: int, none: Cell, some: Cell, trials: int) -> str:
    """One line of the table."""

    def share(count: int, of: int = trials) -> str:
        return f"{100 * count / of:.1f}"

    false = none.verdicts["faster"] + none.verdicts["slower"]
    cells = [
        name,
        str(n),
        share(false),
        share(none.verdicts["same"]),
        share(some.verdicts["faster"]),
        share(some.of_mean["faster"]),
        share(some.verdicts["same"]),
        share(some.verdicts["slower"]),
        *(share(none.covered[kind] + some.covered[kind], 2 * trials) for kind in ("mean", "trimmed")),
        f"±{np.median(none.widths):.2f}",
    ]
    return f"| {' | '.join(cells)} |"


HEADERS = (
    "noise",
    "calls",
    "none: false claim",
    "none: `same`",
    "5 %: `faster`",
    "5 %: of them by the mean",
    "5 %: `same`",
    "5 %: `slower`",
    "coverage, mean",
    "coverage, trimmed mean",
    "interval of the mean",
)

TEXT = f"""# How sure is a verdict?

Measured by simulation: `python tests/drills/simulate_verdicts.py` draws series whose true difference is known, judges
them as a run judges its own ([how](how-we-measure.md)), and writes this page. {{trials}} runs a cell, half as many
above {LONG_RUN:,} calls; all shares are percent of them. Every run has eager, a second series and, on the calls on
which a run measures it, eager again as the control; calls differ in size (lognormal, 0.5), and each series has noise of
its own.

- **none**: both series are the same. A *false claim* is `faster` or `slower`; `same` is right, `undecided` honest.
- **5 %**: the second series takes 5 % less. `faster` is right, `same` (±{SAME_MARGIN_PCT:g} %) and `slower` wrong.
- **of them by the mean**: what the mean alone would find. The rest is found by the trimmed mean, where far-off calls
  spread the plain one until it says nothing.
- **coverage**: how often the 95 % interval holds the truth, over both columns of runs.
- **interval of the mean**: half its width in percent of the mean, the median over the runs.

{{table}}

Where calls that follow each other are alike, the interval is widened by their whole correlation, and Student's quantile
is that of as many calls as are independent; where few far-off calls make most of the spread, it is that of as many. So
such runs need more calls before they claim anything: `undecided` is what they say. What a verdict cannot
know: a slow-down that comes once in more calls than were measured, and noise that favours one series in the whole run,
as a clock that is set between two processes does.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, help=f"runs a cell, printed; without it {TRIALS}, written to the docs")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    options = parser.parse_args()
    trials = options.trials or TRIALS
    lines = [f"| {' | '.join(HEADERS)} |", f"|---{'|---:' * (len(HEADERS) - 1)}|"]
    for name, noise in NOISES.items():
        for n in options.sizes:
            runs = trials // 2 if n > LONG_RUN else trials
            cells = [run_trials(noise, n, true_pct, runs, seed=n) for true_pct in IMPROVEMENTS_PCT]
            lines.append(row(name, n, *cells, runs))
            sys.stdout.write(lines[-1] + "\n")
            sys.stdout.flush()
    if options.trials is None:
        PAGE.write_text(TEXT.format(trials=trials, table="\n".join(lines)), encoding="utf-8")


if __name__ == "__main__":
    main()
