"""Predicting latencies from a measured profile: pure arithmetic, no torch."""
