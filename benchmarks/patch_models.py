"""How to make a small model, a batch and a loss out of a clone of each public repository that patch is held against.

Nothing of these repositories is kept here: each entry imports files of a clone that the caller has. A file's imports
that the model does not need are stood in for by empty modules.
"""

import importlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

SITE = "site-packages"


@dataclass
class Trial:
    """A model and run(model, batch) -> loss; batch is a tuple of tensors."""

    model: nn.Module
    batch: tuple
    run: Callable


@dataclass
class Entry:
    """make(root) -> Trial, where root is the clone. needs: packages from `pip install --target DIR/site-packages`.
    commit: what the entry was written against. asked: for the speed of a step, patched and with tune_cpu, that the
    project set itself."""

    name: str
    repository: str
    commit: str
    make: Callable[[Path], Trial]
    needs: tuple[str, ...] = ()
    stubs: tuple[str, ...] = ()
    note: str = ""
    asked: float | None = None
    folder: str = field(init=False)

    def __post_init__(self):
        self.folder = self.repository.rpartition("/")[2]


class _StubClass(type):
    """A class that has every attribute: members of an enumeration, mostly."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls()


class _Stub(types.ModuleType):
    """A module that has every name; what is imported from it can be subclassed, called and used as a decorator."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _StubClass(name, (), {"__init__": lambda self, *args, **kwargs: None})


class _Finder:
    """Stands in for the modules inside one that is stood in for."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if isinstance(sys.modules.get(name.rpartition(".")[0]), _Stub):
            return importlib.machinery.ModuleSpec(name, _Finder, is_package=True)
        return None

    @staticmethod
    def create_module(spec):
        return _Stub(spec.name)

    @staticmethod
    def exec_module(module):
        pass


def stub(names) -> None:
    for name in names:
        module = _Stub(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module
    if names and _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)


def load(root: Path, path: str, name: str = "the_model"):
    """One file of a clone, imported alone."""
    spec = importlib.util.spec_from_file_location(name, root / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def package(root: Path, path: str, name: str) -> None:
    """Makes `name` a package of the files under path, without its __init__.py."""
    module = types.ModuleType(name)
    module.__path__ = [str(root / path)]
    sys.modules[name] = module


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _tokens(vocabulary: int, *shape: int) -> torch.Tensor:
    return torch.randint(1, vocabulary, shape, generator=torch.Generator().manual_seed(sum(shape)))


def _to_target(model, batch):
    *inputs, target = batch
    y = model(*inputs)
    return F.mse_loss(y[0] if isinstance(y, tuple) else y, target)


def _next_token(model, batch):
    (tokens,) = batch
    y = model(tokens[:, :-1])
    logits = y[0] if isinstance(y, tuple) else getattr(y, "logits", y)
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _class(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def _nafnet(root: Path, size: int, samples: int) -> Trial:
    package(root, "basicsr", "basicsr")
    package(root, "basicsr/models", "basicsr.models")
    package(root, "basicsr/models/archs", "basicsr.models.archs")
    archs = importlib.import_module("basicsr.models.archs.NAFNet_arch")
    model = archs.NAFNet(width=32, enc_blk_nums=[1, 1, 1, 28], middle_blk_num=1, dec_blk_nums=[1, 1, 1, 1])
    for name, parameter in model.named_parameters():  # zeros at first, which hide every block
        if name.endswith(("beta", "gamma")):
            nn.init.constant_(parameter, 0.1)
    return Trial(model, (_noise(samples, 3, size, size), _noise(samples, 3, size, size) * 0.1), _to_target)


def _restormer(root: Path, norm: str) -> Trial:
    archs = load(root, "basicsr/models/archs/restormer_arch.py")
    model = archs.Restormer(dim=48, num_blocks=[1, 1, 1, 1], num_refinement_blocks=1, LayerNorm_type=norm)
    return Trial(model, (_noise(1, 3, 64, 64), _noise(1, 3, 64, 64) * 0.1), _to_target)


def _forecast(root: Path, name: str, **changed) -> Trial:
    """A model of Time-Series-Library with the sizes of its ETT scripts."""
    sys.path.insert(0, str(root))
    settings = {
        "task_name": "long_term_forecast",
        "seq_len": 96,
        "label_len": 48,
        "pred_len": 96,
        "enc_in": 7,
        "dec_in": 7,
        "c_out": 7,
        "d_model": 512,
        "n_heads": 8,
        "e_layers": 2,
        "d_layers": 1,
        "d_ff": 2048,
        "factor": 3,
        "dropout": 0.1,
        "activation": "gelu",
        "embed": "timeF",
        "freq": "h",
        "use_norm": True,
        **changed,
    }
    model = importlib.import_module(f"models.{name}").Model(types.SimpleNamespace(**settings))
    batch = (_noise(32, 96, 7), _noise(32, 96, 4), _noise(32, 144, 7), _noise(32, 144, 4), _noise(32, 96, 7))
    return Trial(model, batch, _to_target)


def _masked_tokens(model, batch):
    tokens, target, *mask = batch
    y = model(tokens, None, *mask)
    logits = y[0] if isinstance(y, tuple) else getattr(y, "logits", y)
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def _bert_of_2019(root: Path) -> Trial:
    package(root, "pytorch_pretrained_bert", "pytorch_pretrained_bert")
    stub(["pytorch_pretrained_bert.file_utils"])
    module = importlib.import_module("pytorch_pretrained_bert.modeling")
    sizes = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 2048}
    model = module.BertForMaskedLM(module.BertConfig(2000, **sizes))
    return Trial(model, (_tokens(2000, 8, 128), _tokens(2000, 8, 128)), _masked_tokens)


def _bert(root: Path) -> Trial:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 2048}
    model = BertForMaskedLM(BertConfig(vocab_size=2000, **sizes))

    def run(model, batch):
        return F.cross_entropy(model(input_ids=batch[0]).logits.flatten(0, 1), batch[1].flatten())

    return Trial(model, (_tokens(2000, 8, 128), _tokens(2000, 8, 128)), run)


class _OverEmbedding(nn.Module):
    """RecBole's encoder as its SASRec calls it, without the data set that SASRec itself asks for."""

    def __init__(self, encoder, items: int = 1000, length: int = 50):
        super().__init__()
        self.items, self.places = nn.Embedding(items, 64), nn.Embedding(length, 64)
        self.norm, self.dropout, self.encoder = nn.LayerNorm(64, eps=1e-12), nn.Dropout(0.5), encoder
        for embedding in (self.items, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens):
        x = self.dropout(self.norm(self.items(tokens) + self.places.weight[: tokens.shape[1]]))
        later = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        mask = torch.zeros(later.shape, dtype=x.dtype).masked_fill(later, -10000.0)[None, None]
        return self.encoder(x, mask)[-1] @ self.items.weight.T


def _recbole(root: Path) -> Trial:
    layers = load(root, "recbole/model/layers.py")
    model = _OverEmbedding(layers.TransformerEncoder(n_layers=2, n_heads=2, hidden_size=64, inner_size=256))
    return Trial(model, (_tokens(1000, 128, 51),), _next_token)


def _emberformer(root: Path) -> Trial:
    sys.path.insert(0, str(root))
    from models import EmberFormer

    sizes = {"d_model": 96, "nhead": 8, "num_layers": 4, "dim_feedforward": 384, "spatial_decoder": "unet"}
    model = EmberFormer(static_channels=10, patch_size=16, max_seq_len=32, **sizes)
    valid = torch.arange(6) < torch.tensor([[6], [4], [6], [1]])
    batch = (
        _noise(4, 400, 6),
        _noise(4, 6, 2),
        _noise(4, 400, 10),
        valid,
        (_noise(4, 1, 20, 20) > 1).to(torch.float32),
    )

    def run(model, batch):
        logits = model(*batch[:4], grid_shape=(20, 20))
        return F.binary_cross_entropy_with_logits(logits, batch[4])

    return Trial(model, batch, run)


def _camoxpert(root: Path) -> Trial:
    sys.path.insert(0, str(root))
    from models.camoxpert import CamoXpert

    model = CamoXpert(pretrained=False, backbone="edgenext_small", num_experts=7)

    def run(model, batch):
        logits, auxiliary, *_ = model(batch[0])
        return F.binary_cross_entropy_with_logits(logits, batch[1]) + 0.01 * auxiliary

    return Trial(model, (_noise(4, 3, 224, 224), (_noise(4, 1, 224, 224) > 1).to(torch.float32)), run)


def _vision_bdh(root: Path, version: str) -> Trial:
    sys.path.insert(0, str(root))
    config = importlib.import_module("models.bdh").BDHConfig(n_embd=192, n_head=6, mlp_internal_dim_multiplier=32)
    file, kind = {"v1": ("vision_bdh", "VisionBDH"), "v2": ("vision_bdh_v2", "VisionBDHv2")}[version]
    model = getattr(importlib.import_module(f"models.{file}"), kind)(config)
    return Trial(model, (_noise(32, 3, 32, 32), _tokens(10, 32)), _class)


def _bdh(root: Path) -> Trial:
    module = load(root, "bdh.py")
    model = module.BDH(module.BDHConfig(n_layer=2, n_embd=128, mlp_internal_dim_multiplier=32))
    return Trial(model, (_tokens(256, 4, 129),), _next_token)


def _k1(root: Path) -> Trial:
    sys.path.insert(0, str(root))
    from k1_system.core.tree import HierarchicalTree

    model = HierarchicalTree(10000, embed_dim=128, ff_dim=256, num_heads=4, tree_depth=3, branching_factor=[3, 3])
    return Trial(model, (_tokens(10000, 64, 65),), _next_token)


def _sam(root: Path) -> Trial:
    sys.path.insert(0, str(root))
    package(root, "segment_anything", "segment_anything")
    package(root, "segment_anything/modeling", "segment_anything.modeling")
    decoder = importlib.import_module("segment_anything.modeling.mask_decoder").MaskDecoder
    transformer = importlib.import_module("segment_anything.modeling.transformer").TwoWayTransformer
    body = transformer(depth=2, embedding_dim=256, mlp_dim=2048, num_heads=8)
    model = decoder(transformer_dim=256, transformer=body)
    batch = (_noise(1, 256, 64, 64), _noise(1, 256, 64, 64), _noise(2, 3, 256), _noise(2, 256, 64, 64))

    def run(model, batch):
        masks, quality = model(*batch[:4], multimask_output=True)
        return masks.square().mean() + quality.square().mean()

    return Trial(model, batch, run)


def _convnext(root: Path) -> Trial:
    sys.modules.setdefault("timm.models.registry", importlib.import_module("timm.models"))
    module = load(root, "models/convnext.py")
    model = module.ConvNeXt(depths=[1, 1, 2, 1], dims=[48, 96, 192, 384], num_classes=10, layer_scale_init_value=0.1)
    return Trial(model, (_noise(2, 3, 128, 128), _tokens(10, 2)), _class)


def _edgenext(root: Path) -> Trial:
    package(root, "models", "models")
    module = importlib.import_module("models.edgenext")
    heads = {"heads": [4, 4, 4, 4], "d2_scales": [2, 2, 3, 4], "use_pos_embd_xca": [False] * 4}  # float32 alone
    model = module.EdgeNeXt(
        depths=[1, 2, 2, 2], dims=[24, 48, 88, 168], num_classes=10, global_block=[0, 1, 1, 1],
        global_block_type=["None", "SDTA", "SDTA", "SDTA"], layer_scale_init_value=0.1,
        classifier_dropout=0.0, **heads,
    )  # fmt: skip
    return Trial(model, (_noise(2, 3, 128, 128), _tokens(10, 2)), _class)


def _timm(name: str, **options) -> Callable[[Path], Trial]:
    def make(root: Path) -> Trial:
        import timm

        model = timm.create_model(name, pretrained=False, num_classes=10, **options)
        return Trial(model, (_noise(2, 3, 128, 128), _tokens(10, 2)), _class)

    return make


def _efficientvit(root: Path) -> Trial:
    for name in ("", "/models", "/models/efficientvit"):
        package(root, f"efficientvit{name}", f"efficientvit{name.replace('/', '.')}")
    model = importlib.import_module("efficientvit.models.efficientvit.cls").efficientvit_cls_b0(n_classes=10)
    return Trial(model, (_noise(4, 3, 128, 128), _tokens(10, 4)), _class)


def _nanogpt(root: Path) -> Trial:
    module = load(root, "model.py")
    model = module.GPT(module.GPTConfig(128, 256, 4, 4, 256, 0.2, True))

    def run(model, batch):
        return model(batch[0][:, :-1], batch[0][:, 1:].contiguous())[1]

    return Trial(model, (_tokens(256, 8, 129),), run)


def _minimind(root: Path) -> Trial:
    module = load(root, "model/model_minimind.py")
    sizes = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = module.MiniMindForCausalLM(module.MiniMindConfig(use_moe=True, vocab_size=2000, dropout=0.1, **sizes))

    def run(model, batch):
        mixtures = [part for part in model.modules() if isinstance(part, module.MOEFeedForward)]
        loss = _next_token(model, batch) + sum(part.aux_loss for part in mixtures)
        for part in mixtures:  # which could not be copied otherwise
            part.aux_loss = part.aux_loss.detach()
        return loss

    return Trial(model, (_tokens(2000, 8, 129),), run)


_NAFNET = ("megvii-research/NAFNet", "2b4af71ebe098a92a75910c233a3965a3e93ede4")
_NAFNET_HAS = {"stubs": ("basicsr.utils",)}
_RESTORMER = ("swz30/Restormer", "df766d5521afd21cce56e24159f300b30ebf3fb0")
_SERIES = ("thuml/Time-Series-Library", "4e938a1767106324dd753b2a44832bf870a0252e")
_VISION = ("takzen/vision-bdh", "71cb8ab7a22ae981245590b2fbaadb55b42632d3")
_TIMM = ("huggingface/pytorch-image-models", "1.0.20")
_NO_IMAGES = ("torchvision",)
_SERIES_NEEDS = {"needs": ("einops",), "stubs": ("reformer_pytorch", "utils.timefeatures")}

ENTRIES = (
    Entry("NAFNet width 32, 64x64", *_NAFNET, lambda root: _nafnet(root, 64, 4), **_NAFNET_HAS, asked=1.35),
    Entry("NAFNet width 32, 256x256", *_NAFNET, lambda root: _nafnet(root, 256, 1), **_NAFNET_HAS, asked=1.25),
    Entry("Restormer WithBias", *_RESTORMER, lambda root: _restormer(root, "WithBias"), ("einops",)),
    Entry("Restormer BiasFree", *_RESTORMER, lambda root: _restormer(root, "BiasFree"), ("einops",)),
    Entry("TSL Transformer", *_SERIES, lambda root: _forecast(root, "Transformer"), **_SERIES_NEEDS),
    Entry(
        "TSL iTransformer",
        *_SERIES,
        lambda root: _forecast(root, "iTransformer", d_model=128, d_ff=128),
        **_SERIES_NEEDS,
        asked=1.4,
    ),
    Entry(
        "TSL PatchTST",
        *_SERIES,
        lambda root: _forecast(root, "PatchTST", d_model=128, d_ff=256, n_heads=2),
        **_SERIES_NEEDS,
    ),
    Entry(
        "transformers BERT, 4 layers of 512",
        "huggingface/transformers",
        "4.57.1",
        _bert,
        ("transformers",),
        asked=1.5,
    ),
    Entry(
        "pytorch_pretrained_bert, 4 layers of 512",
        "Meelfy/pytorch_pretrained_BERT",
        "1a95f9e3e5ace781623b2a0eb20d758765e61145",
        _bert_of_2019,
        asked=1.5,
    ),
    Entry(
        "RecBole encoder",
        "RUCAIBox/RecBole",
        "7b02be5ec80a88310f2d04a27a82adfcbb5dc211",
        _recbole,
        stubs=("recbole", "recbole.utils"),
        note="around it an embedding and SASRec's causal mask of -10000",
    ),
    Entry("EmberFormer", "tampueroc/emberformer", "d5116608ce2f84367a32522d52e7cb04d0b13edc", _emberformer, asked=2.4),
    Entry(
        "CamoXpert",
        "mahi-chan/camoXpert",
        "47e858cac4d78f37513dac2bdbf1377989d263ce",
        _camoxpert,
        ("einops", "timm"),
        _NO_IMAGES,
        asked=1.25,
    ),
    Entry("Vision-BDH v1", *_VISION, lambda root: _vision_bdh(root, "v1"), asked=2.5),
    Entry("Vision-BDH v2", *_VISION, lambda root: _vision_bdh(root, "v2"), asked=2.5),
    Entry("K-1 tree", "PlanetDestroyyer/self-learning-k-1", "63b208bdd1211e376d018c36b19ffa006ca36d4f", _k1, asked=1.5),
    Entry("BDH", "pathwaycom/bdh", "714bc800631e7bffc0946768f4f3c77d25a68ca4", _bdh),
    Entry(
        "SAM mask decoder",
        "facebookresearch/segment-anything",
        "dca509fe793f601edb92606367a655c15ac00fdf",
        _sam,
    ),
    Entry(
        "ConvNeXt",
        "facebookresearch/ConvNeXt",
        "048efcea897d999aed302f2639b6270aedf8d4c8",
        _convnext,
        ("timm",),
        _NO_IMAGES,
    ),
    Entry("EdgeNeXt", "mmaaz60/EdgeNeXt", "388450404fdd6d6e097f1cf94f5afcbbdc352f08", _edgenext, ("timm",), _NO_IMAGES),
    Entry("timm convnext_atto", *_TIMM, _timm("convnext_atto"), ("timm",), _NO_IMAGES),
    Entry("timm edgenext_xx_small", *_TIMM, _timm("edgenext_xx_small"), ("timm",), _NO_IMAGES),
    Entry(
        "EfficientViT b0",
        "mit-han-lab/efficientvit",
        "de7d7733cc0329f391b33f1f459271562ec27bd5",
        _efficientvit,
        stubs=("triton", "triton.language", "efficientvit.apps", *_NO_IMAGES),
    ),
    Entry("nanoGPT", "karpathy/nanoGPT", "3adf61e154c3fe3fca428ad6bc3818b27a3b8291", _nanogpt),
    Entry(
        "minimind MoE",
        "jingyaogong/minimind",
        "d65ef2c00ebc6082f9df11541e1b191655eddb00",
        _minimind,
        ("transformers",),
    ),
)
