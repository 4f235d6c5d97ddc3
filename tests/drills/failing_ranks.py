"""Kills, stops and fails one of two ranks at random moments, and looks at how the whole run ends.

`python tests/drills/failing_ranks.py` writes the table of `docs/drills.md` to the terminal; the test beside this file
does the same in small. The ranks are those of `bench` as torch's launcher has them, but forked with everything loaded.
"""

from __future__ import annotations

import ctypes
import functools
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from every_command import (
    Drilled,
    Ended,
    Forked,
    load_modules,
    options_of,
    prepare,
    print_table,
    run_main,
    wrong_files,
    wrong_text,
)

from vitgraph.commands.on_ranks import on_rank
from vitgraph.errors import EXIT_OK, EXIT_UNEXPECTED
from vitgraph.records.store import read_record

FAULTS = 20
RANK_LIMIT_S = 10.0
SETUP_LIMIT_S = 20.0
"""Instead of 180 s to meet, 900 s to load and capture, and 300 s that a rank may be there after the other."""
PATIENCE_S = 120.0
"""The longest limit, what ranks get to answer and to save, and room for a machine that is busy."""
ON_RANKS = (
    *("--mm-encoder-tp-mode", "data", "--tensor-parallel-size", "2", "--rank-timeout", f"{RANK_LIMIT_S:g}"),
    *("--num-prompts", "30"),
)
KINDS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "raising": None}
FAULT_FILE = "fault"


class UnforeseenError(Exception):
    """What no part of a rank foresees."""


def run_rank(kind: str, rank: int, after_s: float, words: list[str]) -> NoReturn:
    """Runs a rank in this process; the one that is meant fails after so long."""
    from vitgraph.ranks import group

    group.JOIN_LIMIT_S = group.SETUP_LIMIT_S = SETUP_LIMIT_S
    if os.environ["RANK"] == str(rank):
        threading.Thread(target=_fail, args=(KINDS[kind], after_s), daemon=True).start()
    run_main(words)


def _wait_less() -> None:
    from vitgraph.ranks import launch

    launch.LAST_RANK_S = SETUP_LIMIT_S


def _fail(number: int | None, after_s: float) -> None:
    time.sleep(after_s)
    main = threading.main_thread().ident or 0
    # Before and after, the program is not the command's yet or no more.
    while number is None and not _is_at_work(main):
        time.sleep(0.001)
    Path(FAULT_FILE).write_text(str(time.monotonic()), encoding="utf-8")
    if number is None:
        # Where Python swallows it, in a finaliser, it comes once more.
        sys.unraisablehook = lambda _: threading.Timer(0.05, _raise_in, (main,)).start()
        _raise_in(main)
    else:
        os.kill(os.getpid(), number)


def _raise_in(thread: int) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(UnforeseenError))


def _is_at_work(thread: int) -> bool:
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code is not on_rank.__code__:
        frame = frame.f_back
    return frame is not None


def fail_rank(kind: str, rank: int, after_s: float) -> tuple[Ended, float | None, str | None, bool]:
    """One run: how it ended, how long after the fault, what is wrong with that, and whether a record is there."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        prepare(folder)
        become = functools.partial(run_rank, kind, rank, after_s)
        ended = Forked("bench", folder, more=ON_RANKS, become=become, before=_wait_less).ended()
        fault = folder / FAULT_FILE
        took_s = ended.at - float(fault.read_text(encoding="utf-8")) if fault.exists() else None
        record = folder / "out" / "run.json"
        return ended, took_s, _wrong(ended, took_s, rank, folder, kind), record.exists()


def _wrong(ended: Ended, took_s: float | None, rank: int, folder: Path, kind: str) -> str | None:
    errors = ended.errors.replace("unexpected Unforeseen", "Unforeseen")
    wrong = wrong_text(replace(ended, errors=errors)) or wrong_files(folder, could_clear=kind != "killed")
    if wrong is not None:
        return wrong
    status, record = ended.status, folder / "out" / "run.json"
    told = [line for line in errors.splitlines() if line.startswith("error: ") or line == "stopped"]
    # Rank 0 tells of itself as a run of one process does.
    names = ("rank 0", "Unforeseen") if rank == 0 else (f"rank {rank}",)
    if status not in (EXIT_OK, EXIT_UNEXPECTED) or (took_s is None and status != EXIT_OK):
        return f"exit status {status}: {errors[-500:]}"
    if took_s is not None and took_s > PATIENCE_S:
        return f"it took {took_s:.1f} s from the fault to the end"
    if status == EXIT_UNEXPECTED and (len(told) != 1 or not any(name in told[0] for name in names)):
        return f"not one line that names rank {rank}: {errors[-900:]}"
    kept = read_record(record).status if record.exists() else "complete"
    right = ("complete",) if status == EXIT_OK else ("complete", "error")
    return None if kept in right else f"exit status {status}, and the record is {kept!r}"


@functools.cache
def undisturbed_s() -> float:
    """How long the run takes when no rank fails."""
    load_modules("bench")
    import vitgraph.measure.on_ranks  # noqa: F401

    ended, _, wrong, has_record = fail_rank("killed", -1, 0.0)
    assert wrong is None and ended.status == EXIT_OK and has_record, (wrong, ended)
    return ended.seconds


def drill_ranks(kind: str, faults: int, seed: int) -> Drilled:
    """Fails either rank so many times in one way."""
    drawn, found = random.Random(f"{kind} {seed}"), Drilled()
    # Of that, ranks are there for most.
    takes_s = 0.8 * undisturbed_s()
    for count in range(faults):
        after_s = drawn.uniform(0.0, takes_s)
        ended, took_s, wrong, has_record = fail_rank(kind, count % 2, after_s)
        found.ends["finished" if took_s is None or ended.status == EXIT_OK else "failed"] += 1
        found.ends["record"] += has_record
        found.slowest_s = max(found.slowest_s, took_s or 0.0)
        if wrong is not None:
            found.wrong.append(f"rank {count % 2} {kind} after {after_s:.3f} s: {wrong}")
    return found


def main() -> int:
    options = options_of(__doc__, "--faults", FAULTS, "of each kind, half of them of either rank")

    def row(kind: str) -> tuple[Sequence[object], list[str]]:
        found = drill_ranks(kind, options.faults, options.seed)
        counts = (found.ends[end] for end in ("failed", "finished", "record"))
        return (kind, options.faults, *counts, f"{found.slowest_s:.1f}"), found.wrong

    return print_table("a rank is | runs | failed | had finished | with a record | slowest end, s", map(row, KINDS))


if __name__ == "__main__":
    sys.exit(main())
