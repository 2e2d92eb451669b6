"""The error path: from the norms of the nodes' gradients to the scale of each node's update.

After a backward pass, from the root down, the child whose branch has the largest gradients is followed to a leaf, the
node held responsible. Its gradient is scaled by 0.5 plus its share of the path's norms (at most 1), those above it by
their shares (at most 0.3). All of it stays on the device: nothing here waits for a value.

updates "path" is the method as its README describes it: each node of the path is scaled once, by its own scale, and no
other node is updated at all. "original" is what the public code does. There a node's list of parameters includes those
of its descendants, so that a gradient is scaled again for every node of the path above it, and a scale of 0 is not
applied, so that nodes off the path are trained too, with all of their gradient but for the scales of their ancestors.
In both a branch is its node and all nodes below it, and the norm of several gradients is the sum of their norms.
"""

from typing import NamedTuple

import torch

UPDATES = ("path", "original")
LARGEST_SHARE = 0.3  # of a node above the responsible one
SMALLEST_OF_LEAF = 0.5
WITHOUT_GRADIENT = {"root": 0.05, "between": 0.1, "leaf": 1.0}  # the scales where all norms are 0


class Attribution(NamedTuple):
    """What one step found, as tensors of the device; nodes by number, level by level.

    path (depth,) int64, norms (nodes,) of every branch after clipping, scales (nodes,) of every node's update, with
    those of its ancestors where they apply too, total_norm () before clipping.
    """

    path: torch.Tensor
    norms: torch.Tensor
    scales: torch.Tensor
    total_norm: torch.Tensor


class ErrorPath:
    """Clips the gradients of a tree by their common norm, finds the error path and scales the nodes' gradients.

    Call after backward; the scaled gradients are for PathAdamW.
    """

    def __init__(self, tree, grad_clip=1.0, updates="path"):
        check_updates(updates)
        self.tree, self.grad_clip, self.updates = tree, grad_clip, updates
        shared = tree.shared_parameters()
        self.per_node = len(tree.root.own_parameters())
        self.own = list(range(len(tree.nodes) * self.per_node + len(shared)))  # a group for every tensor
        # and one for every node; the last is of the tensors of no node
        self.nodes = [number // self.per_node for number in range(len(tree.nodes) * self.per_node)]
        self.nodes += [len(tree.nodes)] * len(shared)

    def __call__(self):
        from camox_ops import grad_group_norms, scale_grads_  # so that --ops torch runs where camox_ops is not built

        grads = [*self.tree.own_gradients(), *(parameter.grad for parameter in self.tree.shared_parameters())]
        norms = grad_group_norms(grads, self.own, len(grads))
        total = torch.linalg.vector_norm(norms)
        clip = (self.grad_clip / (total + 1e-6)).clamp(max=1.0)
        nodes = len(self.tree.nodes)
        branches = self.branch_norms(clip * norms[: nodes * self.per_node].view(nodes, -1).sum(1))
        path = self.largest_path(branches)
        scales = self.scales(branches, path)
        scale_grads_(grads, self.nodes, clip * torch.cat([scales, scales.new_ones(1)]))
        return Attribution(path, torch.cat(branches), scales, total)

    def branch_norms(self, norms):
        """Norms (nodes,) -> per level, of each node and all below it."""
        found = list(norms.split([len(level) for level in self.tree.levels]))
        for level in reversed(range(len(found) - 1)):
            found[level] = found[level] + found[level + 1].view(len(found[level]), -1).sum(1)
        return found

    def largest_path(self, branches):
        """Numbers of the nodes from the root to a leaf, the largest child each time, (depth,) int64."""
        place = torch.zeros(1, dtype=torch.int64, device=branches[0].device)  # within the level
        found, first = [place], 0
        for level, children in enumerate(self.tree.branching):
            below = branches[level + 1].view(-1, children).index_select(0, place)
            place = children * place + below.argmax(1)
            first += len(self.tree.levels[level])
            found.append(first + place)
        return torch.cat(found)

    def scales(self, branches, path):
        """The scale of each node's update, (nodes,)."""
        norms = torch.cat(branches)
        along = norms.index_select(0, path)
        total = along.sum()
        share = along / total
        scaled = torch.cat([share[:-1].clamp(max=LARGEST_SHARE), (SMALLEST_OF_LEAF + share[-1:]).clamp(max=1.0)])
        # filled on the device: a tensor made from a list would be copied to it, and the copy waited for
        fixed = torch.full_like(scaled, WITHOUT_GRADIENT["between"])
        fixed[0].fill_(WITHOUT_GRADIENT["root"])
        fixed[-1].fill_(WITHOUT_GRADIENT["leaf"])
        scaled = torch.where(total > 0, scaled, fixed)
        own = torch.zeros_like(norms).index_copy(0, path, scaled)
        if self.updates == "path":
            return own
        applied = torch.where(own > 0, own, 1.0).split([len(level) for level in self.tree.levels])
        found = [applied[0]]
        for level, children in enumerate(self.tree.branching):
            found.append(found[-1].repeat_interleave(children) * applied[level + 1])
        return torch.cat(found)


class PlainErrorPath:
    """The same with numbers on the host, tensor after tensor, as the public code does it: the twin of ErrorPath.

    Off the path, updates "path" sets gradients to None, which any optimizer of PyTorch skips.
    """

    def __init__(self, tree, grad_clip=1.0, updates="path"):
        check_updates(updates)
        self.tree, self.grad_clip, self.updates = tree, grad_clip, updates
        self.branches = [list(node.parameters()) for node in tree.nodes]  # with those of all nodes below

    def __call__(self):
        total = torch.nn.utils.clip_grad_norm_(self.tree.parameters(), self.grad_clip)
        norms = torch.stack([torch.stack([p.grad.norm() for p in own]).sum() for own in self.branches])
        path = [self.tree.root]
        while path[-1].child_nodes:
            children = list(path[-1].child_nodes)
            path.append(children[norms[[child.number for child in children]].argmax().item()])
        along = [norms[node.number].item() for node in path]
        own = dict(zip([node.number for node in path], self.scales(along), strict=True))
        scales = torch.zeros(len(norms))
        if self.updates == "path":
            for node in self.tree.nodes:
                scale = own.get(node.number)
                for parameter in node.own_parameters():
                    parameter.grad = None if scale is None else parameter.grad.mul_(scale)
                scales[node.number] = scale or 0.0
        else:
            scales += 1
            for number, scale in own.items():
                if scale > 0:
                    for parameter in self.branches[number]:
                        parameter.grad.mul_(scale)
                    for node in self.tree.nodes[number].modules():
                        if hasattr(node, "number"):
                            scales[node.number] *= scale
        found = torch.tensor([node.number for node in path])
        return Attribution(found, norms, scales.to(norms.device), total)

    def scales(self, along):
        total = sum(along)
        if not total > 0:
            fixed = [WITHOUT_GRADIENT["root"], *[WITHOUT_GRADIENT["between"]] * max(0, len(along) - 2)]
            return [*fixed[: len(along) - 1], WITHOUT_GRADIENT["leaf"]]
        above = [min(LARGEST_SHARE, norm / total) for norm in along[:-1]]
        return [*above, min(1.0, SMALLEST_OF_LEAF + along[-1] / total)]


def check_updates(updates):
    """ValueError unless updates is one of UPDATES."""
    if updates not in UPDATES:
        raise ValueError(f"updates must be one of {UPDATES}, got {updates!r}")
