"""Processes that a command starts: a stop ends them too, whenever it comes."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vitgraph.measure.processes import run_process


def test_a_stop_that_comes_while_a_process_is_started_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def start_and_be_stopped(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(start(*args, **options))
        signal.raise_signal(signal.SIGINT)
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", start_and_be_stopped)
    # A shell that starts the tests in its background has stops ignored, by what they start too.
    found = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = signal.getsignal(signal.SIGINT)
    try:
        is_stopped, status = run_process([sys.executable, "-c", "import time; time.sleep(99)"], tmp_path)
        assert is_stopped and status != 0 and started[0].poll() == status
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGINT, found)
