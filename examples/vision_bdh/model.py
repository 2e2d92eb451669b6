"""VisionBDHv2 and VisionBDHv2CLS, built from stock PyTorch or from camox_ops.

Written from the architectures of takzen/vision-bdh (models/vision_bdh_v2.py at 71cb8ab) and jinotter3/vision-bdh
(models/vision_bdh_v2_cls.py at 8ea7ddf), with their constructors and names of parameters, so that their checkpoints
load. A checkpoint of one op set loads into the other.
"""

import torch
from torch import nn

from ..common.bdh import BDHConfig, BDHLayers, PlainAttention

__all__ = ["MODELS", "BDHConfig", "VisionBDHv2", "VisionBDHv2CLS", "without_compile_prefix"]


def attention(config, use_softmax, ops, cached):
    if ops == "torch":
        return PlainAttention(config, use_softmax, cached=cached)
    # imported here so that --ops torch runs where camox_ops is not built
    from camox_ops.nn import BidirectionalBDHAttention

    return BidirectionalBDHAttention(config, use_softmax)


class VisionBDHv2(BDHLayers):
    """Patches, BDH layers, mean over the patches, classifier: images (B, in_channels, S, S) -> logits (B, num_classes).

    ops: "camox" or "torch". cached, with "torch": keep the angles' tables and use PyTorch's fused attention.
    """

    extra_tokens = 0

    def __init__(
        self,
        bdh_config,
        img_size=32,
        patch_size=4,
        num_classes=10,
        in_channels=3,
        use_softmax_attn=False,
        *,
        ops="camox",
        cached=False,
    ):
        super().__init__(bdh_config, attention(bdh_config, use_softmax_attn, ops, cached), ops)
        width = bdh_config.n_embd
        self.patch_size, self.use_softmax_attn = patch_size, use_softmax_attn
        self.num_patches = (img_size // patch_size) ** 2
        self.patch_embed = nn.Conv2d(in_channels, width, patch_size, stride=patch_size)
        self.pos_embed = nn.Parameter(torch.randn(1, self.extra_tokens + self.num_patches, width) * 0.02)
        self.ln_final = nn.LayerNorm(width, elementwise_affine=False, bias=False)
        self.head = nn.Linear(width, num_classes)
        for weight in (self.decoder, self.encoder, self.encoder_v, self.patch_embed.weight, self.head.weight):
            nn.init.xavier_uniform_(weight)
        nn.init.zeros_(self.patch_embed.bias)
        nn.init.zeros_(self.head.bias)

    def forward(self, images):
        x = self.embed(self.patch_embed(images).flatten(2).transpose(1, 2))
        x = self.passes(x, normalise_first=True)
        return self.head(self.ln_final(self.pool(x)))

    def embed(self, patches):
        """Patches (B, P, D) -> tokens (B, T, D)."""
        return patches + self.pos_embed

    def pool(self, x):
        """Tokens (B, T, D) -> what is classified, (B, D)."""
        return x.mean(1)


class VisionBDHv2CLS(VisionBDHv2):
    """VisionBDHv2 with a learned token before the patches, which alone is classified."""

    extra_tokens = 1

    def __init__(
        self,
        bdh_config,
        img_size=32,
        patch_size=4,
        num_classes=10,
        in_channels=3,
        use_softmax_attn=True,
        *,
        ops="camox",
        cached=False,
    ):
        arguments = (bdh_config, img_size, patch_size, num_classes, in_channels, use_softmax_attn)
        super().__init__(*arguments, ops=ops, cached=cached)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, bdh_config.n_embd))

    def embed(self, patches):
        token = self.cls_token.expand(len(patches), -1, -1)
        return super().embed(torch.cat([token, patches], 1))

    def pool(self, x):
        return x[:, 0]


MODELS = {"v2": VisionBDHv2, "cls": VisionBDHv2CLS}


def without_compile_prefix(state):
    """The state_dict of a model that was saved out of torch.compile, as the public training scripts do."""
    return {name.removeprefix("_orig_mod."): value for name, value in state.items()}


@torch.no_grad()
def attention_maps(model, images):
    """The scores of each pass, after the softmax where there is one: a list of (B, n_head, T, T).

    They are the attention's own result for values that are the identity matrix.
    """
    calls = []
    hook = model.attn.register_forward_pre_hook(lambda _, args, named: calls.append((args, named)), with_kwargs=True)
    was_training = model.training
    model.eval()(images)
    model.train(was_training)
    hook.remove()
    maps = []
    for args, named in calls:
        query = named["Q"] if "Q" in named else args[0]
        unit = torch.eye(query.shape[2], dtype=query.dtype, device=query.device).expand(len(query), 1, -1, -1)
        rest = {name: value for name, value in named.items() if name not in ("Q", "K", "V")}
        maps.append(model.attn(Q=query, K=query, V=unit, **rest))
    return maps
