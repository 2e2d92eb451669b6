"""cx.nn.TemporalEncoder, whole module in training, beside nn.TransformerEncoder with EmberFormer's way around it.

The eager side is a plain form of TemporalTransformerEncoder of tampueroc/emberformer (models/emberformer.py at
80135a5), with the widths of its configs/emberformer.yaml. With dropout 0.1 results are random: shape, scale and that
gradients are there are checked; with dropout 0 (group TemporalEncoder_exact) both sides must give the same numbers.
"""

import torch
from torch import nn

from benchmarks.common import Case, camox_attr, random_tensor

SHAPE, BATCH_OF_16 = (4, 400, 6, 96), (16, 400, 6, 96)
HEADS, LAYERS, WIDTH = 8, 4, 384


class Stock(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        layer = nn.TransformerEncoderLayer(SHAPE[3], HEADS, WIDTH, dropout, "gelu", batch_first=True)
        self.transformer = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)

    def forward(self, tokens, valid_t):
        batch, patches, _, width = tokens.shape
        valid = valid_t.repeat_interleave(patches, 0)
        encoded = self.transformer(tokens.flatten(0, 1), src_key_padding_mask=~valid)
        last = (valid.sum(1) - 1).clamp(min=0)
        return encoded[torch.arange(batch * patches), last].view(batch, patches, width)


def wrong(numbers, inputs) -> str | None:
    """The last step of every layer is a norm with weight 1 and bias 0."""
    y = numbers["output0"]
    if y.shape != (*inputs[0].shape[:2], SHAPE[3]) or not torch.allclose(y.mean(-1), torch.zeros(()), atol=1e-4):
        return "rows do not have mean 0"
    if not torch.allclose(y.square().mean(-1), torch.ones(()), atol=1e-3):
        return "rows do not have variance 1"
    missing = [name for name, value in numbers.items() if not value.isfinite().all() or not value.any()]
    return f"{missing} are not finite or all 0" if missing else None


def encoder_case(group, dropout, shape=SHAPE) -> Case:
    def candidates():
        torch.manual_seed(0)
        stock, ours = Stock(dropout), camox_attr("nn.TemporalEncoder")(SHAPE[3], HEADS, LAYERS, WIDTH, dropout)
        ours.load_state_dict(stock.state_dict())
        # Compiling takes a minute, and is timed at the smaller batch.
        return {"camox": ours, "eager": stock, **({"compile": None} if shape == BATCH_OF_16 else {})}

    def inputs():
        valid = torch.ones(shape[0], shape[2], dtype=torch.bool)
        valid[1, :2] = False
        return random_tensor(shape, seed=1), valid

    return Case(
        group=group,
        shape=shape,
        make_inputs=inputs,
        candidates=candidates,
        direction="forward_backward",
        verify=wrong if dropout else None,
        default_allocator=shape == SHAPE,
        quick=dropout > 0 and shape == SHAPE,
    )


def cases() -> list[Case]:
    return [
        encoder_case("TemporalEncoder", 0.1),
        encoder_case("TemporalEncoder", 0.1, BATCH_OF_16),
        encoder_case("TemporalEncoder_exact", 0.0),
    ]
