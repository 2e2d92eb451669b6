"""The baseline: a stack of transformer layers of the same width, all of whose weights are trained at every step.

Written from BaselineTransformer of PlanetDestroyyer/self-learning-k-1 (experiment_baseline.py), with its names of
parameters. A checkpoint of one op set loads into the other.
"""

import torch
from torch import nn
from torch.nn import functional as F

from ..common.bdh import check_ops
from .heads import causal_attention, head_loss


class BaselineTransformer(nn.Module):
    """Words (B, T) -> logits (B, T, vocab_size)."""

    def __init__(
        self,
        vocab_size,
        embed_dim=128,
        num_heads=4,
        num_layers=4,
        ff_dim=256,
        max_seq_len=64,
        dropout=0.1,
        *,
        ops="camox",
    ):
        super().__init__()
        check_ops(ops)
        self.ops, self.max_seq_len = ops, max_seq_len
        self.embedding = nn.Embedding(vocab_size, embed_dim)
        self.pos_encoding = nn.Parameter(torch.randn(max_seq_len, embed_dim) * 0.02)
        layer = nn.TransformerEncoderLayer(embed_dim, num_heads, ff_dim, dropout, "gelu", batch_first=True)
        self.transformer = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.output_norm = nn.LayerNorm(embed_dim)
        self.output_proj = nn.Linear(embed_dim, vocab_size)
        self.register_buffer("causal_mask", torch.ones(max_seq_len, max_seq_len).triu(1).bool())
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(self, x):
        return self.output_proj(self.features(x))

    def loss(self, x, targets):
        """Cross-entropy of the targets (B, T), mean over all of them."""
        return head_loss(self.ops, self.features(x).flatten(0, 1), self.output_proj, targets.flatten())

    def features(self, x):
        """(B, T, embed_dim): what the head reads."""
        length = x.shape[1]
        if length > self.max_seq_len:
            raise ValueError(f"x must have at most {self.max_seq_len} words per text, got shape {tuple(x.shape)}")
        h = self.embedding(x) + self.pos_encoding[:length]
        if self.ops == "torch":
            h = self.transformer(h, mask=self.causal_mask[:length, :length], is_causal=True)
        else:
            for layer in self.transformer.layers:
                h = camox_layer(layer, h)
        return self.output_norm(h)


def camox_layer(layer, x):
    """An nn.TransformerEncoderLayer, causal, normalising after each sum."""
    from camox_ops import bias_gelu, dropout_add_layer_norm

    attention, p, training = layer.self_attn, layer.dropout.p, layer.training
    qkv = F.linear(x, attention.in_proj_weight, attention.in_proj_bias)
    qkv = qkv.view(*x.shape[:2], 3, attention.num_heads, attention.head_dim)
    attended = attention.out_proj(causal_attention(qkv, p, training).flatten(2))

    def add_norm(norm, added, x):
        options = {"p": p, "training": training, "eps": norm.eps}
        return dropout_add_layer_norm(added.to(x.dtype), x, norm.weight, norm.bias, **options)

    x = add_norm(layer.norm1, attended, x)
    hidden = bias_gelu(F.linear(x, layer.linear1.weight), layer.linear1.bias, p=p, training=training)
    return add_norm(layer.norm2, layer.linear2(hidden), x)
