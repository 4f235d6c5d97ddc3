"""Breaks the disk under every command at random moments: full, read-only, gone; and two commands in one folder.

`python tests/drills/failing_disks.py` writes the table of `docs/drills.md` to the terminal; the test beside this file
does the same in small. *Full* is the system's own limit of how large a file may get, set while the command runs.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from every_command import (
    COMMANDS,
    GOOD_ENDS,
    LIMIT_S,
    Ended,
    Forked,
    options_of,
    prepare,
    print_table,
    undisturbed,
    wrong_files,
    wrong_text,
)

FAULTS = 10
NOBODY = 65534
WRITING = tuple(name for name, words in COMMANDS.items() if any(word.startswith("out") for word in words))


def fill(most_bytes: int) -> None:
    """No file of this process may have more bytes from now on."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def lock_up(folder: Path) -> None:
    """Nothing can be made in the folder or below from now on."""
    for place in (folder, *folder.rglob("*")):
        # What the command removes meanwhile is none of them.
        with contextlib.suppress(FileNotFoundError):
            if place.is_dir():
                place.chmod(0o500)


def remove(folder: Path) -> None:
    shutil.rmtree(folder / "out", ignore_errors=True)


def faults(kind: str, folder: Path, drawn: random.Random) -> Callable[[], object]:
    """What breaks, for a thread of the command's own process."""
    if kind == "full":
        most = drawn.choice((0, 100, 2000, 30_000))
        return lambda: fill(most)
    return (lambda: lock_up(folder)) if kind == "read-only" else (lambda: remove(folder))


KINDS = ("full", "read-only", "vanishing")


def break_disk(name: str, kind: str, after_s: float | None, drawn: random.Random) -> tuple[Ended, str | None]:
    """One run of a command on a disk that breaks after so long, or is broken from the start."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        prepare(folder)
        if kind == "read-only" and os.geteuid() == 0:
            for each in (Path(place), folder, *folder.rglob("*")):
                os.chown(each, NOBODY, -1)
        fault = faults(kind, folder, drawn)

        def begin() -> None:
            if kind == "read-only" and os.geteuid() == 0:
                # The system lets root write anywhere.
                os.seteuid(NOBODY)
            if after_s is None:
                fault()
                return

            def later() -> None:
                # Before it is there, nothing can vanish.
                while kind == "vanishing" and not (folder / "out").exists():
                    time.sleep(0.001)
                time.sleep(after_s)
                fault()

            threading.Thread(target=later, daemon=True).start()

        ended = Forked(name, folder, before=begin).ended()
        for each in (folder, *folder.rglob("*")):
            if each.is_dir():
                each.chmod(0o777)
        wrong = wrong_text(ended) or wrong_files(folder, could_clear=kind != "read-only")
        if wrong is None and ended.status not in (*GOOD_ENDS, 1, 2):
            wrong = f"exit status {ended.status}: {ended.errors[-500:]}"
        if wrong is None and ended.status in (1, 2) and "error: " not in ended.errors:
            wrong = f"exit status {ended.status} without a reason: {ended.errors[-500:]}"
        return ended, wrong


def writing_s(name: str) -> float:
    """How long the folder of results is there before the command ends."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        prepare(folder)
        run = Forked(name, folder)
        while not (folder / "out").exists() and time.monotonic() < run.started + LIMIT_S:
            time.sleep(0.001)
        begun = time.monotonic()
        return run.started + run.ended().seconds - begun


def drill_command(
    name: str, kind: str, count: int, seed: int, *, from_the_start: bool = True
) -> tuple[Counter[str], list[str]]:
    """How runs of a command end whose disk is broken (the first) or breaks at a random moment, and what was wrong."""
    drawn, ends, all_wrong = random.Random(f"{name} {kind} {seed}"), Counter[str](), []
    takes_s = undisturbed(name).seconds
    if kind == "vanishing":
        takes_s = writing_s(name)
    for number in range(count):
        is_broken = from_the_start and not number
        after_s = drawn.uniform(0.0, takes_s) if not is_broken else 0.0 if kind == "vanishing" else None
        ended, wrong = break_disk(name, kind, after_s, drawn)
        ends["finished" if ended.status in GOOD_ENDS else "refused" if ended.status == 2 else "not saved"] += 1
        if wrong is not None:
            when = "from the start" if after_s is None else f"after {after_s:.3f} s"
            all_wrong.append(f"{name}, {kind} {when}: {wrong}")
    return ends, all_wrong


def two_at_once(name: str, after_s: float = 0.0) -> str | None:
    """Starts a command twice in one folder, the second so long after: what is wrong with how they end, or None."""
    with tempfile.TemporaryDirectory() as place:
        folders = Path(place) / "run", Path(place) / "other"
        for folder in folders:
            prepare(folder)
        (folders[0] / "out").mkdir()
        (folders[1] / "out").symlink_to(folders[0] / "out")
        runs = [Forked(name, folders[0])]
        time.sleep(after_s)
        if not runs[0].is_there():
            # Not at once: it was faster than when its time was taken, and a sweep would go on where it ended.
            runs[0].ended()
            return two_at_once(name, after_s / 2)
        runs.append(Forked(name, folders[1]))
        ended = [run.ended() for run in runs]
        wrong = next(filter(None, map(wrong_text, ended)), None) or wrong_files(folders[0])
        statuses = sorted(each.status for each in ended if each.status is not None)
        if wrong is None and not (statuses[0] in GOOD_ENDS and statuses[1] == 2):
            wrong = f"exit statuses {statuses}: {ended[0].errors[-300:]} | {ended[1].errors[-300:]}"
        return None if wrong is None else f"{name} twice at once: {wrong}"


def rows(names: Iterable[str], faults: int, seed: int) -> Iterator[tuple[Sequence[object], list[str]]]:
    """Each command on each kind of disk, and twice at once in one folder."""
    for name in names:
        for kind in KINDS:
            ends, wrong = drill_command(name, kind, faults, seed)
            yield (f"`{name}`", kind, faults, ends["finished"], ends["refused"], ends["not saved"]), wrong
        drawn, half_s = random.Random(f"{name} {seed}"), undisturbed(name).seconds / 2
        found = [two_at_once(name, drawn.uniform(0.0, half_s)) for _ in range(faults)]
        yield (f"`{name}`", "two at once", 2 * faults, faults, faults, 0), [each for each in found if each is not None]


def main() -> int:
    options = options_of(__doc__, "--faults", FAULTS, "of each kind in each command that writes")
    header = "command | disk | runs | finished | refused | not saved, said so"
    return print_table(header, rows(options.command or WRITING, options.faults, options.seed), names=2)


if __name__ == "__main__":
    sys.exit(main())
