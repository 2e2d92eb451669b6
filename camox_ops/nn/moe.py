"""CamoXpert's sparse mixture of experts, one call per expert instead of one per image and choice."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from .._torch_private import is_wrapped
from ..ops import _check
from ..ops._codes import AUX_LOSSES, SCORES
from ..ops.moe import (
    Routing,
    check_capacity_factor,
    moe_aux_loss,
    moe_combine,
    moe_dispatch,
    moe_route,
)
from .bands import FrequencyExpert
from .edge import EdgeExpert
from .experts import AttentionExpert, ContrastExpert, HybridExpert, SemanticContextExpert, TextureExpert

NAME = "MoELayer"
SYNCS = ("counts", "none")
EXPERTS = (
    TextureExpert,
    AttentionExpert,
    HybridExpert,
    FrequencyExpert,
    EdgeExpert,
    SemanticContextExpert,
    ContrastExpert,
)

_warned = False


def _warn_of_usage_mse() -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            "MoELayer's default aux_loss='usage_mse' is made of counts and has no gradient: it reports how unevenly "
            "the experts are used and does not balance them. aux_loss='switch' does; aux_loss='usage_mse' says that "
            "this one is meant.",
            stacklevel=3,
        )


class MoELayer(nn.Module):
    """Each image of x (B, in_channels, H, W) goes through the top_k experts that its gate chooses, weighted by the
    softmax of their logits.

    Drop-in replacement for MoELayer of mahi-chan/camoXpert (models/experts.py at 47e858c): same constructor,
    parameters, results. The gate is a global mean and a 1x1 convolution. That module calls an expert for every choice
    of every image and waits for the device before each; this one sorts the images by expert (moe_route, moe_dispatch),
    calls each expert that was chosen once, on its images together, and adds up with moe_combine. An image's result is
    what it is alone, so long as no expert mixes the images of a batch (BatchNorm in training does: its statistics are
    then those of the images that chose the expert together) and none draws random numbers (dropout draws for the
    group). Experts that no image chose are not run: their parameters keep grad=None.

    Differences: a top_k above num_experts is refused, not lowered; among equal logits the lower expert is chosen; NaN
    in the gate's logits is an error (see moe_route).

    Args:
        in_channels: C.
        num_experts: E; without `experts`, CamoXpert's seven classes in turn: Texture, Attention, Hybrid, Frequency,
            Edge, SemanticContext, Contrast; in_channels must then be a multiple of 8.
        top_k: experts per image, 1 to E.
        experts: num_experts modules to use instead, as unlike as one likes: each maps (n, C, H, W) to that shape and
            x's dtype (under autocast, float32 or the autocast dtype will do).
        aux_loss: the second result. "usage_mse", the default and the users', is 0.01 times the mean squared distance of
            the experts' shares from 1/E: made of counts, it has NO GRADIENT and balances nothing, and who leaves the
            default is warned once. "switch", "importance_cv2" and "z" (camox_ops.moe_aux_loss) have one.
        score: how weights come from logits, as for camox_ops.moe_route.
        capacity_factor: an expert takes at most ceil(capacity_factor * B * top_k / E) images; later ones lose that
            expert's share. None: no limit.
        sync: "counts": the host reads how many images each expert has, once per call; on CUDA the copy runs beside
            the gate's and dispatch's work and is waited for just before the first expert. "none": nothing is read and
            no shape depends on data, so a CUDA graph can capture it; every expert runs on its whole capacity (all B
            images without capacity_factor), filled up with images of zeros that are not used, and gets zero
            gradients where no image chose it.
        streams: on CUDA, run the experts on streams of their own. Off by default: not yet measured on a GPU."""

    def __init__(
        self,
        in_channels: int,
        num_experts: int = 5,
        top_k: int = 2,
        *,
        experts: Iterable[nn.Module] | None = None,
        aux_loss: str | None = None,
        score: str = "topk_softmax",
        capacity_factor: float | None = None,
        sync: str = "counts",
        streams: bool = False,
    ):
        super().__init__()
        for name, value in (("in_channels", in_channels), ("num_experts", num_experts), ("top_k", top_k)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{NAME}: {name} must be an int, got {value!r}")
            if value < 1:
                raise ValueError(f"{NAME}: {name} must be >= 1, got {value}")
        if top_k > num_experts:
            raise ValueError(f"{NAME}: top_k must be at most num_experts={num_experts}, got {top_k}")
        if aux_loss is not None:
            _check.choice(NAME, "aux_loss", aux_loss, AUX_LOSSES)
        _check.choice(NAME, "score", score, SCORES)
        if capacity_factor is not None:
            check_capacity_factor(NAME, capacity_factor)
        _check.choice(NAME, "sync", sync, SYNCS)
        _check.flag(NAME, "streams", streams)
        self.in_channels = in_channels
        self.num_experts = num_experts
        self.top_k = top_k
        self.score = score
        self.capacity_factor = capacity_factor
        self.sync = sync
        self.streams = streams
        if experts is None:
            experts = (EXPERTS[i % len(EXPERTS)](in_channels) for i in range(num_experts))
        self.experts = nn.ModuleList(experts)
        if len(self.experts) != num_experts:
            raise ValueError(f"{NAME}: experts must be num_experts={num_experts} modules, got {len(self.experts)}")
        self.expert_names = [type(expert).__name__ for expert in self.experts]
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(in_channels, num_experts, 1))
        if aux_loss is None:
            _warn_of_usage_mse()
        self.aux_loss = aux_loss or "usage_mse"
        self.exchange = None  # set by expert_parallel

    def extra_repr(self) -> str:
        return (
            f"top_k={self.top_k}, aux_loss={self.aux_loss!r}, score={self.score!r}, "
            f"capacity_factor={self.capacity_factor}, sync={self.sync!r}, streams={self.streams}"
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """x (B, in_channels, H, W) -> (output like x, aux_loss (), routing_info).

        routing_info: `top_k_indices` (B, top_k) int64, best first; `top_k_weights` (B, top_k), 0 where an expert was
        full; `expert_usage` (E,) float32, images that each expert took. All are detached and on x's device."""
        if self.exchange is not None:
            return self.exchange.run_images(self, x)
        logits = self.logits_of(x)
        routing = moe_route(logits, self.top_k, score=self.score, capacity_factor=self.capacity_factor)
        padded = self.sync == "none"
        sizes = None if padded else _HostCounts(routing.counts)
        groups = moe_dispatch(x, routing, padded=padded)
        aux_loss = self._aux_loss(routing, logits)
        # The groups are copies, on which an expert may work in place; autograd would forbid that on views of one split.
        if padded:
            parts = [part[0] for part in torch.unsafe_split(groups, 1)]
            results = self.run_parts(parts, x.dtype)
            mixed = torch.stack(results) if results else groups
        else:
            *parts, unused = torch.unsafe_split_with_sizes(groups, sizes.read(groups.shape[0]))
            results = self.run_parts(parts, x.dtype)
            mixed = torch.cat([*results, unused] if len(unused) or not results else results)
        output = moe_combine(mixed, routing, padded=padded).to(x.dtype)
        return output, aux_loss, self.info(routing, logits)

    def logits_of(self, x: torch.Tensor) -> torch.Tensor:
        _check.image(NAME, "x", x)
        if x.shape[1] != self.in_channels:
            raise ValueError(f"{NAME}: x must have in_channels={self.in_channels} channels, got {tuple(x.shape)}")
        return self.gate(x).flatten(1)

    def info(self, routing: Routing, logits: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            "top_k_indices": routing.experts,
            "top_k_weights": routing.weights.detach().to(_softmax_dtype(logits)),
            "expert_usage": routing.counts.float(),
        }

    def _aux_loss(self, routing: Routing, logits: torch.Tensor) -> torch.Tensor:
        return self.reported(moe_aux_loss(routing, logits, self.aux_loss))

    def reported(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss as forward returns it: CamoXpert's is float32, of float64 images too."""
        return loss.float() if self.aux_loss == "usage_mse" else loss

    def run_parts(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        """Each expert on its images; those without any are left out."""
        busy = [number for number, part in enumerate(parts) if part.shape[0]]  # len() is an int
        if not (self.streams and parts[0].is_cuda and len(busy) > 1):
            return [self._checked(number, self.experts[number](parts[number]), parts[number], dtype) for number in busy]
        current = torch.cuda.current_stream(parts[0].device)
        results, used = [], []
        for number in busy:
            stream = torch.cuda.Stream(parts[0].device)
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                parts[number].record_stream(stream)
                result = self._checked(number, self.experts[number](parts[number]), parts[number], dtype)
            result.record_stream(current)
            results.append(result)
            used.append(stream)
        for stream in used:
            current.wait_stream(stream)
        return results

    def _checked(self, number: int, result, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        name = f"{NAME}: expert {number} ({self.expert_names[number]})"
        if not isinstance(result, torch.Tensor):
            raise TypeError(f"{name} must return a torch.Tensor, got {type(result).__name__}")
        if result.shape != part.shape:
            raise ValueError(f"{name} must keep the shape of its input, {tuple(part.shape)}, got {tuple(result.shape)}")
        allowed = [dtype]
        device = part.device.type
        if device != "meta" and torch.is_autocast_enabled(device):  # meta has no autocast
            allowed += [torch.get_autocast_dtype(device), torch.float32]
        if result.dtype not in allowed:
            expected = _check.dtype_names(*allowed)
            raise TypeError(f"{name} must return dtype {expected}, got {_check.dtype_names(result.dtype)}")
        return result


class _HostCounts:
    """Counts on their way to the host: copied to pinned memory beside the work that the device is given meanwhile."""

    def __init__(self, counts: torch.Tensor):
        self.counts, self.copied = counts, None
        if counts.is_cuda:
            self.counts = torch.empty(counts.shape, dtype=counts.dtype, device="cpu", pin_memory=True)
            self.counts.copy_(counts, non_blocking=True)
            self.copied = torch.cuda.Event()
            self.copied.record(torch.cuda.current_stream(counts.device))

    def read(self, total: int) -> list[int]:
        """The counts, and what is left to `total`, as numbers; the one moment in which the host waits."""
        if self.copied is not None:
            self.copied.synchronize()
        if torch.compiler.is_compiling():
            sizes = self.counts.tolist()
        else:
            try:
                sizes = self.counts.tolist()
            except RuntimeError as error:
                if not self.counts.is_meta and not is_wrapped(self.counts):
                    raise
                where = "on the meta device" if self.counts.is_meta else "under vmap"
                raise ValueError(f"{NAME}: sync must be 'none' {where}, got 'counts', which reads counts") from error
        return [*sizes, total - sum(sizes)]


def _softmax_dtype(logits: torch.Tensor) -> torch.dtype:
    """What torch.softmax(logits) returns here: CUDA's autocast computes it in float32."""
    autocast = logits.is_cuda and torch.is_autocast_enabled("cuda")
    return torch.float32 if autocast else logits.dtype
