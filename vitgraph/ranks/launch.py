"""Starts the ranks of a command on this host with torch's elastic launcher, and says how they ended.

Under torchrun, also on several hosts, the ranks are there already, and this module only reads the environment.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitgraph.errors import EXIT_INTERRUPTED, EXIT_UNEXPECTED, UsageError

if TYPE_CHECKING:
    import torch
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

SHUTDOWN_S = 20
"""Time that ranks have to save what they measured once another one failed, before they are killed."""


LAST_RANK_S = 300.0
"""How long the other ranks may go on once one has ended well: the first one writes the report then."""
LOOK_EVERY_S = 1.0
PID_FILE = "pid"
OWN_RUN = "vitgraph-"
"""How the id begins that torch's launcher gives a run of ours."""

OWN_PROCESSES: set[int] = set()
"""Processes that belong to this run beside this one, its other ranks. The driver may list a peer on this GPU too."""


@dataclasses.dataclass(frozen=True, slots=True)
class RanksEnded:
    """How a launched run ended.

    Attributes:
        exit_status: What the command should end with; 0 where all went well.
        message: What to tell the user that no rank told; None where there is nothing.
    """

    exit_status: int = 0
    message: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands in its run, as the environment tells.

    Attributes:
        rank: Number of this rank.
        size: Ranks of the run.
        local_rank: Its number on this host.
        local_size: Ranks on this host.
        address: Host of rank 0.
        port: Port on which rank 0 meets the others.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int


def is_rank() -> bool:
    """True where this process was started as one of several ranks."""
    return "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"


def read_place() -> Place:
    """Reads the environment as torchrun sets it: RANK, WORLD_SIZE, their LOCAL_ twins, MASTER_ADDR and MASTER_PORT.

    Raises:
        UsageError: A variable is missing or is no such number, or rank 0's port is taken.
    """
    size = _read_number("WORLD_SIZE", 1, 1 << 20)
    rank = _read_number("RANK", 0, size - 1)
    local_size = _read_number("LOCAL_WORLD_SIZE", 1, size, default=size)
    local_rank = _read_number("LOCAL_RANK", 0, local_size - 1, default=rank)
    address, port = os.environ.get("MASTER_ADDR"), _read_number("MASTER_PORT", 1, 65535)
    if not address:
        raise UsageError(f"MASTER_ADDR is not set, but RANK and WORLD_SIZE are; {_START}")
    # Under a launcher the port is the launcher's, which has it open already.
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        _check_port(port)
    return Place(rank, size, local_rank, local_size, address, port)


_START = "start the ranks with torchrun, or unset RANK and WORLD_SIZE and let vitgraph start them"


def _read_number(name: str, low: int, high: int, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal() or not low <= int(text) <= high:
        given = "not set" if text is None else repr(text)
        raise UsageError(f"{name} is {given}; in a run of several ranks it is from {low} to {high}: {_START}")
    return int(text)


def _check_port(port: int) -> None:
    try:
        with socket.create_server(("", port)):
            pass
    except OSError as error:
        raise UsageError(
            f"MASTER_PORT is {port}, on which rank 0 cannot listen ({error.strerror}); give every rank another one"
        ) from error


def is_follower() -> bool:
    """True on a rank other than 0: rank 0 does the talking."""
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    # Where these are wrong there is no rank 0, and this process has to say so itself.
    return rank.isdecimal() and size.isdecimal() and 0 < int(rank) < int(size)


def tells_of_stops() -> bool:
    """True where this process says that the run was stopped.

    Our launcher does that for its ranks: one that it stops does not know whether another one failed before it came.
    """
    return not is_follower() and not os.environ.get("TORCHELASTIC_RUN_ID", "").startswith(OWN_RUN)


def check_ranks(ranks: int) -> None:
    """Refuses a start whose processes are not those that the options speak of.

    Raises:
        UsageError: The environment tells of no such run, or of another number of ranks than `--tensor-parallel-size`.
    """
    if is_rank() and (size := read_place().size) != ranks:
        raise UsageError(
            f"this is one of {size} processes, but --tensor-parallel-size is {ranks}; "
            f"pass --mm-encoder-tp-mode data --tensor-parallel-size {size}"
        )


def rank_device(name: str, local_rank: int) -> torch.device:
    """The device of a rank: its GPU by local rank, or the CPU.

    Raises:
        UsageError: `--device` names one GPU for all, or the host has too few.
    """
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if name != "cuda":
        raise UsageError(
            f"--device is {name}, but several ranks need a GPU each; use cuda, and choose among the GPUs with "
            "CUDA_VISIBLE_DEVICES"
        )
    if local_rank >= torch.cuda.device_count():
        raise UsageError(
            f"local rank {local_rank} needs a GPU of its own, but torch sees {torch.cuda.device_count()} on this host; "
            "use fewer ranks, or several hosts with torchrun"
        )
    return torch.device("cuda", local_rank)


def launch_ranks(ranks: int, arguments: Sequence[str]) -> RanksEnded:
    """Runs `vitgraph` with these arguments as `ranks` processes on this host, and waits for them.

    No rank is restarted. When one fails, the launcher ends the others, which save what they have.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _silence_launcher()
    # torch 2.11 has no such setting and always waits 30 s.
    has_setting = any(field.name == "shutdown_timeout" for field in dataclasses.fields(LaunchConfig))
    shutdown: dict[str, Any] = {"shutdown_timeout": SHUTDOWN_S} if has_setting else {}
    with tempfile.TemporaryDirectory(prefix="vitgraph-ranks-") as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=f"{OWN_RUN}{uuid.uuid4().hex}",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            **shutdown,
        )
        threading.Thread(target=_end_stragglers, args=(Path(logs),), daemon=True).start()
        try:
            elastic_launch(config, sys.executable)("-m", "vitgraph", *arguments)
        except ChildFailedError as error:
            return judge_failures(error.failures)
        except SignalException:
            return RanksEnded(EXIT_INTERRUPTED)
    return RanksEnded()


def _end_stragglers(logs: Path) -> None:
    """Kills ranks that are still there so long after another one ended; the launcher would wait for them for ever."""
    ended: set[int] = set()
    since = math.inf
    while logs.exists():
        # What is read may be half written, or removed at the end.
        with suppress(OSError, ValueError):
            ranks = {int(file.read_text()) for file in logs.rglob(PID_FILE)}
            ended |= {rank for rank in ranks if not _is_there(rank)}
            if ended:
                since = min(since, time.monotonic())
            if time.monotonic() - since > LAST_RANK_S:
                for rank in ranks - ended:
                    os.kill(rank, signal.SIGKILL)
        time.sleep(LOOK_EVERY_S)


def _is_there(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def _silence_launcher() -> None:
    """Which rank failed, and why, is reported in fewer words than the launcher's."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def judge_failures(failures: Mapping[int, ProcessFailure]) -> RanksEnded:
    """How the command ends where ranks failed.

    Rank 0 tells its own errors and those that the others left in the store. What it cannot tell is that a rank was
    killed, or that it was killed itself.
    """
    leader = failures.get(0)
    has_leader_spoken = leader is not None and leader.exitcode > 0 and leader.exitcode != EXIT_INTERRUPTED
    told = {rank: text for rank, failure in sorted(failures.items()) if (text := _own_words(failure.error_file_data))}
    # The launcher's own: SIGTERM first, and SIGKILL for who does not hear it, since another rank failed.
    own = ("SIGTERM", "SIGKILL") if has_leader_spoken or told else ("SIGTERM",)
    killed = {
        rank: failure for rank, failure in failures.items() if failure.exitcode < 0 and failure.signal_name() not in own
    }
    exit_status = leader.exitcode if leader is not None and has_leader_spoken else EXIT_UNEXPECTED
    if killed:
        named = ", ".join(f"rank {rank} by {failure.signal_name()}" for rank, failure in sorted(killed.items()))
        note = "" if has_leader_spoken else "; what was measured is in the output folder"
        return RanksEnded(exit_status, f"ended by a signal: {named}{note}")
    if has_leader_spoken:
        return RanksEnded(exit_status)
    if told:
        rank = min(told, key=lambda rank: failures[rank].timestamp)
        return RanksEnded(max(failures[rank].exitcode, EXIT_UNEXPECTED), f"rank {rank}: {told[rank]}")
    if leader is not None and leader.exitcode == EXIT_INTERRUPTED:
        return RanksEnded(EXIT_INTERRUPTED)
    rank = min(failures, key=lambda rank: failures[rank].timestamp)
    return RanksEnded(exit_status, f"rank {rank} ended with exit code {failures[rank].exitcode}")


def _own_words(error_data: Any) -> str | None:
    message = error_data.get("message") if isinstance(error_data, dict) else None
    return message.get("message") if isinstance(message, dict) else None


def end_with_parent() -> None:
    """Stops a rank, from now on, once its launcher is gone, and tells that of its process; by hand, there is none."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = os.getppid()
    if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        Path(error_file).with_name(PID_FILE).write_text(str(os.getpid()), encoding="utf-8")

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_EVERY_S)
        os.kill(os.getpid(), signal.SIGTERM)
        # What was measured is saved by then; whoever waits in a collective would wait for ever.
        time.sleep(SHUTDOWN_S)
        os._exit(EXIT_UNEXPECTED)

    threading.Thread(target=watch, daemon=True).start()


def leave_word(error: BaseException) -> None:
    """Leaves an error where the launcher, torchrun included, looks for the reason why a rank ended."""
    if not is_rank():
        return
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        get_error_handler().record_exception(error)
