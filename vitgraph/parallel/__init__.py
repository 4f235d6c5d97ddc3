"""Data parallel: the ranks of a run, which items each encodes, and how their rows come back together."""
