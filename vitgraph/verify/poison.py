"""Fills with NaN what a replay must not depend on: the graphs' private pool, outputs, and inputs to be replaced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace

import torch

from vitgraph.graphs.capture import BudgetGraphMetadata

POISON_BYTE = 0xFF
"""Two, four or eight such bytes are NaN in bfloat16, float16, float32 and float64, and -1 as an integer."""


def pool_segments(graphs: Iterable[BudgetGraphMetadata], device: torch.device) -> list[tuple[int, int]]:
    """Address and bytes of every segment of the graphs' private pools; empty on a CPU."""
    if device.type != "cuda":
        return []
    pools = {tuple(graph.graph.pool()) for graph in graphs if isinstance(graph.graph, torch.cuda.CUDAGraph)}
    return [
        (segment["address"], segment["total_size"])
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == (device.index or 0) and tuple(segment["segment_pool_id"]) in pools
    ]


def poison_memory(segments: Iterable[tuple[int, int]], device: torch.device) -> int:
    """Fills raw device memory with NaN; returns the bytes.

    A replay writes every intermediate before it reads it, so nothing of a pool may matter between two replays.
    """
    total = 0
    for address, nbytes in segments:
        array = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3}
        # Raw memory that torch wraps without a copy.
        torch.as_tensor(SimpleNamespace(__cuda_array_interface__=array), device=device).fill_(POISON_BYTE)
        total += nbytes
    return total


def poison_graph_buffers(graph: BudgetGraphMetadata, pixel_rows: Mapping[str, int]) -> None:
    """Fills with NaN the output of a graph, its metadata, and the pixel rows that its next replay brings anew.

    Pixel rows past those stay: clearing stale ones is the manager's contract, which counts what it wrote.

    Args:
        graph: The graph about to be replayed.
        pixel_rows: Rows of each pixel buffer that the next replay copies in.
    """
    graph.output_buffer.view(torch.uint8).fill_(POISON_BYTE)
    for name, buffer in graph.input_buffers.items():
        rows = pixel_rows.get(name, len(buffer)) if name in graph.pixel_capacity else len(buffer)
        buffer[:rows].view(torch.uint8).fill_(POISON_BYTE)
