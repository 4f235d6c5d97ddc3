"""Runs a function on several gloo ranks on this machine; the processes are forked, so that they start at once."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vitgraph.ranks.group import ParallelGroup


@dataclass(frozen=True)
class RankResult:
    """How a rank ended.

    Attributes:
        value: What the function returned; None where it did not.
        error: Class and message of the error that it raised, or None.
        exit_status: The error's exit status.
        exit_code: The process's exit code; negative for a signal.
    """

    value: Any
    error: str | None
    exit_status: int | None
    exit_code: int | None


def run_ranks(
    size: int, work: Callable[[ParallelGroup], Any], *, limit_s: float = 45.0, within_s: float = 110.0
) -> list[RankResult]:
    """Runs `work(group)` on `size` ranks; those that are not done in time are killed, and the test fails."""
    context = multiprocessing.get_context("fork")
    # As with torch's launcher, the store outlives every rank. It has a process of its own, because its thread in this
    # one could hold a lock at the moment of a fork, which the forked rank would then wait for.
    port_reader, port_writer = context.Pipe(duplex=False)
    store = context.Process(target=_serve_store, args=(port_writer,), daemon=True)
    store.start()
    port = port_reader.recv()
    try:
        return _run_with_store(size, port, work, limit_s, within_s)
    finally:
        store.kill()
        store.join()


def _serve_store(port_writer: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port_writer.send(store.port)
    while True:
        time.sleep(60)


def _run_with_store(
    size: int, port: int, work: Callable[[ParallelGroup], Any], limit_s: float, within_s: float
) -> list[RankResult]:
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    processes = [
        context.Process(target=_run_rank, args=(rank, size, port, work, limit_s, pipes[rank][1]))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for _, writer in pipes:
        writer.close()
    deadline = time.monotonic() + within_s
    found: list[Any] = [receive(reader, deadline) for reader, _ in pipes]
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    late = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for rank in late:
        os.kill(processes[rank].pid or 0, signal.SIGKILL)
        processes[rank].join()
    assert not late, f"ranks {late} were not done within {within_s} s; the others: {found}"
    return [RankResult(*sent, process.exitcode) for sent, process in zip(found, processes, strict=True)]


def receive(reader: Connection, deadline: float) -> tuple[Any, str | None, int | None]:
    try:
        if reader.poll(max(0.0, deadline - time.monotonic())):
            # By value: the connection's own pickler would hand tensors over in shared memory of a process that is gone.
            return pickle.loads(reader.recv_bytes())
    except EOFError:
        pass
    return None, None, None


def rank_pids(parent: int) -> dict[str, int]:
    """Processes of the ranks that `parent` started, by rank."""
    found = {}
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdigit() and int((path / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                words = (path / "environ").read_bytes().decode(errors="replace").split("\0")
                found |= {word.removeprefix("RANK="): int(path.name) for word in words if word.startswith("RANK=")}
        except OSError:
            continue
    return found


def values(results: list[RankResult]) -> list[Any]:
    """What the ranks returned; none may have failed."""
    assert [result.error for result in results] == [None] * len(results)
    assert [result.exit_code for result in results] == [0] * len(results)
    return [result.value for result in results]


def _run_rank(
    rank: int, size: int, port: int, work: Callable[[ParallelGroup], Any], limit_s: float, writer: Connection
) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    try:
        with ParallelGroup.join("cpu", limit_s) as group:
            value = work(group)
    except Exception as error:
        # The error is the result; the test judges it.
        writer.send_bytes(pickle.dumps((None, f"{type(error).__name__}: {error}", getattr(error, "exit_status", None))))
        os._exit(1)
    writer.send_bytes(pickle.dumps((value, None, None)))
