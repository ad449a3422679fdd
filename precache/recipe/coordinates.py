"""Coordinates in pictures: boxes and keypoints, which move as the pixels under them do."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Movement:
    """A movement of the pixels of N pictures: a part of each, stretched, and mirrored after that.

    The arithmetic is that of ``torchvision.transforms.v2``: coordinates of boxes are edges of
    pixels, so that mirroring takes x to ``width - x``; those of keypoints are pixels, and mirroring
    takes x to ``width - 1 - x``.

    Attributes
    ----------
    starts
        (N, 2) x, y of the part's corner, or (1, 2) if it is the same in all.
    scales
        (N, 2) or (1, 2) pixels of the result for one, across and down.
    mirrored
        (N,) or (1,) bool.
    shifts
        (N,) or (1,) pixels of the result that keypoints go further right than edges.
    size
        Height and width of the result.
    """

    starts: torch.Tensor
    scales: torch.Tensor
    mirrored: torch.Tensor
    shifts: torch.Tensor
    size: tuple[int, int]

    def _edges(self, xy: torch.Tensor) -> torch.Tensor:
        """Move (N, n, 2) x, y of edges of pixels."""
        x, y = ((xy - self.starts[:, None]) * self.scales[:, None]).unbind(-1)
        return torch.stack([torch.where(self.mirrored[:, None], self.size[1] - x, x), y], -1)

    def keypoints(self, values: torch.Tensor) -> torch.Tensor:
        """Move (N, n, …, k), of which the last axis begins with x, y; none is clipped."""
        flat = values.flatten(1, -2)
        x, y = self._edges(flat[..., :2]).unbind(-1)
        moved = torch.stack([x + self.shifts[:, None], y], -1)
        return torch.cat([moved, flat[..., 2:]], -1).reshape(values.shape)

    def boxes(self, values: torch.Tensor) -> torch.Tensor:
        """Move (N, n, 4) x1, y1, x2, y2, and clip them to the result."""
        one, other = self._edges(values[..., :2]), self._edges(values[..., 2:])
        corners = torch.minimum(one, other), torch.maximum(one, other)
        x1, y1, x2, y2 = torch.cat(corners, -1).unbind(-1)
        height, width = self.size
        clipped = [x1.clamp(0, width), y1.clamp(0, height), x2.clamp(0, width), y2.clamp(0, height)]
        return torch.stack(clipped, -1)
