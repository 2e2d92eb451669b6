"""HierarchicalTree: a tree of transformer blocks over words, from stock PyTorch and from camox_ops.

Written from the architecture of PlanetDestroyyer/self-learning-k-1 (k1_system/core/tree.py and tree_node.py), with its
constructor and names of parameters, so that its checkpoints load. A checkpoint of one op set loads into the other.
"""

from contextlib import contextmanager
from itertools import accumulate, chain

import torch
from torch import nn

from ..common.bdh import check_ops
from .heads import causal_attention, head_loss


class TreeNode(nn.Module):
    """One node: causal self-attention and a feed-forward block, each added to its input and normalised after that.

    Called on its own it computes as the public code does. number: place in the tree, level by level; node_id: the path
    from the root as digits, 0 for the root, as in the public code.
    """

    def __init__(self, embed_dim, ff_dim, num_heads=4, dropout=0.1):
        super().__init__()
        self.attn = nn.MultiheadAttention(embed_dim, num_heads, dropout=dropout, batch_first=True)
        self.attn_norm = nn.LayerNorm(embed_dim)
        self.ff = nn.Sequential(
            nn.Linear(embed_dim, ff_dim),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(ff_dim, embed_dim),
            nn.Dropout(dropout),
        )
        self.ff_norm = nn.LayerNorm(embed_dim)
        self.child_nodes = nn.ModuleList()
        self.node_id, self.level, self.number = 0, 0, 0

    @property
    def is_leaf(self):
        return len(self.child_nodes) == 0

    def own_parameters(self):
        """The node's parameters without those of its children, in the order of a row of the tree's buffer."""
        attn, first, second = self.attn, self.ff[0], self.ff[3]
        return [
            *(attn.in_proj_weight, attn.in_proj_bias, attn.out_proj.weight, attn.out_proj.bias),
            *(self.attn_norm.weight, self.attn_norm.bias),
            *(first.weight, first.bias, second.weight, second.bias),
            *(self.ff_norm.weight, self.ff_norm.bias),
        ]

    def forward(self, x, mask=None):
        attended, _ = self.attn(x, x, x, attn_mask=mask, is_causal=True)
        x = self.attn_norm(x + attended)
        return self.ff_norm(x + self.ff(x))


class HierarchicalTree(nn.Module):
    """Words (B, T) -> logits (B, T, vocab_size). Every node of a level reads the mean of the level above it.

    ops "torch" runs node after node, as the public code does; "camox" runs all nodes of a level as one batch.

    The nodes' parameters lie in one buffer (nodes, P), level by level, a node per row, so that the weights of a level
    are views of it, not copies. Whatever moves the parameters elsewhere (.to(), deepcopy) is noticed in the next
    forward, which puts them together again.
    """

    def __init__(
        self,
        vocab_size,
        embed_dim=128,
        ff_dim=256,
        num_heads=4,
        tree_depth=4,
        branching_factor=None,
        max_seq_len=64,
        dropout=0.1,
        *,
        ops="camox",
    ):
        super().__init__()
        check_ops(ops)
        self.ops, self.dropout, self.num_heads, self.max_seq_len = ops, dropout, num_heads, max_seq_len
        self.branching = children_per_level(tree_depth, branching_factor)
        # In the order of the public code, so that a seed gives the same weights.
        self.embedding = nn.Embedding(vocab_size, embed_dim)
        self.pos_encoding = nn.Parameter(torch.randn(max_seq_len, embed_dim) * 0.02)
        self.root = self._grow((embed_dim, ff_dim, num_heads, dropout), level=0, node_id=0)
        self.output_norm = nn.LayerNorm(embed_dim)
        self.output_proj = nn.Linear(embed_dim, vocab_size)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        self.levels = [[self.root]]
        for _ in self.branching:
            self.levels.append([child for node in self.levels[-1] for child in node.child_nodes])
        self.nodes = [node for level in self.levels for node in level]
        for number, node in enumerate(self.nodes):
            node.number = number
        self.kept_own, self.kept_buffer, self.kept_leaves = None, None, None

    def _grow(self, sizes, level, node_id):
        node = TreeNode(*sizes)
        node.level, node.node_id = level, node_id
        for child in range(self.branching[level] if level < len(self.branching) else 0):
            node.child_nodes.append(self._grow(sizes, level + 1, 10 * node_id + child + 1))
        return node

    def shared_parameters(self):
        """Those of no node: embeddings, the last norm, the head."""
        return [
            self.embedding.weight,
            self.pos_encoding,
            *self.output_norm.parameters(),
            *self.output_proj.parameters(),
        ]

    # ---- the nodes' parameters in one buffer ----

    def own_parameters(self):
        """A list of parameters for every node, found again where load_state_dict(assign=True) has replaced them."""
        if self.kept_own is None or self.kept_own[0][0] is not self.root.attn.in_proj_weight:
            self.kept_own = [node.own_parameters() for node in self.nodes]
        return self.kept_own

    def buffer(self):
        """(nodes, P): every node's parameters as a row, of which the parameters themselves are views."""
        parameters = self.own_parameters()
        if self.kept_buffer is None or not lie_in(self.kept_buffer, parameters):
            self.kept_buffer = rows_of([[p.data for p in own] for own in parameters])
            for own, row in zip(parameters, self.kept_buffer, strict=True):
                for parameter, place in zip(own, split_row(row, own), strict=True):
                    parameter.data = place
        return self.kept_buffer

    @contextmanager
    def gradients_in_rows(self):
        """Within, a backward leaves the gradients of a level as one tensor for gradient_rows and own_gradients, and the
        nodes' parameters without .grad: autograd hands on a tensor a level, not one for each of hundreds of parameters.
        """
        self.kept_leaves = [None] * len(self.levels)
        try:
            yield
        finally:
            self.kept_leaves = None

    def gradient_rows(self):
        """Within gradients_in_rows: the nodes' gradients per level, (nodes of the level, P) each."""
        return [leaf.grad for leaf in self.kept_leaves]

    def own_gradients(self):
        """The gradient of each parameter of the nodes, node by node."""
        own = self.own_parameters()
        if self.kept_leaves is None:
            return [parameter.grad for parameter in chain.from_iterable(own)]
        return [grad for leaf in self.kept_leaves for grad in by_node(leaf.grad, own[0])]

    # ---- forward ----

    def forward(self, x):
        return self.output_proj(self.features(x))

    def loss(self, x, targets, left_out=None):
        """Cross-entropy of the targets (B, T), mean over all of them; left_out as for features."""
        features = self.features(x, left_out).flatten(0, 1)
        return head_loss(self.ops, features, self.output_proj, targets.flatten())

    def features(self, x, left_out=None):
        """(B, T, embed_dim): what the head reads. left_out: a node whose level takes the mean of its others only."""
        length = x.shape[1]
        if length > self.max_seq_len:
            raise ValueError(f"x must have at most {self.max_seq_len} words per text, got shape {tuple(x.shape)}")
        h = self.embedding(x) + self.pos_encoding[:length]
        run = self.run_level if self.ops == "camox" else self.run_node_by_node
        if self.ops == "camox":
            self.buffer()
        for level in self.levels:
            shares = None
            if left_out is not None and left_out in level and len(level) > 1:
                shares = [0.0 if node is left_out else 1 / (len(level) - 1) for node in level]
            h = run(level, h, shares)
        return self.output_norm(h)

    def run_node_by_node(self, level, h, shares=None):
        mask = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool, device=h.device).triu(1)
        if shares is None:
            total = level[0](h, mask)
            for node in level[1:]:
                total = total + node(h, mask)
            return total / len(level)
        return sum(share * node(h, mask) for node, share in zip(level, shares, strict=True) if share)

    def run_level(self, level, h, shares=None):
        """All nodes of a level as one batch: h (B, T, D) -> (B, T, D).

        Rows are words, R = B*T. A node's columns are next to each other: (R, nodes, D) is also (R, nodes*D), so that
        biases, GELU and norms take all nodes in one pass, and products read and write the columns of each node.
        """
        # imported here so that --ops torch runs where camox_ops is not built
        from camox_ops import bias_gelu, dropout
        from camox_ops.nn.projections import project, project_heads

        node, count = level[0], len(level)
        batch, length, width = h.shape
        rows = h.reshape(-1, width)
        (in_weight, in_bias, out_weight, out_bias, norm1, shift1, weight1, bias1, weight2, bias2, norm2, shift2) = (
            self.stacked(level)
        )
        # queries of all nodes, then keys, then values: heads of all nodes are the heads of one attention
        by_role = in_weight.view(count, 3, width, width).transpose(0, 1).reshape(-1, width)
        qkv = project(rows, by_role.t(), in_bias.view(count, 3, width).transpose(0, 1).flatten())
        qkv = qkv.view(batch, length, 3, count * self.num_heads, width // self.num_heads)
        attended = causal_attention(qkv, self.dropout, self.training).reshape(-1, count, width)
        x = project_heads(attended, out_weight.mT, out_bias) + rows[:, None]
        x = norm_per_node(x, norm1, shift1, node.attn_norm.eps)
        hidden = project_heads(x, weight1.mT).flatten(1)
        hidden = bias_gelu(hidden, bias1.flatten(), p=self.dropout, training=self.training)
        added = project_heads(hidden.view(len(rows), count, -1), weight2.mT, bias2)
        x = x + dropout(added, self.dropout, training=self.training)
        x = norm_per_node(x, norm2, shift2, node.ff_norm.eps)
        x = x.mean(1) if shares is None else (x * x.new_tensor(shares)[:, None]).sum(1)
        return x.view(batch, length, width)

    def stacked(self, level):
        """The parameters of a level's nodes, each kind as one tensor (nodes, ...): views of the buffer."""
        first, last = level[0].number, level[-1].number + 1
        own = self.own_parameters()[first:last]
        if self.kept_leaves is None:
            return _Stacked.apply(self, level, *chain.from_iterable(own))
        leaf = self.kept_leaves[level[0].level] = self.kept_buffer[first:last].detach().requires_grad_()
        return split_row(leaf, own[0])


def children_per_level(tree_depth, branching_factor):
    """How many children a node of each level but the last has, from the public constructor's arguments."""
    if branching_factor is None:
        branching_factor = [4, 3, 2]
    elif isinstance(branching_factor, int):
        branching_factor = [branching_factor]
    branching = list(branching_factor)
    if tree_depth < 1 or any(number < 1 for number in branching) or (tree_depth > 1 and not branching):
        raise ValueError(f"tree_depth and branching_factor must be >= 1, got {tree_depth} and {branching_factor}")
    return (branching + branching[-1:] * tree_depth)[: tree_depth - 1]


def norm_per_node(x, weight, bias, eps):
    """LayerNorm of x (R, nodes, D) over D with every node's own weight and bias (nodes, D).

    It is the norm of an image's channels in groups: a pixel per row, nodes*D channels, the last in memory.
    """
    from camox_ops import layer_norm2d

    rows, nodes, width = x.shape
    image = x.reshape(1, rows, 1, nodes * width).permute(0, 3, 1, 2)
    y = layer_norm2d(image, weight.flatten(), bias.flatten(), eps=eps, groups=nodes)
    return y.permute(0, 2, 3, 1).reshape(rows, nodes, width)


# ---- rows of parameters ----


def split_row(row, like):
    """Views of a row, or of rows (n, P), in the shapes of the tensors `like`."""
    parts = row.split([tensor.numel() for tensor in like], -1)
    return [part.view(*row.shape[:-1], *tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def rows_of(tensors):
    """A copy of lists of tensors, a row for each list."""
    return torch.stack([torch.cat([tensor.flatten() for tensor in own]) for own in tensors])


def lie_in(rows, tensors):
    """Whether lists of tensors, of the same sizes in each, are one after the other the contiguous rows."""
    size = rows.element_size()
    *within, row = accumulate((tensor.numel() * size for tensor in tensors[0]), initial=0)
    # list by list, not in one loop: for hundreds of tensors in every step
    tensors, first = list(chain.from_iterable(tensors)), rows.data_ptr()
    if not all(map(torch.Tensor.is_contiguous, tensors)) or {tensor.dtype for tensor in tensors} != {rows.dtype}:
        return False
    places = [start + place for start in range(first, first + len(rows) * row, row) for place in within]
    return row == rows.shape[1] * size and list(map(torch.Tensor.data_ptr, tensors)) == places


def by_node(rows, like):
    """The tensors of split_row for each of the rows (n, P), row after row."""
    by_kind = [part.unbind(0) for part in split_row(rows, like)]
    return chain.from_iterable(zip(*by_kind, strict=True))


class _Stacked(torch.autograd.Function):
    """The parameters of a level's nodes, each kind as one tensor (nodes, ...): views of the tree's buffer.

    Where gradients are not taken in rows: every parameter gets its own, a view of rows like those of the buffer.
    """

    @staticmethod
    def forward(ctx, tree, level, *parameters):
        first = level[0].number
        ctx.kinds = kinds = parameters[: len(parameters) // len(level)]
        return tuple(split_row(tree.kept_buffer[first : first + len(level)], kinds))

    @staticmethod
    def backward(ctx, *grads):
        return None, None, *by_node(torch.cat([grad.flatten(1) for grad in grads], 1), ctx.kinds)
