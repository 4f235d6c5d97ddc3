"""Every command in small, and how one is run in a process of its own that is forked, so that it starts at once."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import io
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, NoReturn
from unittest import mock

import torch
from forked_processes import STOPS, adopt_orphans, fork_own_processes

from vitgraph import __main__ as program
from vitgraph.commands import process

ROOT = Path(__file__).resolve().parents[2]
PROFILE = ROOT / "tests/data/synthetic-profile.json"
RECORD = next(folder for folder in (ROOT / "tests/data").iterdir() if (folder / "run.json").exists())
LIMIT_S = 600.0
LEFT_S = 5.0
GOOD_ENDS = (0, 3, 5)
"""Done, nothing replayed, slower: ends of a command that nobody disturbs."""

SMALL = (
    *("--model", "qwen3-vl-debug", "--load-format", "dummy", "--device", "cpu", "--num-prompts", "6"),
    *("--dataset-name", "random-mm", "--random-mm-base-items-per-request", "2"),
    *("--random-mm-bucket-config", '{"(96,64,1)": 1.0}', "--mm-processor-kwargs", '{"min_pixels": 1024}'),
    *("--token-budgets", "16,32"),
)
RUN = ("--num-warmups", "1", "--rounds", "1")
TUNED = (
    *("--model", "qwen3-vl-debug", "--load-format", "dummy", "--device", "cpu", "--num-prompts", "6"),
    *("--dataset-name", "random-mm", "--random-mm-bucket-config", '{"(96,64,1)": 1.0}', "--requests-per-call", "1"),
    *("--max-num-batched-tokens", "200", "--calibration", str(PROFILE)),
)
LINE = "vllm serve Qwen/Qwen3-VL-8B-Instruct --max-model-len 8192"
LOG = "".join(json.dumps({"request": n, "images": [{"width": 300 + n, "height": 200}]}) + "\n" for n in range(6))
SETTINGS = {**dict(zip(SMALL[:6:2], SMALL[1:6:2], strict=True)), "token-budgets": "64,128", "calls": 2}
SWEEP = json.dumps({"command": "verify", "settings": SETTINGS, "axes": {"seed": [1, 2]}})

COMMANDS: dict[str, tuple[str, ...]] = {
    "recommend": (*TUNED, "--output-dir", "out"),
    "bench": (*SMALL, *RUN, "--output-dir", "out"),
    "tune-budgets": (*TUNED, "--output-dir", "out"),
    "compare-backends": (*SMALL, *RUN, "--backends", "TORCH_SDPA", "--output-dir", "out"),
    "calibrate": (*SMALL[:6], "--max-num-batched-tokens", "128", "--time-limit", "1", "--output", "out/profile.json"),
    "verify": (*SMALL[:6], "--token-budgets", "64,128", "--calls", "2", "--output-dir", "out"),
    "plan": (*SMALL[:2], *SMALL[6:]),
    "profile": (*SMALL[:6], "--items", "96x64", "--repeats", "1", "--token-budgets", "128", "--output-dir", "out"),
    "sweep": ("sweep.yaml", "--output-dir", "out"),
    "export": ("record", "--formats", "csv,markdown", "--output-dir", "out"),
    "models": (),
    "doctor": (),
    "import": (LINE,),
    "workload inspect": ("--num-prompts", "6", "--model", "qwen3-vl-debug", "--output-dir", "out"),
    "workload make": ("--num-prompts", "500", "--output", "out/made.csv"),
    "workload convert": ("log.jsonl", "--output", "out/made.csv"),
    "workload calls": (
        *(*TUNED[:2], *TUNED[-2:], "--num-prompts", "6"),
        *("--request-rate", "9", "--output", "out/calls.csv"),
    ),
}
"""Arguments of every command, run in a folder that `prepare` made; what it writes goes into `out`."""


def prepare(folder: Path) -> None:
    """Makes the folder that a command runs in, with what some commands read."""
    (folder / "record").mkdir(parents=True)
    for name in ("run.json", "samples.csv"):
        (folder / "record" / name).write_bytes((RECORD / name).read_bytes())
    (folder / "log.jsonl").write_text(LOG, encoding="utf-8")
    (folder / "sweep.yaml").write_text(SWEEP, encoding="utf-8")


@functools.cache
def load_modules(name: str) -> None:
    """Runs the command in this process once, so that its forks have every module loaded."""
    if name == "sweep":
        load_modules("verify")
    from typer.testing import CliRunner

    from vitgraph.cli import app

    with (
        tempfile.TemporaryDirectory() as place,
        contextlib.chdir(place),
        contextlib.redirect_stderr(io.StringIO()),
        # The runs of a sweep are processes of their own, which load theirs anew.
        mock.patch("vitgraph.measure.processes.run_process", return_value=(False, 0)),
    ):
        prepare(Path(place))
        result = CliRunner().invoke(app, [*name.split(), *COMMANDS[name]])
    assert result.exit_code in GOOD_ENDS, result.output


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        status: Exit status; negative for a signal that killed the process, None where it had to be killed for time.
        output: What it printed.
        errors: What it printed to standard error.
        seconds: How long it ran.
        wanted_s: From the last signal to its end.
        at: When it ended, by the monotonic clock.
        left: How many processes that it started were still there afterwards.
    """

    status: int | None
    output: str
    errors: str
    seconds: float
    wanted_s: float = 0.0
    at: float = 0.0
    left: int = 0


def _wide_pipe() -> tuple[int, int]:
    """Both ends of a pipe that holds all that a command prints."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 2**20)
    return reader, writer


def run_main(words: list[str], ready: int | None = None) -> NoReturn:
    """Runs a command line in this process, which was forked for it, and ends it.

    Args:
        words: After `vitgraph`.
        ready: Is written a byte once stops are the command's own to hear; until then they wait.
    """
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", closefd=False)
    sys.argv = ["vitgraph", *words]
    os.environ.pop("VITGRAPH_DEBUG", None)
    torch.set_num_threads(1)

    def be_stoppable() -> None:
        process.be_stoppable()
        if ready is not None:
            os.write(ready, b"1")
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)

    program.be_stoppable = be_stoppable  # type: ignore[attr-defined]
    status = 1
    try:
        program.main()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            status = end.code or 0
        else:
            os.write(2, f"{end.code}\n".encode())
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    process.flush_output()
    os._exit(status)


class Forked:
    """A command that runs in a fork of this process, which has its modules loaded."""

    _running: ClassVar[set[int]] = set()

    def __init__(
        self,
        name: str,
        folder: Path,
        *,
        more: Sequence[str] = (),
        before: Callable[[], object] = lambda: None,
        become: Callable[[list[str]], NoReturn] = run_main,
    ) -> None:
        """Starts it.

        Args:
            name: A key of `COMMANDS`.
            folder: Where it runs.
            more: Words after its own.
            before: Called in the new process first, for example to break the disk.
            become: What the processes of vitgraph that it starts call with their words.
        """
        self.words = [*name.split(), *COMMANDS[name], *more]
        self.folder = folder
        adopt_orphans()
        self._others = _children()
        self.started = self.signalled = time.monotonic()
        sys.stdout.flush()
        sys.stderr.flush()
        # Not files: the disk may be broken.
        (read_output, output), (read_errors, errors) = _wide_pipe(), _wide_pipe()
        self._handles = read_output, read_errors
        reader, writer = os.pipe()
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reader)
            self._become(before, become, writer, output, errors)
        self._running.add(self.pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        for handle in (writer, output, errors):
            os.close(handle)
        os.read(reader, 1)
        os.close(reader)

    def _become(
        self,
        before: Callable[[], object],
        become: Callable[[list[str]], NoReturn],
        ready: int,
        output: int,
        errors: int,
    ) -> None:
        try:
            os.dup2(output, 1)
            os.dup2(errors, 2)
            os.chdir(self.folder)
            fork_own_processes(become)
            before()
            run_main(self.words, ready)
        except BaseException:
            os.write(2, traceback.format_exc().encode())
            os._exit(1)

    def stop(self, number: int) -> None:
        """Sends it a signal."""
        os.kill(self.pid, number)
        self.signalled = time.monotonic()

    def is_there(self) -> bool:
        """It has not ended."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def ended(self) -> Ended:
        """Waits for its end; a command that hangs is killed."""
        deadline = time.monotonic() + LIMIT_S
        status: int | None = None
        while status is None:
            pid, found = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                status = os.waitstatus_to_exitcode(found)
            elif time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                break
            else:
                time.sleep(0.003)
        now, left = time.monotonic(), self._end_what_is_left()
        output, errors = (os.fdopen(handle, "rb").read().decode("utf-8", "replace") for handle in self._handles)
        return Ended(status, output, errors, now - self.started, now - self.signalled, now, left)

    def _end_what_is_left(self) -> int:
        self._running.discard(self.pid)
        deadline = time.monotonic() + LEFT_S
        while left := [pid for pid in _children() - self._others - self._running if not os.waitpid(pid, os.WNOHANG)[0]]:
            if time.monotonic() > deadline:
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                break
            time.sleep(0.003)
        return len(left)


def _children() -> set[int]:
    """Processes whose parent this one is, those that it adopted among them."""
    found = set()
    for file in Path("/proc").glob("[0-9]*/stat"):
        # What ends meanwhile is none.
        with contextlib.suppress(OSError):
            if int(file.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(file.parent.name))
    return found


def wrong_text(ended: Ended) -> str | None:
    """What a user should not have been shown, or None."""
    text = ended.output + ended.errors
    for sign in ("Traceback", "unexpected ", "Exception ignored", "Error: [Errno"):
        if sign in text:
            return text[-1500:]
    if ended.left:
        return f"{ended.left} processes are left behind"
    if ended.status is None:
        return f"still running after {LIMIT_S:g} s"
    return None if text.strip() else f"exit status {ended.status} without a word"


def wrong_files(folder: Path, could_clear: bool = True) -> str | None:
    """Why what a command left behind is neither whole nor nothing, or None.

    Args:
        folder: Of the run.
        could_clear: The command could remove what it had begun: it was not killed, and its disk still took changes.
    """
    from vitgraph.errors import VitgraphError
    from vitgraph.predict.profile import load_profile
    from vitgraph.records.record import RECORDS
    from vitgraph.records.sample_table import read_samples
    from vitgraph.records.store import read_record

    out = folder / "out"
    try:
        for file in sorted(out.rglob("*")) if out.exists() else ():
            if ".tmp" in file.name:
                if could_clear:
                    return f"{file.name} is left behind"
                continue
            if file.name == "run.json":
                record = read_record(file)
                assert record.kind in RECORDS
                if record.samples_file is not None:
                    read_samples(file.parent / record.samples_file)
            elif file.name == "profile.json":
                load_profile(file)
            elif file.name in ("made.csv", "c.csv"):
                lines = file.read_text(encoding="utf-8").splitlines()
                assert len({line.count(",") for line in lines}) == 1 and len(lines) > 1, f"{file.name} is cut off"
            elif file.suffix == ".json":
                json.loads(file.read_text(encoding="utf-8"))
    except (VitgraphError, AssertionError, ValueError) as error:
        return str(error)
    return None


@functools.cache
def undisturbed(name: str) -> Ended:
    """How the command ends when nobody stops it."""
    load_modules(name)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        prepare(folder)
        ended = Forked(name, folder).ended()
        assert ended.status in GOOD_ENDS and wrong_text(ended) is None, (name, ended)
        assert wrong_files(folder) is None, wrong_files(folder)
    return ended


def options_of(about: str | None, flag: str, usual: int, meaning: str) -> argparse.Namespace:
    """The words that a drill over all commands is given; computes on one thread from then on."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(flag, type=int, default=usual, help=meaning)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--command", action="append", help="only this command; may be repeated")
    torch.set_num_threads(1)
    return parser.parse_args()


@dataclass
class Drilled:
    """What came of the runs of a drill that fit in one row.

    Attributes:
        ends: How many ended in which way, and left a record.
        slowest_s: Longest time from what was done to a run to its end.
        wrong: What was wrong with any.
    """

    ends: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    wrong: list[str] = field(default_factory=list)


def print_table(header: str, rows: Iterable[tuple[Sequence[object], Sequence[str]]], names: int = 1) -> int:
    """Prints the table of a drill, each row as soon as it is there, and then all that was wrong.

    Args:
        header: Titles, with a bar between two; `wrong` is added.
        rows: Cells of each row, and what was wrong in its runs.
        names: How many columns are no numbers.

    Returns:
        The exit status of the drill.
    """
    numbers = header.count("|") + 2 - names
    sys.stdout.write(f"| {header} | wrong |\n|{'---|' * names}{'---:|' * numbers}\n")
    all_wrong: list[str] = []
    for cells, wrong in rows:
        sys.stdout.write(f"| {' | '.join(map(str, cells))} | {len(wrong)} |\n")
        sys.stdout.flush()
        all_wrong += wrong
    sys.stdout.write("\n".join(all_wrong) + "\n")
    return int(bool(all_wrong))
