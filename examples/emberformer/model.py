"""EmberFormer, built from stock PyTorch or from camox_ops.

Written from the architecture of tampueroc/emberformer (models/emberformer.py at d511660), with its constructor and
names of parameters, so that its checkpoints load. A checkpoint of one op set loads into the other.
"""

import math

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..common.bdh import check_ops
from .decoders import PUBLIC_SEGFORMER, RefinementDecoder, SegFormerDecoder, UNetDecoder

DECODERS = ("unet", "segformer")
SLOTS = ("public", "last")


def sinusoids(length, width, device=None):
    """(length, width): sines in the even columns, cosines in the odd ones."""
    position = torch.arange(length, dtype=torch.float32, device=device)[:, None]
    angles = position * torch.exp(torch.arange(0, width, 2, device=device).float() * (-math.log(10000.0) / width))
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(1)


class PositionalEncoding(nn.Module):
    """Holds the table `pe`; steps beyond it are computed when they are asked for."""

    def __init__(self, d_model, max_len):
        super().__init__()
        self.register_buffer("pe", sinusoids(max_len, d_model))

    def forward(self, length):
        if length <= len(self.pe):
            return self.pe[:length]
        return sinusoids(length, self.pe.shape[1], self.pe.device).to(self.pe)


class TokenEmbedder(nn.Module):
    """A token for every patch and step: fire, terrain, wind and time, each embedded, added up.

    ops "torch" adds four tensors of the tokens' size. "camox" writes the tokens once, as one product for each image of
    the batch:

        [fire of the T steps | terrain | 1]   times   [ each step's fire weights, in that step's columns ]
              (N, T + Cs + 1)                         [ terrain weights, the same for each step          ]
                                                      [ wind + time + biases of each step                ]
                                                                  (T + Cs + 1, T * d_model)
    """

    def __init__(self, d_model, static_channels, use_wind, use_static, max_seq_len, ops):
        super().__init__()
        self.use_wind, self.use_static, self.ops = use_wind, use_static, ops
        self.fire_embed = nn.Linear(1, d_model)
        if use_wind:
            half = d_model // 2
            self.wind_embed = nn.Sequential(nn.Linear(2, half), nn.GELU(), nn.Linear(half, d_model))
        if use_static:
            self.static_embed = nn.Linear(static_channels, d_model)
        self.pos_encoding = PositionalEncoding(d_model, max_seq_len)

    def forward(self, fire, wind, static, order=None):
        """fire (B, N, T), wind (B, T, 2), static (B, N, Cs) -> (B, N, T, d_model).

        order: (B, T), the step that each slot holds; None: they stay where they are.
        """
        return (self.sum if self.ops == "torch" else self.product)(fire, wind, static, order)

    def of_steps(self, wind):
        """What is the same for all patches, (B or 1, T, d_model)."""
        steps = self.pos_encoding(wind.shape[1])[None]
        return steps + self.wind_embed(wind) if self.use_wind else steps

    def sum(self, fire, wind, static, order):
        tokens = self.fire_embed(fire[..., None]) + self.of_steps(wind)[:, None]
        if self.use_static:
            tokens = tokens + self.static_embed(static)[:, :, None]
        if order is None:
            return tokens
        return tokens.gather(2, order[:, None, :, None].expand(-1, tokens.shape[1], -1, tokens.shape[3]))

    def product(self, fire, wind, static, order):
        batch, _, length = fire.shape
        # In float32 under autocast too: the tokens of the public model are float32 there, as the time's sines are.
        with torch.autocast(fire.device.type, enabled=False):
            steps = self.of_steps(wind) + self.fire_embed.bias
            holds = torch.eye(length, dtype=fire.dtype, device=fire.device)[None]
            if order is not None:
                steps = steps.expand(batch, -1, -1).gather(1, order[:, :, None].expand(-1, -1, steps.shape[2]))
                holds = holds[0][order].mT  # (B, step, slot)
            rows = [holds[..., None] * self.fire_embed.weight[:, 0]]
            columns = [fire]
            if self.use_static:
                steps = steps + self.static_embed.bias
                rows.append(self.static_embed.weight.t()[None, :, None].expand(-1, -1, length, -1))
                columns.append(static)
            rows.append(steps[:, None])
            columns.append(fire.new_ones(*fire.shape[:2], 1))
            weights = torch.cat([row.expand(batch, -1, -1, -1) for row in rows], 1)
            return (torch.cat(columns, 2) @ weights.flatten(2)).unflatten(2, weights.shape[2:])


class PlainTemporalEncoder(nn.Module):
    """The public TemporalTransformerEncoder's computation in stock PyTorch: (B, N, T, D), (B, T) -> (B, N, D)."""

    def __init__(self, d_model, nhead, num_layers, dim_feedforward, dropout):
        super().__init__()
        layer = nn.TransformerEncoderLayer(d_model, nhead, dim_feedforward, dropout, "gelu", batch_first=True)
        self.transformer = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)

    def forward(self, tokens, valid_t):
        batch, patches, _, width = tokens.shape
        valid = valid_t.repeat_interleave(patches, 0)
        encoded = self.transformer(tokens.flatten(0, 1), src_key_padding_mask=~valid)
        slot = (valid.sum(1) - 1).clamp(min=0)
        return encoded[torch.arange(len(slot), device=slot.device), slot].view(batch, patches, width)


def temporal_encoder(sizes, ops):
    if ops == "torch":
        return PlainTemporalEncoder(*sizes)
    from camox_ops.nn import TemporalEncoder  # here so that --ops torch runs where camox_ops is not built

    return TemporalEncoder(*sizes)


class EmberFormer(nn.Module):
    """Tokens of patches over time -> a transformer over the steps of each patch -> a decoder over the grid of patches.

    forward gives the logits of patches (B, 1, Gy, Gx), forward_pixels those of pixels (B, 1, Gy * P, Gx * P), P the
    patch_size. Arguments as in the public model, and:

    ops: "camox" or "torch". slot: which step's features a patch has. The public model takes slot `valid_t.sum(1) - 1`,
    which in batches padded on the left is not the last step but another one, a padded one perhaps: "public". "last"
    takes the last valid step.
    """

    def __init__(
        self,
        d_model=64,
        static_channels=10,
        nhead=4,
        num_layers=3,
        dim_feedforward=256,
        dropout=0.1,
        spatial_decoder="segformer",
        spatial_base_channels=32,
        segformer_pretrained=True,
        segformer_model=PUBLIC_SEGFORMER,
        freeze_decoder=False,
        patch_size=16,
        use_wind=True,
        use_static=True,
        max_seq_len=32,
        *,
        ops="camox",
        slot="public",
    ):
        super().__init__()
        check_ops(ops)
        for name, value, choices in (("spatial_decoder", spatial_decoder, DECODERS), ("slot", slot, SLOTS)):
            if value not in choices:
                raise ValueError(f"{name} must be one of {choices}, got {value!r}")
        self.d_model, self.patch_size, self.decoder_type = d_model, patch_size, spatial_decoder
        self.ops, self.slot, self.checkpointed_parts = ops, slot, 0
        self.token_embedder = TokenEmbedder(d_model, static_channels, use_wind, use_static, max_seq_len, ops)
        self.temporal_transformer = temporal_encoder((d_model, nhead, num_layers, dim_feedforward, dropout), ops)
        if spatial_decoder == "unet":
            self.spatial_decoder = UNetDecoder(d_model, spatial_base_channels)
        else:
            self.spatial_decoder = SegFormerDecoder(d_model, segformer_pretrained, segformer_model, freeze_decoder)
        self.refinement_decoder = RefinementDecoder(d_model, patch_size, spatial_base_channels)

    def unfreeze_decoder(self):
        if self.decoder_type == "segformer":
            self.spatial_decoder.unfreeze_backbone()

    def gradient_checkpointing_enable(self, parts=4):
        """Of the temporal part, keep tokens and activations of no more than N / parts patches at a time: the backward
        pass computes them again, part by part. 0 keeps all of them."""
        if parts < 0:
            raise ValueError(f"parts must be >= 0, got {parts}")
        self.checkpointed_parts = parts

    def encode(self, fire, wind, static, valid_t):
        """Features of patches, (B, N, d_model)."""
        order = None
        if self.slot == "last":  # the valid steps first, in their order: the slot of all is then the last of them
            order = (~valid_t).to(torch.uint8).argsort(dim=1, stable=True)
            valid_t = valid_t.gather(1, order)
        return self.temporal_transformer(self.token_embedder(fire, wind, static, order), valid_t)

    def features(self, fire, wind, static, valid_t, grid_shape):
        """(B, d_model, Gy, Gx)."""
        if math.prod(grid_shape) != fire.shape[1]:
            raise ValueError(f"grid_shape {tuple(grid_shape)} does not have the {fire.shape[1]} patches of fire_hist")
        if self.checkpointed_parts and torch.is_grad_enabled():
            parts = zip(fire.chunk(self.checkpointed_parts, 1), static.chunk(self.checkpointed_parts, 1), strict=True)
            encoded = torch.cat(
                [checkpoint(self.encode, part, wind, own, valid_t, use_reentrant=False) for part, own in parts], 1
            )
        else:
            encoded = self.encode(fire, wind, static, valid_t)
        return encoded.transpose(1, 2).unflatten(2, tuple(grid_shape)).contiguous()

    def forward(self, fire_hist, wind_hist, static, valid_t, grid_shape):
        """fire_hist (B, N, T), wind_hist (B, T, 2), static (B, N, Cs), valid_t bool (B, T), grid_shape (Gy, Gx)."""
        return self.spatial_decoder(self.features(fire_hist, wind_hist, static, valid_t, grid_shape))

    def forward_pixels(self, fire_hist, wind_hist, static, valid_t, grid_shape):
        features = self.features(fire_hist, wind_hist, static, valid_t, grid_shape)
        return self.refinement_decoder(features, self.spatial_decoder(features))
