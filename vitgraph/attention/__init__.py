"""Attention backends: the registry and one file a package of kernels."""
