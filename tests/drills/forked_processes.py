"""The processes of vitgraph that a command starts, forked with everything loaded instead of started from nothing.

They are forked by a process that has no threads, stands between, and hands each of them over to the command, whose
children they are then.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

SUBREAPER = 36
"""Of `prctl`: children whose parent ends become those of the process that asked for it."""
VITGRAPH = [sys.executable, "-m", "vitgraph"]
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Wanted(NamedTuple):
    """A process that a command starts: its words after `vitgraph`, its environment, and what it inherits."""

    words: list[str]
    environment: dict[str, str]
    has_session: bool
    user: int
    most_bytes: tuple[int, int]


def adopt_orphans() -> None:
    """Makes this process the parent of what its children leave behind."""
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)


def fork_own_processes(become: Callable[[list[str]], NoReturn]) -> None:
    """From now on, what this process starts as `python -m vitgraph` is forked and calls `become` with its words."""
    adopt_orphans()
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        for number in STOPS:
            signal.signal(number, signal.SIG_IGN)
        _serve(theirs, become)
        os._exit(0)
    theirs.close()
    start_anew = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    names = inspect.signature(start_anew)

    def start(self: Any, args: Any, *others: Any) -> None:
        if list(args)[:3] != VITGRAPH:
            return start_anew(self, args, *others)
        given = names.bind(self, args, *others).arguments
        environment = dict(os.environ if given["env"] is None else given["env"])
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        wanted = Wanted(list(args)[3:], environment, given["start_new_session"], os.geteuid(), limit)
        handles = [given[name] if given[name] != -1 else usual for name, usual in (("c2pwrite", 1), ("errwrite", 2))]
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        try:
            socket.send_fds(ours, [pickle.dumps(tuple(wanted))], handles)
            self.pid, self._child_created = int(ours.recv(32)), True
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    subprocess.Popen._execute_child = start  # type: ignore[attr-defined]


def _serve(requests: socket.socket, become: Callable[[list[str]], NoReturn]) -> None:
    while True:
        packed, handles, *_ = socket.recv_fds(requests, 2**20, 2)
        if not packed:
            return
        reader, writer = os.pipe()
        between = os.fork()
        if between == 0:
            between, child = os.getpid(), os.fork()
            if child:
                os.write(writer, str(child).encode())
                os._exit(0)
            # Its parent is the command only once the one between is gone.
            while os.getppid() == between:
                time.sleep(0.001)
            requests.close()
            _inherit(Wanted(*pickle.loads(packed)), handles, become)
        os.waitpid(between, 0)
        requests.send(os.read(reader, 32))
        for handle in (reader, writer, *handles):
            os.close(handle)


def _inherit(wanted: Wanted, handles: list[int], become: Callable[[list[str]], NoReturn]) -> NoReturn:
    for handle, place in zip(handles, (1, 2), strict=True):
        os.dup2(handle, place)
    for number in STOPS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    if wanted.has_session:
        os.setsid()
    os.environ.clear()
    os.environ.update(wanted.environment)
    resource.setrlimit(resource.RLIMIT_FSIZE, wanted.most_bytes)
    if wanted.user != os.geteuid():
        os.seteuid(wanted.user)
    become(wanted.words)
