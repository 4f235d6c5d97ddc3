"""Attention backends: the registry and one file a backend."""
