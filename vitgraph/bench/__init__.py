"""Measuring: timing, interleaved modes, verification."""
