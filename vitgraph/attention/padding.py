"""What backends do about the rows past the last segment: endpoints on the host, outputs with finite padded rows.

Eager, capture and replay all come through here. Everything that runs on the device is a tensor operation without a host
synchronisation, so it may be captured and follows the offsets of each replay.

Shape legend: N packed rows, S segments, H heads, E head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from vitgraph.errors import BackendError

FILL_BYTES, FILL_OUTPUTS = 32 * 2**20, 32
"""Most bytes and outputs that are zeroed at once: small fills cost a launch each, and large ones hold memory."""


def segment_endpoints(cu_seqlens: torch.Tensor | Sequence[int], rows: int) -> list[int]:
    """Ends of the segments that have rows, read on the host; each starts where the one before it ends.

    Args:
        cu_seqlens: `[S + 1]` offsets; repeated entries are empty segments. A device tensor is copied, which waits.
        rows: Rows of the packed tensor; those past the last endpoint are padding.

    Raises:
        BackendError: Offsets that do not start at 0, that fall, or that end past `rows`.
    """
    offsets = cu_seqlens.tolist() if isinstance(cu_seqlens, torch.Tensor) else list(cu_seqlens)
    if not offsets or offsets[0] != 0:
        raise BackendError(f"segment offsets must start with 0, got {offsets[:4]}")
    endpoints: list[int] = []
    last = 0
    for offset in offsets[1:]:
        if offset < last:
            raise BackendError(f"segment offsets must not fall, but {offset} follows {last}")
        if offset > last:
            endpoints.append(offset)
        last = offset
    if last > rows:
        raise BackendError(f"the last segment ends at row {last} of {rows}; pass the offsets of these very rows")
    return endpoints


def zero_rows_past_end(out: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Zeros the rows of `out` `[N, H, E]` past `cu_seqlens[-1]` in place; for kernels that take no output tensor."""
    if out.is_cuda and out.is_contiguous():
        try:
            from vitgraph.attention.triton_kernel import zero_tail
        except ImportError:
            pass
        else:
            # The tensor operations below read and write all of `out`, and are three launches.
            return zero_tail(out, cu_seqlens)
    past_end = torch.arange(out.shape[0], dtype=cu_seqlens.dtype, device=out.device) >= cu_seqlens[-1]
    return out.masked_fill_(past_end[:, None, None], 0)


class GraphOutputs:
    """Where the calls of graphs write: zeroed outputs, so that the rows which a kernel skips are always finite.

    All layers share one buffer. A graph keeps writing to the buffer it was captured with: one that became too small is
    kept until `release`.

    Attributes:
        are_fresh: Each call gets an output of its own instead, whose memory is the caller's. Nothing of these is kept
            from one forward to the next: a graph must hold the fill of every output that it writes to, or a replay
            would find the rows of the one before.
    """

    def __init__(self) -> None:
        self.are_fresh = False
        self._rows = 0
        self._buffers: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        self._outgrown: list[torch.Tensor] = []
        self._is_in_forward = False
        self._spare: list[torch.Tensor] = []

    def reserve(self, rows: int) -> None:
        """Makes later buffers at least so many rows high, so that every graph of a list shares one."""
        self._rows = max(self._rows, rows)

    def release(self) -> None:
        """Drops the buffers; no graph that was captured with them may be replayed afterwards."""
        self._rows = 0
        self._buffers.clear()
        self._outgrown.clear()

    @contextmanager
    def one_forward(self) -> Iterator[None]:
        """Until it ends, fresh outputs may be filled before they are asked for."""
        outer = self._spare, self._is_in_forward
        self._spare, self._is_in_forward = [], True
        try:
            yield
        finally:
            self._spare, self._is_in_forward = outer

    def take(self, query: torch.Tensor) -> torch.Tensor:
        """`[N, H, E]` for the result of `query`: zeros past the rows that calls wrote."""
        if self.are_fresh:
            return self._take_fresh(query)
        rows, heads, width = query.shape
        shape = (heads, width, query.dtype)
        buffer = self._buffers.get(shape)
        if buffer is None or buffer.shape[0] < rows:
            if buffer is not None:
                self._outgrown.append(buffer)
            buffer = torch.zeros(max(self._rows, rows), heads, width, dtype=query.dtype, device=query.device)
            self._buffers[shape] = buffer
        return buffer[:rows]

    def _take_fresh(self, query: torch.Tensor) -> torch.Tensor:
        if not self._is_in_forward:
            return torch.zeros(query.shape, dtype=query.dtype, device=query.device)
        if not self._spare or self._spare[-1].shape != query.shape or self._spare[-1].dtype != query.dtype:
            size = max(query.numel() * query.element_size(), 1)
            count = min(max(FILL_BYTES // size, 1), FILL_OUTPUTS)
            self._spare = list(torch.zeros(count, *query.shape, dtype=query.dtype, device=query.device).unbind())
        return self._spare.pop()
