"""CamoXpert's EdgeExpert on edge_maps."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional as F

from ..ops.edge import EdgeMaps, edge_maps
from ..reference.edge import LAPLACIAN, SOBEL_X, SOBEL_Y
from ._branches import branch, check_dim, four_branches, fused_with_residual, why_not_merged, why_residual_apart
from ._kept import has_values
from ._plain import FusedModule

BRANCHES = ("sobel_branch", "laplacian_branch", "gradient_branch", "spatial_branch")
EPS = 1e-8


@functools.cache
def usual_kernels() -> list[torch.Tensor]:
    """What sobel_x_base, sobel_y_base and laplacian_base hold. Not made at import: tune_cpu_allocator must come before
    a process's first tensor."""
    kernels = (SOBEL_X, SOBEL_Y, LAPLACIAN)
    return [torch.tensor(kernel, dtype=torch.float32, device="cpu").view(1, 1, 3, 3) for kernel in kernels]


class EdgeExpert(FusedModule):
    """Edge features of (B, dim, H, W): sobel, laplacian, gradient and x itself each through a 1x1 convolution to dim/4
    channels, LayerNorm2d and GELU; the four together through a 1x1 convolution, LayerNorm2d and GELU; plus x.

    Drop-in replacement for EdgeExpert of mahi-chan/camoXpert (models/experts.py at 47e858c): same constructor,
    parameters and buffers. dim must be a multiple of 4. The four branches are computed together where their layers are
    what the constructor made, else called one by one: see camox_ops.nn.why_not_fused. The maps come from
    camox_ops.edge_maps where the buffers hold its kernels, else from convolutions with the buffers. On the CPU the
    buffers are compared on each call; on CUDA, where that would wait for the device, and under torch.compile when a
    state_dict is loaded and when the module is moved."""

    _usual_kernels = True

    def __init__(self, dim: int):
        super().__init__()
        check_dim("EdgeExpert", dim)
        self.dim = dim
        for name, kernel in (("sobel_x", SOBEL_X), ("sobel_y", SOBEL_Y), ("laplacian", LAPLACIAN)):
            self.register_buffer(f"{name}_base", torch.tensor(kernel, dtype=torch.float32).view(1, 1, 3, 3))
        self.sobel_branch = branch(dim, dim // 4)
        self.laplacian_branch = branch(dim, dim // 4)
        self.gradient_branch = branch(dim, dim // 4)
        self.spatial_branch = branch(dim, dim // 4)
        self.fusion = branch(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, dim, H, W) -> (B, dim, H, W)."""
        maps_of = edge_maps if self._has_usual_kernels() else self._maps_of_buffers
        return fused_with_residual(self.fusion, four_branches(x, maps_of, BRANCHES, self._branches()), x)

    def _branches(self) -> tuple[nn.Module, ...]:
        return self.sobel_branch, self.laplacian_branch, self.gradient_branch, self.spatial_branch

    def _has_usual_kernels(self) -> bool:
        buffers = self._kernels()
        if buffers[0].is_cpu:
            self._compare_kernels(buffers)
        # edge_maps has no gradient with respect to its kernels
        return self._usual_kernels and not any(buffer.requires_grad for buffer in buffers)

    def _kernels(self) -> tuple[torch.Tensor, ...]:
        return self.sobel_x_base, self.sobel_y_base, self.laplacian_base

    def _compare_kernels(self, buffers: tuple[torch.Tensor, ...]) -> None:
        """Sets _usual_kernels by the buffers' values, where they have any."""
        if has_values(*buffers):
            usual = True
            for buffer, kernel in zip(buffers, usual_kernels(), strict=True):
                if not buffer.is_cpu or buffer.dtype != torch.float32:
                    buffer, kernel = buffer.cpu(), kernel.to(buffer.dtype)
                usual = usual and torch.equal(buffer, kernel)
            if usual != self._usual_kernels:
                self._usual_kernels = usual

    def _maps_of_buffers(self, x: torch.Tensor, stacked: bool = False) -> EdgeMaps | torch.Tensor:
        """As edge_maps."""
        gx, gy, laplacian = (
            F.conv2d(x, kernel.to(x.dtype).expand(self.dim, 1, 3, 3), padding=1, groups=self.dim)
            for kernel in self._kernels()
        )
        sobel, laplacian = torch.sqrt(gx**2 + gy**2 + EPS), laplacian.abs()
        maps = EdgeMaps(sobel, laplacian, torch.sqrt(sobel**2 + laplacian**2 + EPS))
        return torch.cat([*maps, x], 1) if stacked else maps

    def _load_from_state_dict(self, *arguments) -> None:
        super()._load_from_state_dict(*arguments)
        self._compare_kernels(self._kernels())

    def _apply(self, *arguments, **options):
        self._compare_kernels(self._kernels())
        return super()._apply(*arguments, **options)

    def why_not_fused(self) -> list[str]:
        kernels = None if self._has_usual_kernels() else "the buffers do not hold the kernels of edge_maps"
        branches = why_not_merged(BRANCHES, self._branches())
        return [r for r in (kernels, branches, why_residual_apart("fusion", self.fusion)) if r is not None]
