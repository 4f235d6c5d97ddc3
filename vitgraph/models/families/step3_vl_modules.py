"""Step3-VL's towers over square views: transformers' perception encoder with ready positions, and the 321B model's.

Shape legend: V views, G patches on a side, N = G * G patches, W width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.models.clip.configuration_clip import CLIPVisionConfig
from transformers.models.clip.modeling_clip import CLIPMLP, CLIPAttention

LEADING_ROWS = 4
"""Rows before the patches in the 321B model's tower: its class row, repeated. They attend and are dropped."""


def perception_positions(tower: Any, grid: int) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Positions of `Step3p7VisionModel` for views of `grid` x `grid` patches, which its forward would make anew.

    Returns:
        `[1, N, W]` learned positions in the tower's dtype, and float32 cosines and sines `[N, head width]`.
    """
    table = tower.embeddings.position_embedding.weight
    side = grid * tower.embeddings.patch_size
    with torch.no_grad():
        learned = tower.embeddings.interpolate_pos_encoding(table[None], side, side).detach()
        axis = torch.arange(grid, device=table.device)
        rows, columns = torch.meshgrid(axis, axis, indexing="ij")
        rotary = tower.rotary_emb(learned, torch.stack([rows.flatten(), columns.flatten()], dim=-1))
    return learned, rotary


def perception_features(
    tower: Any, pixels: torch.Tensor, learned: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """`Step3p7VisionModel` over `[V, 3, side, side]` with ready positions: `[V, cells, 4 * W]`.

    Its own forward would read the grid back from the device.
    """
    patches = tower.embeddings.patch_embedding(pixels)
    views, width, grid, _ = patches.shape
    hidden = tower.pre_layernorm(patches.flatten(2).transpose(1, 2) + learned)
    for layer in tower.layers:
        hidden = layer(hidden, position_embeddings=rotary)
    hidden = hidden.transpose(1, 2).view(views, width, grid, grid)
    return tower.downsampler2(tower.downsampler1(hidden)).flatten(2).transpose(1, 2)


class Step3Layer(nn.Module):
    """A block that normalises what attention and MLP give, not what they get; the parts are CLIP's."""

    def __init__(self, config: CLIPVisionConfig) -> None:
        super().__init__()
        self.self_attn = CLIPAttention(config)
        self.mlp = CLIPMLP(config)
        self.layer_norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.layer_norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.layer_norm1(self.self_attn(hidden)[0])
        return hidden + self.layer_norm2(self.mlp(hidden))


class Step3Embeddings(nn.Module):
    """Patches, class row and positions under the published names."""

    def __init__(self, config: CLIPVisionConfig) -> None:
        super().__init__()
        width = config.hidden_size
        image, patch = config.image_size, config.patch_size
        assert isinstance(image, int) and isinstance(patch, int)
        self.side = image // patch
        self.class_embedding = nn.Parameter(torch.zeros(1, width))
        self.patch_embedding = nn.Conv2d(config.num_channels, width, patch, stride=patch)
        self.position_embedding = nn.Embedding(self.side**2 + 1, width)

    def positions(self, grid: int) -> torch.Tensor:
        """`[1 + N, W]` positions of a view of `grid` x `grid` patches, the class row's first."""
        table = self.position_embedding.weight.detach()
        if grid == self.side:
            return table
        square = table[1:].float().T.reshape(1, -1, self.side, self.side)
        resized = functional.interpolate(square, size=(grid, grid), mode="bicubic", antialias=True, align_corners=False)
        return torch.cat([table[:1], resized[0].flatten(1).T.to(table.dtype)])

    def forward(self, pixels: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`[V, LEADING_ROWS + N, W]`."""
        patches = self.patch_embedding(pixels).flatten(2).transpose(1, 2) + positions[1:]
        first = self.class_embedding + positions[:1]
        return torch.cat([first.expand(len(pixels), LEADING_ROWS, -1), patches], dim=1)


class Step3Tower(nn.Module):
    """The 321B model's tower and its two downsampling convolutions, which transformers lacks; `stride` is
    `understand_projector_stride` of its config.json."""

    def __init__(self, vision_config: Mapping[str, Any], stride: int) -> None:
        super().__init__()
        self.config = config = CLIPVisionConfig(**vision_config)
        config._attn_implementation = "sdpa"
        inner = int(vision_config["output_hidden_size"])
        self.embeddings = Step3Embeddings(config)
        layers = [Step3Layer(config) for _ in range(config.num_hidden_layers)]
        self.transformer = nn.ModuleDict({"layers": nn.ModuleList(layers)})
        self.vit_downsampler = nn.Conv2d(config.hidden_size, inner, kernel_size=2, stride=stride)
        self.vit_downsampler2 = nn.Conv2d(inner, 2 * inner, kernel_size=3, stride=2, padding=1)

    @property
    def layers(self) -> nn.ModuleList:
        layers = self.transformer["layers"]
        assert isinstance(layers, nn.ModuleList)
        return layers

    def forward(self, pixels: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`[V, 3, side, side]` to `[V, cells, 2 * output_hidden_size]`."""
        grid = pixels.shape[-1] // self.embeddings.patch_embedding.kernel_size[0]
        hidden = self.embeddings(pixels, positions)
        for layer in self.layers:
            hidden = layer(hidden)
        hidden = hidden[:, LEADING_ROWS:].transpose(1, 2).unflatten(2, (grid, grid))
        return self.vit_downsampler2(self.vit_downsampler(hidden)).flatten(2).transpose(1, 2)
