"""The module of lesson 17: a language model whose blocks have a gated convolution where others have attention.

clustersim trace-model mixer.py:build --input 'tokens[2, 4096]' --types bf16 --name mixer
clustersim trace-model mixer.py:build --input 'tokens[2, 4096]' --types bf16 --name mixer-by-hand --arg by_hand=true
"""

import torch
import torch.nn.functional as F
from torch import nn


class NormByHand(nn.Module):
    """The same as nn.RMSNorm, as papers write it."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * (x.float() * scale).to(x.dtype)


class Mixer(nn.Module):
    """Each channel is mixed over its last ``reach`` tokens, behind a gate and ahead of another."""

    def __init__(self, width, reach):
        super().__init__()
        self.gates = nn.Linear(width, 3 * width, bias=False)
        self.mix = nn.Conv1d(width, width, reach, groups=width, padding=reach - 1)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x):
        before, value, behind = self.gates(x).chunk(3, dim=-1)
        mixed = self.mix((before * value).transpose(1, 2))[..., : x.shape[1]]
        return self.out(behind * mixed.transpose(1, 2))


class Block(nn.Module):
    def __init__(self, width, reach, norm):
        super().__init__()
        self.norm1 = norm(width)
        self.mixer = Mixer(width, reach)
        self.norm2 = norm(width)
        self.up = nn.Linear(width, 8 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        x = x + self.mixer(self.norm1(x))
        gate, value = self.up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * value)


class MixerModel(nn.Module):
    def __init__(self, layers, width, reach, vocab, norm):
        super().__init__()
        self.words = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList([Block(width, reach, norm) for _ in range(layers)])
        self.norm = norm(width)
        self.logits = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens):
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.logits(self.norm(x)).float()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def build(layers=24, width=2048, reach=4, vocab=32768, by_hand=False):
    """What ``clustersim trace-model mixer.py:build`` calls; ``--arg layers=32`` changes an argument."""
    return MixerModel(layers, width, reach, vocab, NormByHand if by_hand else nn.RMSNorm)
