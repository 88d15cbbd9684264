"""A small GPT: what the training steps of a capture train. Real layers, real sizes, random tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GptShape:
    """Of the model and of a rank's micro-batch."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    tokens: int
    batch: int


ON_CPU = GptShape(layers=4, width=128, heads=4, vocabulary=2048, tokens=64, batch=2)
ON_GPU = GptShape(layers=12, width=768, heads=12, vocabulary=50304, tokens=1024, batch=8)


def build(torch: Any, shape: GptShape, device: Any) -> Any:
    """The model, the same on every rank."""
    nn = torch.nn
    f = torch.nn.functional

    class Block(nn.Module):  # type: ignore[misc, name-defined]
        """A block: attention, then the MLP, each behind its norm and added to its input."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
            self.qkv, self.out = nn.Linear(shape.width, 3 * shape.width), nn.Linear(shape.width, shape.width)
            self.up, self.down = nn.Linear(shape.width, 4 * shape.width), nn.Linear(4 * shape.width, shape.width)

        def forward(self, x: Any) -> Any:
            """(batch, tokens, width) to the same shape."""
            parts = self.qkv(self.first(x)).unflatten(-1, (3, shape.heads, -1)).transpose(1, 3)
            q, k, v = (parts[:, :, i].contiguous() for i in range(3))
            y = f.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).flatten(2))
            return x + self.down(f.gelu(self.up(self.second(x))))

    class Gpt(nn.Module):  # type: ignore[misc, name-defined]
        """Embeddings, blocks, the last norm and the head."""

        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(shape.vocabulary, shape.width)
            self.places = nn.Embedding(shape.tokens, shape.width)
            self.blocks = nn.ModuleList([Block() for _ in range(shape.layers)])
            self.norm = nn.LayerNorm(shape.width)
            self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

        def forward(self, tokens: Any) -> Any:
            """(batch, tokens) word numbers to the mean cross entropy of each next word."""
            x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
            for block in self.blocks:
                x = block(x)
            return f.cross_entropy(self.head(self.norm(x))[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    torch.manual_seed(0)
    return Gpt().to(device)
