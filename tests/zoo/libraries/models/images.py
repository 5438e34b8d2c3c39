"""Classifiers of images: timm, vit-pytorch and others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.zoo.libraries.model import Input, Model, network

# Any height and width, as a convolutional network takes them.
IMAGE = Input(("batch", 3, "height", "width"))
ANY_SIZE = (
    {"batch": 2, "height": 64, "width": 96},
    {"batch": 3, "height": 96, "width": 64},
    {"batch": 1, "height": 75, "width": 110},
)
EVEN_SIZE = (*ANY_SIZE[:2], {"batch": 1, "height": 128, "width": 160})
BATCHES = ({"batch": 2}, {"batch": 1}, {"batch": 5})


def square(side: int, channels: int = 3) -> Input:
    """Returns an image of one size."""
    return Input(("batch", channels, side, side))


# Networks of any size.
_CONVOLUTIONAL: dict[str, dict[str, Any]] = {
    "test_byobnet": {},
    "test_convnext": {},
    "test_convnext2": {},
    "test_efficientnet": {},
    "test_efficientnet_evos": {},
    "test_efficientnet_gn": {},
    "test_mambaout": {},
    "test_nfnet": {},
    "test_resnet": {},
    "resnet10t": {},
    "mobilenetv3_small_050": {},
    "mobilenetv2_050": {},
    "ghostnet_050": {},
    "tf_efficientnet_lite0": {},
    "tf_mobilenetv3_small_minimal_100": {},
    "lcnet_035": {},
    "tinynet_e": {},
    "starnet_s1": {"depths": (1, 1, 1, 1)},
    "repvit_m0_9": {"depth": (1, 1, 1, 1)},
    "repghostnet_050": {},
    "fasternet_t0": {"depths": (1, 1, 1, 1)},
    "convnextv2_atto": {"depths": (1, 1, 1, 1)},
    "inception_next_atto": {"depths": (1, 1, 1, 1)},
    "edgenext_xx_small": {"depths": (1, 1, 2, 1)},
    "densenet121": {"block_config": (2, 2), "growth_rate": 8},
    "pvt_v2_b0": {"depths": (1, 1, 1, 1)},
    "mobilevitv2_050": {},
    "xcit_nano_12_p16_224": {"depth": 2},
}
# Networks of images of one size, with the size.
_FIXED: dict[str, tuple[int, dict[str, Any]]] = {
    "test_vit": (160, {}),
    "test_vit2": (160, {}),
    "test_vit3": (160, {}),
    "test_vit4": (160, {}),
    "test_vit_relpos": (160, {}),
    "test_coatnet": (64, {"img_size": 64}),
    "test_maxvit": (64, {"img_size": 64}),
    "deit_tiny_distilled_patch16_224": (64, {"img_size": 64, "depth": 2}),
    "beit_base_patch16_224": (64, {"img_size": 64, "depth": 2, "embed_dim": 48, "num_heads": 4}),
    "eva02_tiny_patch14_224": (56, {"img_size": 56, "depth": 2}),
    "cait_xxs24_224": (64, {"img_size": 64, "depth": 2}),
    "convit_tiny": (64, {"img_size": 64, "depth": 2}),
    "gmlp_ti16_224": (64, {"img_size": 64}),
    "swin_tiny_patch4_window7_224": (56, {"img_size": 56, "embed_dim": 24, "depths": (1, 2), "num_heads": (2, 2)}),
    "swinv2_tiny_window8_256": (64, {"img_size": 64, "embed_dim": 24, "depths": (1, 2), "num_heads": (2, 2)}),
    "visformer_tiny": (64, {"img_size": 64, "depth": (1, 1, 1)}),
    "hiera_tiny_224": (224, {"stages": (1, 1, 1, 1), "embed_dim": 24}),
    "davit_tiny": (64, {"depths": (1, 1, 1, 1), "embed_dims": (16, 32, 48, 64), "num_heads": (1, 2, 3, 4)}),
}

# Class, side and options, for those that take no options by name.
_CLASSES: dict[str, tuple[int, dict[str, Any]]] = {
    "focalnet:FocalNet": (64, {"depths": (1, 1, 1, 1), "embed_dim": 16}),
    "twins:Twins": (64, {"img_size": 64, "embed_dims": (16, 16, 32, 32), "num_heads": (1, 1, 2, 2)}),
    "metaformer:MetaFormer": (64, {"depths": (1, 1, 1, 1), "dims": (16, 16, 32, 32)}),
    "resnetv2:ResNetV2": (64, {"layers": (1, 1), "channels": (128, 256), "stem_chs": 32}),
    "levit:Levit": (
        64,
        {
            "img_size": 64,
            "embed_dim": (16, 32),
            "key_dim": 8,
            "depth": (1, 1),
            "num_heads": (2, 2),
            "attn_ratio": (2, 2),
            "mlp_ratio": (2, 2),
        },
    ),
    "mlp_mixer:MlpMixer": (64, {"img_size": 64, "num_blocks": 2, "embed_dim": 32}),
}
_SMALL = {"num_classes": 10, "dim": 32, "depth": 2, "heads": 2, "mlp_dim": 64, "image_size": 32, "patch_size": 8}
_CCT = {
    "img_size": 32,
    "embedding_dim": 32,
    "n_conv_layers": 1,
    "kernel_size": 3,
    "stride": 1,
    "padding": 1,
    "pooling_kernel_size": 3,
    "pooling_stride": 2,
    "pooling_padding": 1,
    "num_layers": 2,
    "num_heads": 2,
    "mlp_ratio": 2.0,
    "num_classes": 10,
    "positional_embedding": "learnable",
}
_CROSS = {
    "image_size": 32,
    "num_classes": 10,
    "depth": 1,
    "cross_attn_depth": 1,
    "cross_attn_heads": 2,
} | {
    f"{branch}_{option}": value
    for branch, values in {"sm": (16, 4, 1, 2, 32), "lg": (32, 8, 1, 2, 32)}.items()
    for option, value in zip(("dim", "patch_size", "enc_depth", "enc_heads", "enc_mlp_dim"), values, strict=True)
}
_STAGES = {"num_classes": 10, "dim": 16, "depth": (1, 1), "heads": (2, 2)}
# Class, side of the image, and options, by module.
_VIT_PYTORCH: dict[str, tuple[str, int, dict[str, Any]]] = {
    "vit": ("ViT", 32, _SMALL),
    "simple_vit": ("SimpleViT", 32, _SMALL),
    "cait": ("CaiT", 32, {**_SMALL, "cls_depth": 1}),
    "deepvit": ("DeepViT", 32, _SMALL),
    "cct": ("CCT", 32, _CCT),
    "cross_vit": ("CrossViT", 32, _CROSS),
    "parallel_vit": ("ViT", 32, _SMALL),
    "rvt": ("RvT", 32, _SMALL),
    "vit_for_small_dataset": ("ViT", 32, _SMALL),
    "vit_with_patch_merger": ("ViT", 32, {**_SMALL, "patch_merge_layer": 1}),
    "simple_uvit": ("SimpleUViT", 32, _SMALL),
    "normalized_vit": ("nViT", 32, _SMALL),
    "simple_vit_with_fft": ("SimpleViT", 32, {**_SMALL, "freq_patch_size": 8}),
    "simple_vit_with_register_tokens": ("SimpleViT", 32, _SMALL),
    "pit": ("PiT", 32, {**_SMALL, "depth": (1, 1), "patch_size": 4}),
    "xcit": ("XCiT", 32, {**_SMALL, "cls_depth": 1}),
    "sep_vit": ("SepViT", 56, _STAGES),
    "max_vit": ("MaxViT", 64, {"num_classes": 10, "dim": 16, "depth": (1, 1), "window_size": 4, "dim_head": 8}),
    "mobile_vit": (
        "MobileViT",
        64,
        {
            "image_size": (64, 64),
            "dims": (16, 24, 32),
            "channels": (4, 4, 8, 8, 8, 8, 12, 12, 16, 16, 32),
            "num_classes": 10,
            "depths": (1, 1, 1),
        },
    ),
}
_CALLED_X = ("cct", "sep_vit", "max_vit", "mobile_vit")


def models() -> Iterator[Model]:
    """Yields the models."""
    for name, options in _CONVOLUTIONAL.items():
        # Some with a largest size and some without.
        limits = {"min": 64} if name.startswith("test_") else {"min": 64, "max": 256}
        dims = dict.fromkeys(("height", "width"), limits)
        make = network("timm:create_model", name, num_classes=10, **options)
        yield Model(f"timm/{name}", make, {"x": IMAGE}, ANY_SIZE, dims)
    for name, (side, options) in _FIXED.items():
        make = network("timm:create_model", name, num_classes=10, **options)
        yield Model(f"timm/{name}", make, {"x": square(side)}, BATCHES)
    for path, (side, options) in _CLASSES.items():
        make = network(f"timm.models.{path}", num_classes=10, **options)
        yield Model(f"timm/{path.partition(':')[0]}", make, {"x": square(side)}, BATCHES)
    for module, (name, side, options) in _VIT_PYTORCH.items():
        argument = "x" if module in _CALLED_X else "images" if module == "normalized_vit" else "img"
        make = network(f"vit_pytorch.{module}:{name}", **options)
        yield Model(f"vit-pytorch/{module}", make, {argument: square(side)}, BATCHES)
