"""Requests to encode: random-mm, hub and local data sets, size traces."""
