"""PathAdamW: AdamW for the nodes of the error path alone, without waiting for the device to know which they are."""

import torch

from ..common.optimizer import capturable

BETAS, EPS = (0.9, 0.999), 1e-8


def plain_adamw(parameters, lr, weight_decay):
    """PyTorch's AdamW, which on a GPU can be part of a CUDA graph."""
    return capturable(torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay, fused=True))


class PathAdamW:
    """AdamW of a tree's shared parameters and of the nodes on a path; other nodes keep weights and moments as they are.

    The same numbers as torch.optim.AdamW where the gradients off the path are None: no decay, no momentum, no step
    counted for them. The path is a tensor, so that the rows of its nodes are gathered, updated and put back on the
    device: of the default tree 4 rows of 41.
    """

    def __init__(self, tree, lr=1e-3, weight_decay=0.01):
        self.tree, self.weight_decay = tree, weight_decay
        self.shared = plain_adamw(tree.shared_parameters(), lr, weight_decay)
        buffer = tree.buffer()
        self.mean, self.square = torch.zeros_like(buffer), torch.zeros_like(buffer)
        self.steps = buffer.new_zeros(len(buffer), 1)

    @property
    def param_groups(self):
        return self.shared.param_groups  # another list once a checkpoint was loaded

    @torch.no_grad()
    def step(self, path):
        """path (depth,) int64: a node of each level, as Attribution has it. Within the tree's gradients_in_rows."""
        self.shared.step()
        rate, decay = self.param_groups[0]["lr"], self.weight_decay
        buffer, sizes = self.tree.buffer(), [len(level) for level in self.tree.levels]
        firsts = [sum(sizes[:level]) for level in range(len(sizes))]
        grad = torch.cat(
            [
                rows.index_select(0, path[level : level + 1] - firsts[level])
                for level, rows in enumerate(self.tree.gradient_rows())
            ]
        )
        weight, mean, square, steps = (
            rows.index_select(0, path) for rows in (buffer, self.mean, self.square, self.steps)
        )
        steps += 1
        mean.lerp_(grad, 1 - BETAS[0])
        square.mul_(BETAS[1]).addcmul_(grad, grad, value=1 - BETAS[1])
        spread = (square / (1 - BETAS[1] ** steps)).sqrt_().add_(EPS)
        weight.mul_(1 - rate * decay).sub_(mean / (1 - BETAS[0] ** steps) / spread * rate)
        for rows, new in ((buffer, weight), (self.mean, mean), (self.square, square), (self.steps, steps)):
            rows.index_copy_(0, path, new)

    def zero_grad(self):
        """Of the shared parameters: the nodes' gradients end with the tree's gradients_in_rows."""
        self.shared.zero_grad()

    def state_dict(self):
        return {"shared": self.shared.state_dict(), "mean": self.mean, "square": self.square, "steps": self.steps}

    def load_state_dict(self, state):
        self.shared.load_state_dict(state["shared"])
        for name in ("mean", "square", "steps"):
            getattr(self, name).copy_(state[name])
