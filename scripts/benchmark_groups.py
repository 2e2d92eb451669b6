"""What every group of benchmark cases is called on the pages, what it is compared with, and which remarks it needs."""

import runpy
from pathlib import Path
from typing import NamedTuple

IMAGE_OPS = runpy.run_path(str(Path(__file__).resolve().parent.parent / "camox_ops" / "_ops.py"))["IMAGE_OPS"]


class Remark(NamedTuple):
    """text: under a table. short: under the chart."""

    text: str
    short: str


REMARKS = {
    "pool": Remark(
        "PyTorch's CPU kernel of `avg_pool2d` adds up every window again in scalar code: much of this ratio is that "
        "kernel being slow, not fusion.",
        "much of it is PyTorch's avg_pool2d being slow on the CPU",
    ),
    "mask": Remark(
        "PyTorch's CPU dropout spends most of its time drawing random numbers (`bernoulli_`): much of this ratio is "
        "that generator being slow, not fusion.",
        "much of it is PyTorch's dropout drawing random numbers slowly on the CPU",
    ),
    "regrouped": Remark(
        "The same function computed in another order: one call per expert, where the other side makes one call per "
        "image and choice.",
        "one call per expert instead of one per image and choice",
    ),
    "algorithm": Remark(
        "Another algorithm with other results (linear attention instead of softmax attention), not a faster way to the "
        "same numbers.",
        "another algorithm with other results",
    ),
    "state": Remark(
        "At 1024 tokens `bdh_attention` uses the state form, whose cost grows with T, where the other side uses the "
        "quadratic formula: the same numbers by another algorithm.",
        "another algorithm for the same numbers",
    ),
    "forms": Remark(
        "The alternatives are this library's own two forms, one of which `bdh_attention` picks by their cost.",
        "the library's own two forms",
    ),
    "products": Remark(
        "Nearly all of this time is matrix products, in which PyTorch's own kernels take AVX2 on AMD's processors. The "
        "fastest alternative is the same loop with `tune_cpu`, whose products are the same.",
        "most of it is PyTorch's matrix products being slow on AMD's processors",
    ),
    "step": Remark(
        "A whole training step of an example, optimizer included, most of it matrix products and convolutions.",
        "a whole training step",
    ),
}


class Group(NamedTuple):
    """label: as users call it. page: under docs/, without .md. compared_with: the eager side. remarks: of REMARKS.
    used: False for what is measured to show why PyTorch's own kernel is left in place; no user meets its time."""

    label: str
    page: str
    compared_with: str
    remarks: tuple[str, ...] = ()
    used: bool = True


GROUPS = {
    "edge_maps": Group("`edge_maps`", "edge", "3 grouped 3x3 convolutions, 11 elementwise ops"),
    "edge_maps_stacked": Group("`edge_maps(stacked=True)`", "edge", "the same and `torch.cat`"),
    "spatial_gradient": Group("`spatial_gradient`", "spatial_gradient", "2 grouped 3x3 convolutions"),
    **{name: Group(f"`{name}`", name, "its formula in tensor ops") for name in IMAGE_OPS},
    "frequency_bands": Group("`frequency_bands`", "bands", "3 `avg_pool2d`, 2 subtractions", ("pool",)),
    "layer_norm2d_gelu": Group(
        "`layer_norm2d` with GELU", "norm2d", "LayerNorm over the channels of NCHW in tensor ops, `F.gelu`"
    ),
    "dropout": Group("`dropout`", "dropout", "`F.dropout`", ("mask",)),
    "sparse_gate": Group("`sparse_gate`", "dropout", "`F.dropout(F.relu(x) * F.relu(y))`", ("mask",)),
    "dropout_add_layer_norm": Group(
        "`dropout_add_layer_norm`", "dropout", "`F.layer_norm(residual + F.dropout(x))`", ("mask",)
    ),
    "bias_gelu": Group("`bias_gelu`", "bias_gelu", "`F.gelu(x + bias)`"),
    "bias_gelu_dropout": Group("`bias_gelu` with dropout", "bias_gelu", "`F.dropout(F.gelu(x + bias))`", ("mask",)),
    "box_mean_3": Group("`box_mean` by 3", "box", "`avg_pool2d`", ("pool",)),
    "box_mean_11": Group("`box_mean` by 11", "box", "`avg_pool2d`", ("pool",)),
    "box_mean_31": Group("`box_mean` by 31", "box", "`avg_pool2d`", ("pool",)),
    "box_mean_25": Group("`box_mean` of a series by 25", "box", "`avg_pool1d`", ("pool",)),
    "structure_loss": Group(
        "`structure_loss` of four outputs", "structure_loss", "F3Net's function, four times", ("pool",)
    ),
    "structure_loss_weighted": Group(
        "`structure_loss` of four outputs, weight given", "structure_loss", "F3Net's function without its pool"
    ),
    "linear_cross_entropy": Group(
        "`linear_cross_entropy`", "linear_cross_entropy", "`F.cross_entropy(F.linear(x, weight), target)`"
    ),
    "grad_group_norms": Group(
        "`grad_group_norms` of 500 gradients", "grad_norms", "`.norm()` of each, `stack`, `index_add_`"
    ),
    "scale_grads_": Group("`scale_grads_` of 500 gradients", "grad_norms", "`mul_` of each"),
    "rope_interleaved": Group("`rope(interleaved=True)`", "rope", "rotation in tensor ops, tables ready"),
    "rope_half_split": Group("`rope`", "rope", "rotation in tensor ops, tables ready"),
    "linear_attention_sum": Group(
        "`linear_attention`", "linear_attention", "the same formula: `F.elu`, 2 matmuls, a quotient"
    ),
    "linear_attention_feature": Group(
        '`linear_attention(normalize="feature")`', "linear_attention", "CamoXpert's formula: `F.elu`, sums, 2 matmuls"
    ),
    "linear_attention_causal": Group(
        "`linear_attention(causal=True)`", "linear_attention", "the same in chunks of 64 positions: 5 matmuls, `cumsum`"
    ),
    "linear_attention_cumsum": Group(
        "`linear_attention(causal=True)` beside a state for each position",
        "linear_attention",
        "`cumsum` of all outer products",
        ("algorithm",),
    ),
    "linear_attention_step": Group(
        "`linear_attention_step`", "linear_attention", "the same formula in place on the state"
    ),
    "standard_attention": Group(
        "`linear_attention` beside softmax attention",
        "linear_attention",
        "`F.scaled_dot_product_attention`",
        ("algorithm",),
    ),
    "short_attention": Group("`short_attention`", "short_attention", "`F.scaled_dot_product_attention`"),
    "bdh_attention": Group("`bdh_attention`", "bdh", "relu, rotation, 2 matmuls", ("state",)),
    "bdh_attention_causal": Group("`bdh_attention(causal=True)`", "bdh", "relu, rotation, 2 matmuls", ("state",)),
    "bdh_attention_forms": Group("`bdh_attention`, its forms", "bdh", "relu, rotation, 2 matmuls", ("forms",)),
    "bdh_attention_forms_causal": Group(
        "`bdh_attention(causal=True)`, its forms", "bdh", "relu, rotation, 2 matmuls", ("forms",)
    ),
    "moe_route": Group("`moe_route`", "moe", "softmax, `topk`, `bincount`, `argsort`"),
    "moe_rows": Group("`moe_dispatch`, `moe_combine`", "moe", "indexing, `index_add`"),
    "moe_layer": Group("`cx.nn.MoELayer`", "moe_layer", "a loop over images and choices", ("regrouped",)),
    "token_moe_gelu": Group(
        "`cx.nn.TokenMoE` with GELU, forward and backward", "token_moe", "a loop over experts", ("products",)
    ),
    "token_moe_swiglu": Group(
        "`cx.nn.TokenMoE` with SwiGLU, forward and backward", "token_moe", "a loop over experts", ("products",)
    ),
    "call_edge_maps": Group("a call of `edge_maps`", "edge", "3 grouped 3x3 convolutions, 11 elementwise ops"),
    "call_spatial_gradient": Group("a call of `spatial_gradient`", "spatial_gradient", "2 grouped 3x3 convolutions"),
    "call_frequency_bands": Group("a call of `frequency_bands`", "bands", "3 `avg_pool2d`, 2 subtractions"),
    "call_layer_norm2d_gelu": Group("a call of `layer_norm2d` with GELU", "norm2d", "tensor ops, `F.gelu`"),
    "call_bias_gelu": Group("a call of `bias_gelu`", "bias_gelu", "`F.gelu(x + bias)`"),
    "call_rope_half_split": Group("a call of `rope`", "rope", "rotation in tensor ops, tables ready"),
    "EdgeExpert": Group("`cx.nn.EdgeExpert`", "edge", "CamoXpert's module"),
    "FrequencyExpert": Group("`cx.nn.FrequencyExpert`", "bands", "CamoXpert's module", ("pool",)),
    "expert_branches": Group("the four 1x1 branches of an expert", "edge", "four 1x1 convolutions"),
    "TemporalEncoder": Group(
        "`cx.nn.TemporalEncoder`", "short_attention", "`nn.TransformerEncoder`, dropout 0.1", ("mask",)
    ),
    "TemporalEncoder_exact": Group(
        "`cx.nn.TemporalEncoder`, dropout 0", "short_attention", "`nn.TransformerEncoder`, dropout 0"
    ),
    "demo_step": Group("training step of the CamoXpert example", "moe_layer", "the step on stock PyTorch", ("step",)),
    "emberformer_step": Group(
        "training step of EmberFormer", "emberformer", "the public model's step", ("step", "mask")
    ),
    "emberformer_pixel_step": Group(
        "the same, with the refinement decoder", "emberformer", "the public model's step", ("step", "mask")
    ),
    "vision_bdh_step": Group("training step of Vision-BDH", "vision_bdh", "the public model's step", ("step", "mask")),
    "vision_bdh_small_step": Group("the same, small model", "vision_bdh", "the public model's step", ("step", "mask")),
    "vision_bdh_cls_softmax_step": Group(
        "training step of Vision-BDH's CLS model", "vision_bdh", "the public model's step", ("step", "mask")
    ),
    "k1_step": Group("training step of K-1's tree", "k1", "the step node by node", ("step", "mask")),
    "tune_linear": Group("`F.linear` after `tune_cpu`", "cpu", "`F.linear`"),
    "tune_linear_backward": Group("`F.linear` and its backward after `tune_cpu`", "cpu", "the same"),
    "tune_bmm": Group("`bmm` after `tune_cpu`", "cpu", "`bmm`"),
    "tune_linear_bfloat16": Group("`F.linear` in bfloat16, left alone by `tune_cpu`", "cpu", "`F.linear`", used=False),
    "tune_avg_pool_3": Group("`avg_pool2d` by 3 after `tune_cpu`", "cpu", "`avg_pool2d`"),
    "tune_avg_pool_3_backward": Group("`avg_pool2d` by 3 and its backward after `tune_cpu`", "cpu", "the same"),
    "tune_avg_pool_31": Group("`avg_pool2d` by 31 after `tune_cpu`", "cpu", "`avg_pool2d`"),
    "tune_avg_pool_31_backward": Group("`avg_pool2d` by 31 and its backward after `tune_cpu`", "cpu", "the same"),
    "tune_max_pool": Group("`max_pool2d` after `tune_cpu`", "cpu", "`max_pool2d`"),
    "tune_max_pool_backward": Group("`max_pool2d` and its backward after `tune_cpu`", "cpu", "the same"),
    "tune_depthwise": Group("depthwise `F.conv2d` after `tune_cpu`", "cpu", "`F.conv2d`"),
    "tune_depthwise_backward": Group("depthwise `F.conv2d` and its backward after `tune_cpu`", "cpu", "the same"),
    "tune_pointwise": Group("1x1 `F.conv2d` after `tune_cpu`", "cpu", "`F.conv2d`"),
    "tune_pointwise_backward": Group("1x1 `F.conv2d` and its backward after `tune_cpu`", "cpu", "the same"),
    "tune_softmax": Group("`softmax` of short rows after `tune_cpu`", "cpu", "`softmax`"),
    "tune_softmax_backward": Group("`softmax` of short rows and its backward after `tune_cpu`", "cpu", "the same"),
    "tune_log_softmax": Group("`log_softmax` of long rows after `tune_cpu`", "cpu", "`log_softmax`"),
    "tune_log_softmax_backward": Group(
        "`log_softmax` of long rows and its backward after `tune_cpu`", "cpu", "the same"
    ),
    "tune_log_softmax_channels": Group("`log_softmax` over channels after `tune_cpu`", "cpu", "`log_softmax`"),
    "tune_upsample": Group("bilinear `F.interpolate` after `tune_cpu`", "cpu", "`F.interpolate`"),
    "tune_upsample_backward": Group("bilinear `F.interpolate` and its backward after `tune_cpu`", "cpu", "the same"),
    "tune_upsample_nearest": Group("nearest `F.interpolate` after `tune_cpu`", "cpu", "`F.interpolate`"),
    "tune_upsample_nearest_backward": Group(
        "nearest `F.interpolate` and its backward after `tune_cpu`", "cpu", "the same"
    ),
    "tune_batch_norm": Group("`F.batch_norm` in training after `tune_cpu`", "cpu", "`F.batch_norm`"),
    "tune_batch_norm_backward": Group("`F.batch_norm` and its backward after `tune_cpu`", "cpu", "the same"),
    "tune_dropout": Group("`F.dropout` and its backward after `tune_cpu`", "cpu", "the same", ("mask",)),
    "tune_vit_step": Group("step of a ViT-like model after `tune_cpu`", "cpu", "the same step", ("step",)),
    "tune_mlp_step": Group("step of an MLP after `tune_cpu`", "cpu", "the same step", ("step",)),
    "tune_lm_head_step": Group("step of a vocabulary's head after `tune_cpu`", "cpu", "the same step", ("step",)),
    "tune_transformer_step": Group(
        "step of `nn.TransformerEncoder` after `tune_cpu`", "cpu", "the same step", ("step", "mask")
    ),
    "tune_k1_step": Group(
        "step of K-1's quick tree, node by node, after `tune_cpu`", "cpu", "the same step", ("step", "mask")
    ),
}


class Featured(NamedTuple):
    """A row of the README's table or of the chart: cases of `groups`, forward and backward, float32, contiguous."""

    groups: tuple[str, ...]
    label: str = ""  # "": the first group's
    shape: tuple[int, ...] | None = None  # only this shape
    in_readme: bool = False


# bdh_attention's longer shape compares two algorithms, so it is not drawn.
FEATURED = (
    Featured(("edge_maps",), in_readme=True),
    Featured(("layer_norm2d_gelu",), in_readme=True),
    Featured(("linear_attention_sum",), in_readme=True),
    Featured(("short_attention",), in_readme=True),
    Featured(("rope_half_split", "rope_interleaved"), in_readme=True),
    Featured(("moe_rows",), in_readme=True),
    Featured(("frequency_bands",), in_readme=True),
    Featured(("dropout_add_layer_norm",), in_readme=True),
    Featured(("spatial_gradient",)),
    Featured(("bias_gelu",)),
    Featured(("dropout",)),
    Featured(("sparse_gate",)),
    Featured(("moe_route",)),
    Featured(("bdh_attention",), shape=(8, 6, 64, 1024)),
    Featured(("EdgeExpert",)),
    Featured(("FrequencyExpert",)),
    Featured(("TemporalEncoder",)),
    Featured(("moe_layer",)),
)
