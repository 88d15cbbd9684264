"""A diffusion transformer as SiT-B/2 is published (arXiv 2401.08740): ``sit_b2.model.json`` is traced from it.

clustersim trace-model sit_b2.py:build --input 'x=floats[4, 4, 16, 16]' --input 't=floats[4, 256]' --types autocast
"""

import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.modulation = nn.Linear(width, 6 * width)

    def attention(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, c))

    def forward(self, x, condition):
        parts = self.modulation(F.silu(condition)).unsqueeze(1).chunk(6, dim=2)
        shift1, scale1, gate1, shift2, scale2, gate2 = parts
        x = x + gate1 * self.attention(self.norm1(x) * (1 + scale1) + shift1)
        wide = F.gelu(self.up(self.norm2(x) * (1 + scale2) + shift2), approximate="tanh")
        return x + gate2 * self.down(wide)


class Diffusion(nn.Module):
    def __init__(self, layers=12, width=768, heads=12, channels=4, patch=2):
        super().__init__()
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.modulation = nn.Linear(width, 2 * width)
        self.head = nn.Linear(width, patch * patch * channels)

    def forward(self, x, t):
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        condition = self.time(t)
        for block in self.blocks:
            tokens = block(tokens, condition)
        shift, scale = self.modulation(F.silu(condition)).unsqueeze(1).chunk(2, dim=2)
        velocity = self.head(self.norm(tokens) * (1 + scale) + shift)
        return (velocity.float() ** 2).mean()


def build():
    return Diffusion()
