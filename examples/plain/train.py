"""Plain PyTorch, no camox_ops: blocks of norm, convolution and dropout learn to tell textures apart.

python examples/plain/train.py                            # as it is
python -m camox_ops run examples/plain/train.py           # faster, not a line changed
"""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn


class LayerNorm2d(nn.Module):
    """Over the channels of (B, C, H, W), as many repositories write it."""

    def __init__(self, channels: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.eps = eps

    def forward(self, x):
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).pow(2).mean(1, keepdim=True)
        x = (x - mean) / torch.sqrt(variance + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class Block(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.spatial = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.norm = LayerNorm2d(channels)
        self.mix = nn.Sequential(
            nn.Conv2d(channels, 2 * channels, 1), nn.GELU(), nn.Dropout(0.1), nn.Conv2d(2 * channels, channels, 1)
        )

    def forward(self, x):
        return x + self.mix(self.norm(self.spatial(x)))


class Net(nn.Module):
    def __init__(self, channels: int = 32, blocks: int = 4, classes: int = 8):
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 4, stride=4)
        self.blocks = nn.Sequential(*(Block(channels) for _ in range(blocks)))
        self.head = nn.Linear(channels, classes)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def textures(count: int, classes: int, size: int = 96):
    """Waves, of one direction for each class, under noise: (images, labels)."""
    labels = torch.randint(classes, (count,))
    angle = labels * torch.pi / classes
    across, down = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="xy")
    wave = angle.cos()[:, None, None] * across + angle.sin()[:, None, None] * down
    images = torch.sin(wave + 6 * torch.rand(count, 1, 1)) + torch.randn(count, size, size)
    return images[:, None], labels


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), 2e-3)
    start = time.perf_counter()
    for step in range(options.steps):
        images, labels = textures(16, 8)
        loss = F.cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 19:
            print(f"step {step + 1}: loss {loss.item():.2f}")
    net.eval()
    with torch.no_grad():
        images, labels = textures(64, 8)
        right = (net(images).argmax(1) == labels).float().mean()
    print(f"{right:.0%} right; {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
