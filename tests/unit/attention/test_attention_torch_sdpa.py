"""torch's own attention: segments, empty slots, padded rows, tiles."""

from __future__ import annotations

import torch

from vitgraph.attention.base import AttentionBackend, TorchSdpaBackend
from vitgraph.attention.measure import AttentionCase, reference_attention, relative_error

CPU = torch.device("cpu")
CASE = AttentionCase(2, 24, torch.float32, (5, 0, 1, 30, 0), slots=8, padding_rows=4)


def test_segments_attend_within_themselves_and_padding_reaches_nothing() -> None:
    query, key, value = CASE.tensors(CPU)
    offsets = CASE.offsets(CPU)
    assert offsets.tolist() == [0, 5, 5, 6, 36, 36, 36, 36, 36]
    expected = reference_attention(query, key, value, offsets, 0.3, torch.float64)
    for tensor in (query, key, value):
        tensor[36:] = float("nan")
    actual = TorchSdpaBackend().varlen(query, key, value, offsets, 30, 0.3)
    assert relative_error(actual, expected, offsets) < 1e-6
    assert actual[36:].abs().sum() == 0


def test_the_reference_itself_is_softmax_attention() -> None:
    query, key, value = (tensor[:5] for tensor in CASE.tensors(CPU))
    offsets = torch.tensor([0, 5], dtype=torch.int32)
    q, k, v = (tensor.transpose(0, 1) for tensor in (query, key, value))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.2).transpose(0, 1)
    torch.testing.assert_close(reference_attention(query, key, value, offsets, 0.2), expected)


def test_random_inputs_do_not_move_the_global_generator() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    CASE.tensors(CPU)
    assert torch.rand(1) == expected


class FlatTiles(TorchSdpaBackend):
    """Without the dense call of its own, as varlen backends are."""

    dense = AttentionBackend.dense

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def varlen(self, *arguments: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        self.seen.append(arguments[3])
        return super().varlen(*arguments)  # type: ignore[arg-type]


def test_tiles_are_equal_segments_and_their_offsets_are_made_once() -> None:
    query, key, value = (torch.randn(3, 2, 6, 8) for _ in range(3))
    backend = FlatTiles()
    for _ in range(2):
        out = backend.dense(query, key, value, None, 0.4)
        torch.testing.assert_close(out, TorchSdpaBackend().dense(query, key, value, None, 0.4))
    assert backend.seen[0].tolist() == [0, 6, 12, 18]
    assert backend.seen[1] is backend.seen[0]


def test_a_mask_over_tiles_is_kept() -> None:
    query, key, value = (torch.randn(1, 1, 4, 8) for _ in range(3))
    mask = torch.tensor([True, True, False, False]).view(1, 1, 1, 4)
    out = FlatTiles().dense(query, key, value, mask, 1.0)
    alone = torch.nn.functional.scaled_dot_product_attention(query, key[:, :, :2], value[:, :, :2], scale=1.0)
    torch.testing.assert_close(out, alone.transpose(1, 2))
