"""Residual networks in plain torch (He et al., arXiv 1512.03385).

Bottlenecks stride in their 3 x 3, as is usual since.
"""

from torch import Tensor, nn

DEPTHS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}


def _conv(inner: int, outer: int, size: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inner, outer, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(conv, nn.BatchNorm2d(outer))


class Block(nn.Module):
    """Two convolutions of 3 x 3, or a bottleneck of three, beside a short cut."""

    def __init__(self, inner: int, width: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        outer = 4 * width if bottleneck else width
        if bottleneck:
            parts = [_conv(inner, width, 1), _conv(width, width, 3, stride), _conv(width, outer, 1)]
        else:
            parts = [_conv(inner, width, 3, stride), _conv(width, outer, 3)]
        nn.init.zeros_(parts[-1][1].weight)  # a block begins as its short cut
        self.parts = nn.ModuleList(parts)
        plain = stride == 1 and inner == outer
        self.short = nn.Identity() if plain else _conv(inner, outer, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(N, inner, H, W) -> (N, outer, H / stride, W / stride)."""
        y = x
        for number, part in enumerate(self.parts, 1):
            y = part(y)
            if number < len(self.parts):
                y = y.relu()
        return (y + self.short(x)).relu()


def resnet(depth: int, classes: int, width: int = 64) -> nn.Sequential:
    """A network of 18, 34 or 50 layers, whose first ones are `width` channels wide."""
    layers: list[nn.Module] = [
        _conv(3, width, 7, 2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, padding=1),
    ]
    bottleneck, inner = depth >= 50, width
    for stage, blocks in enumerate(DEPTHS[depth]):
        for number in range(blocks):
            stride = 2 if stage and not number else 1
            block = Block(inner, width << stage, stride, bottleneck=bottleneck)
            inner = (width << stage) * (4 if bottleneck else 1)
            layers.append(block)
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, classes))
    return nn.Sequential(*layers, *head)
