"""A stop is one word and a status wherever it comes, and never a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LATE_STOPS = Path(__file__).parents[2] / "drills" / "late_stops.py"


def test_a_stop_after_the_last_line_ends_in_a_status() -> None:
    """At every place between there and the end of the program in turn, also as a second stop that comes much later."""
    run = subprocess.run([sys.executable, LATE_STOPS], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 10
