"""What the tree and the baseline share: causal attention over short texts, and the head's loss."""

from torch.nn import functional as F

LONGEST = 64  # words that cx.short_attention takes


def causal_attention(qkv, p, training):
    """Causal attention of queries, keys and values (B, T, 3, heads, size) with dropout p of its weights, by camox_ops
    where T is at most 64."""
    from camox_ops.ops.short_attention import short_attention_packed

    if qkv.shape[1] <= LONGEST:
        return short_attention_packed(qkv, causal=True, p=p, training=training)
    q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p if training else 0.0)
    return out.transpose(1, 2)


def head_loss(ops, features, head, targets):
    """Mean cross-entropy of a linear head on features (rows, D); with ops "camox" its logits exist in blocks only."""
    if ops == "torch":
        return F.cross_entropy(head(features).float(), targets)
    from camox_ops import linear_cross_entropy

    return linear_cross_entropy(features, head.weight, targets, bias=head.bias)
