"""Stops every command at random moments with every signal, and looks at how it ends and what it leaves behind.

`python tests/drills/stopped_commands.py` writes the table of `docs/drills.md` to the terminal; the test beside this
file does the same in small. Every fourth stop comes twice, as from somebody who does not wait.
"""

from __future__ import annotations

import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from every_command import (
    COMMANDS,
    GOOD_ENDS,
    Drilled,
    Ended,
    Forked,
    options_of,
    prepare,
    print_table,
    undisturbed,
    wrong_files,
    wrong_text,
)

from vitgraph.errors import EXIT_INTERRUPTED
from vitgraph.records.store import read_record

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOPS = 20
PATIENCE_S = 20.0


def stop_command(name: str, number: int, after_s: float, again_s: float | None) -> tuple[Ended, str | None, bool]:
    """Stops one run of a command; how it ended, what is wrong with that, and whether a record is there."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        prepare(folder)
        run = Forked(name, folder)
        for wait in (after_s, again_s):
            if wait is not None:
                time.sleep(wait)
                run.stop(number)
        ended = run.ended()
        wrong = wrong_text(ended) or wrong_files(folder)
        records = list((folder / "out").rglob("run.json"))
        if wrong is None and ended.status not in (*GOOD_ENDS, EXIT_INTERRUPTED):
            wrong = f"exit status {ended.status}: {ended.errors[-500:]}"
        if wrong is None and ended.wanted_s > PATIENCE_S:
            wrong = f"it took {ended.wanted_s:.1f} s from the stop to the end"
        if wrong is None and ended.status == EXIT_INTERRUPTED:
            odd = {read_record(file).status for file in records} - {"interrupted", "complete"}
            wrong = f"the record of a stopped run is {odd}" if odd else None
        return ended, wrong, bool(records)


def drill_command(name: str, stops: int, seed: int, signals: Sequence[int] = SIGNALS) -> Drilled:
    """Stops a command `stops` times by each signal."""
    drawn, found = random.Random(f"{name} {seed}"), Drilled()
    takes_s = undisturbed(name).seconds
    for number in signals:
        for count in range(stops):
            after_s = drawn.uniform(0.0, 1.05 * takes_s)
            again_s = drawn.uniform(0.0, 0.05) if count % 4 == 3 else None
            ended, wrong, has_record = stop_command(name, number, after_s, again_s)
            found.ends["stopped" if ended.status == EXIT_INTERRUPTED else "finished"] += 1
            found.ends["record"] += has_record
            found.slowest_s = max(found.slowest_s, ended.wanted_s)
            if wrong is not None:
                found.wrong.append(f"{name}, {signal.Signals(number).name} after {after_s:.3f} s, {again_s}: {wrong}")
    return found


def main() -> int:
    options = options_of(__doc__, "--stops", STOPS, "of each signal in each command")

    def row(name: str) -> tuple[Sequence[object], list[str]]:
        found = drill_command(name, options.stops, options.seed)
        counts = (found.ends[end] for end in ("stopped", "finished", "record"))
        return (f"`{name}`", 3 * options.stops, *counts, f"{found.slowest_s:.1f}"), found.wrong

    header = "command | stops | stopped | had finished | with a record | slowest end, s"
    return print_table(header, map(row, options.command or COMMANDS))


if __name__ == "__main__":
    sys.exit(main())
