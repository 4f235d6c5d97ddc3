"""Tuning: measure a cost profile, predict latencies from it, search the settings that fit a workload, prove them."""
