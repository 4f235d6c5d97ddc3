"""Measuring: setup, calls, timing, interleaved modes, diagnosis."""
