"""What a search tries: numbers of items and frames that a workload gives reason for."""

from __future__ import annotations

import numpy as np

from vitgraph.predict.traffic import Traffic


def item_options(traffic: Traffic) -> list[int]:
    """Items that a replay may hold: one, as many as the largest call has, and steps between."""
    most = traffic.max_items
    options = {1, most, *(size for size in (2, 3, 4, 6, 8, 12, 16, 24, 32, 64) if size < most)}
    return sorted(options)


def frame_options(traffic: Traffic) -> list[int]:
    """0 without videos; else eager videos, one median video, the longest, and the longest call."""
    if not traffic.has_videos:
        return [0]
    segments = [sum(spec.segments for spec in specs) for specs in traffic.distinct]
    single = [spec.segments for specs in traffic.distinct for spec in specs]
    return sorted({0, int(np.median(single)), max(single), max(segments)})
