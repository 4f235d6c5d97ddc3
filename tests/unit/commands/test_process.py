"""A stop is one word and a status wherever it comes, and never a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vitgraph.commands import process

LATE_STOPS = Path(__file__).parents[2] / "drills" / "late_stops.py"


@pytest.mark.parametrize("stop", [number.name for number in process.STOP_SIGNALS])
@pytest.mark.parametrize("end", ["SystemExit", "KeyboardInterrupt"])
def test_a_stop_after_the_last_line_ends_in_a_status(end: str, stop: str) -> None:
    """At every place between there and the end of the program in turn, also as a second stop that comes much later."""
    run = subprocess.run([sys.executable, LATE_STOPS, stop, end], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 10
