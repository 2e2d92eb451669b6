"""BDH: a language model whose attention is strictly causal and has a state instead of a cache.

Written from the architecture of pathwaycom/bdh (bdh.py at 714bc80), with its constructor and names of parameters, so
that its checkpoints load. A checkpoint of one op set loads into the other.
"""

import torch
from torch import nn
from torch.nn import functional as F

from ..common.bdh import THETA, BDHConfig, BDHLayers, PlainAttention, frequencies

__all__ = ["BDH", "BDHConfig"]


class CausalAttention(nn.Module):
    """Strictly causal attention with camox_ops; freqs is there for the state_dict alone, the tables are BDH's own."""

    def __init__(self, config):
        super().__init__()
        from camox_ops.nn import RotaryEmbedding

        self.register_buffer("freqs", frequencies(config.head_size))
        self.rotary = RotaryEmbedding(config.head_size, theta=THETA, units="turns", interleaved=True)

    def tables(self, length):
        return self.rotary.tables(length, self.freqs.device)

    def forward(self, Q, K, V, *, relu=False, tables=None):
        from camox_ops import bdh_attention

        assert K is Q, "the keys are the queries"
        return bdh_attention(Q, V, *(tables or self.tables(Q.shape[-2])), relu=relu, causal=True)


class BDH(BDHLayers):
    """Tokens (B, T) -> logits (B, T, vocab_size), and the loss where targets (B, T) are given.

    ops: "camox" or "torch".
    """

    def __init__(self, config, ops="camox"):
        attention = CausalAttention(config) if ops == "camox" else PlainAttention(config, causal=True)
        super().__init__(config, attention, ops)
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.lm_head = nn.Parameter(torch.empty(config.n_embd, config.vocab_size))
        for weight in (self.decoder, self.encoder, self.encoder_v, self.embed.weight, self.lm_head):
            nn.init.normal_(weight, std=0.02)

    def forward(self, idx, targets=None):
        logits = self.passes(self.ln(self.embed(idx))) @ self.lm_head
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def step(self, idx, position, states, encoder=None):
        """One more token each, idx (B,) at `position`: logits (B, vocab_size) and the layers' new states.

        states: one per layer, from the step before, or None each at position 0. encoder: encoder_of_all_heads(), which
        many steps may share. The cost does not depend on position.
        """
        from camox_ops import bdh_attention_step, sparse_gate

        cos, sin = (table[position] for table in self.attn.tables(position + 1))
        encoder = self.encoder_of_all_heads() if encoder is None else encoder
        x, after = self.ln(self.embed(idx)), []
        for state in states:
            latent = (x @ encoder).unflatten(-1, (self.config.n_head, -1))  # (B, H, N)
            y, state = bdh_attention_step(latent, x[:, None], cos, sin, state)
            y = torch.bmm(self.ln(y).transpose(0, 1), self.encoder_v).transpose(0, 1)
            x = self.ln(x + self.ln(sparse_gate(latent, y).flatten(1) @ self.decoder))
            after.append(state)
        return x @ self.lm_head, after

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        """idx (B, T) with max_new_tokens more, drawn one by one.

        With ops="camox" each token is one step on the layers' states, so that time is linear in the length and memory
        does not grow; with "torch" each runs the model on all before it, as the public code does.
        """
        if idx.shape[1] == 0:
            raise ValueError(f"idx must have at least one token, got shape {tuple(idx.shape)}")
        states, logits, seen = [None] * self.config.n_layer, None, 0
        encoder, was_training = self.encoder_of_all_heads(), self.training
        self.eval()
        for _ in range(max_new_tokens):
            if self.ops == "torch":
                logits = self(idx)[0][:, -1]
            else:
                while seen < idx.shape[1]:
                    logits, states = self.step(idx[:, seen], seen, states, encoder)
                    seen += 1
            scaled = logits.float() / temperature
            if top_k is not None:
                least = scaled.topk(min(top_k, scaled.shape[-1])).values[:, -1:]
                scaled = scaled.masked_fill(scaled < least, -torch.inf)
            idx = torch.cat([idx, torch.multinomial(scaled.softmax(-1), 1)], 1)
        self.train(was_training)
        return idx
