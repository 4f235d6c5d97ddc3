"""Measuring: setup, calls, timing, interleaved modes, diagnosis."""

import os

# torch's profiler tells of the start and stop of each trace (`USDT:`) on standard error below its highest level.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")
