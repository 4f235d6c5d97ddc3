"""`vitgraph` for shell scripts, forked with every module loaded: importing takes longer than most small commands.

A server in a fork of the test's process forks itself for each command. What stands on the PATH is this file as a
program, which hands its words, folder, environment and streams over and ends as the command did.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

MOST_BYTES = 2**20


def request(server: str, words: list[str]) -> int:
    """Has a command run by the server, with this process's streams; its exit status."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(server)
        wanted = json.dumps({"words": words, "folder": str(Path.cwd()), "environment": dict(os.environ)})
        socket.send_fds(connection, [wanted.encode()], [0, 1, 2])
        return int(connection.recv(16) or 1)


@contextmanager
def forked_program(folder: Path, run: Callable[[list[str]], NoReturn]) -> Iterator[Path]:
    """A file that is the program as long as the block runs.

    Args:
        folder: Where it and its socket are made.
        run: Runs a command line in a process of its own, and ends that.
    """
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen()
    server = os.fork()
    if server == 0:
        _serve(listener, run)
    listener.close()
    program = folder / "vitgraph"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -SE "{__file__}" "{folder / "socket"}" "$@"\n')
    program.chmod(0o755)
    try:
        yield program
    finally:
        os.kill(server, 9)
        os.waitpid(server, 0)


def _serve(listener: socket.socket, run: Callable[[list[str]], NoReturn]) -> NoReturn:
    while True:
        connection, _ = listener.accept()
        packed, streams, *_ = socket.recv_fds(connection, MOST_BYTES, 3)
        child = os.fork()
        if child == 0:
            wanted = json.loads(packed)
            for stream, place in zip(streams, range(3), strict=True):
                os.dup2(stream, place)
            os.chdir(wanted["folder"])
            os.environ.clear()
            os.environ.update(wanted["environment"])
            run(wanted["words"])
        for stream in streams:
            os.close(stream)
        connection.send(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
        connection.close()


if __name__ == "__main__":
    sys.exit(request(sys.argv[1], sys.argv[2:]))
