"""Data parallel: the ranks of a run, and how their rows come back together."""
