"""What the program's process does with its streams and at its end, beside what Python does."""

from __future__ import annotations

import atexit
import os
import sys

LEAK_REPORTER = "cudnn"
"""cuDNN's frontend holds its plans to the end; forty lines about that would follow every result with FLASHINFER."""


def keep_stdout() -> None:
    """Leaves standard output to this program: what libraries write there goes to standard error from now on.

    NCCL tells its version there once it is asked for warnings, in the middle of what `--json` prints.
    """
    sys.stdout.flush()
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    ours = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(ours, "w", buffering=1, encoding=encoding, errors=errors)


def end_without_leak_report(code: object) -> None:
    """Ends the process as Python does, up to where nanobind would list what a module still holds.

    Args:
        code: Of the `SystemExit` that ends the program; one that is no number is left to Python, as is every program
            without such a module.
    """
    if LEAK_REPORTER not in sys.modules or not isinstance(code, int | None):
        return
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code or 0)
