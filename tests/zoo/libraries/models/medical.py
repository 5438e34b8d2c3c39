"""Networks of MONAI for medical images of two and three dimensions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.zoo.libraries.model import Input, Model, ids, network
from tests.zoo.libraries.models.images import BATCHES, square

_IMAGE = Input(("batch", 1, "height", "width"))
_VOLUME = Input(("batch", 1, "depth", "height", "width"))
_SIZES = (
    {"batch": 2, "depth": 16, "height": 32, "width": 48},
    {"batch": 1, "depth": 32, "height": 48, "width": 32},
    {"batch": 3, "depth": 16, "height": 64, "width": 32},
)
_UNET = {"channels": (8, 16, 32), "strides": (2, 2)}
_LATENT = {
    "channels": (8, 16),
    "num_res_blocks": 1,
    "attention_levels": (False, True),
    "norm_num_groups": 4,
}
# Networks from an image to an image or to classes: class and options by name.
_NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "unet": (":UNet", {**_UNET, "num_res_units": 1}),
    "basic_unet": (":BasicUNet", {"features": (8, 8, 16, 16, 16, 8)}),
    "basic_unetplusplus": (":BasicUNetPlusPlus", {"features": (8, 8, 16, 16, 16, 8)}),
    "attention_unet": (":AttentionUnet", _UNET),
    "seg_resnet": (":SegResNet", {"init_filters": 8}),
    "densenet": (":DenseNet", {"init_features": 8, "growth_rate": 4, "block_config": (2, 2)}),
    "dyn_unet": (
        ":DynUNet",
        {"kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2], "filters": [8, 16, 16]},
    ),
    "highresnet": (
        ":HighResNet",
        {
            "layer_params": (
                {"name": "conv_0", "n_features": 8, "kernel_size": 3},
                {"name": "res_1", "n_features": 8, "kernels": (3, 3), "repeat": 1},
                {"name": "conv_1", "n_features": 8, "kernel_size": 1},
                {"name": "conv_2", "kernel_size": 1},
            )
        },
    ),
    "autoencoder": (":AutoEncoder", {"channels": (8, 16), "strides": (2, 2)}),
    "mednext": (
        ":MedNeXt",
        {"init_filters": 8, "kernel_size": 3, "blocks_down": (1, 1), "blocks_bottleneck": 1, "blocks_up": (1, 1)},
    ),
    "restormer": (
        ".restormer:Restormer",
        {"dim": 8, "num_blocks": (1, 1), "heads": (1, 2), "num_refinement_blocks": 1},
    ),
    "vqvae": (
        ":VQVAE",
        {
            "channels": (8, 8),
            "num_res_layers": 1,
            "num_res_channels": (8, 8),
            "downsample_parameters": ((2, 4, 1, 1), (2, 4, 1, 1)),
            "upsample_parameters": ((2, 4, 1, 1, 0), (2, 4, 1, 1, 0)),
            "num_embeddings": 16,
            "embedding_dim": 8,
        },
    ),
    "patch_discriminator": (":PatchDiscriminator", {"channels": 8, "num_layers_d": 2}),
}
_ARGUMENTS = {"vqvae": "images"}
_TRANSFORMER = {"hidden_size": 32, "mlp_dim": 64, "num_heads": 2}


def _model(name: str, cls: str, options: dict[str, Any], dimensions: int) -> Model:
    image = _IMAGE if dimensions == 2 else _VOLUME
    sizes = [{axis: size for axis, size in sizes.items() if axis in image.shape} for sizes in _SIZES]
    dims = {axis: {"min": 32, "multiple_of": 16} for axis in image.shape[2:]}
    make = network(f"monai.networks.nets{cls}", spatial_dims=dimensions, in_channels=1, out_channels=2, **options)
    return Model(f"monai/{name}_{dimensions}d", make, {_ARGUMENTS.get(name, "x"): image}, sizes, dims)


def models() -> Iterator[Model]:
    """Yields the models."""
    for name, (cls, options) in _NETWORKS.items():
        yield _model(name, cls, options, 2)
    for name in ("unet", "seg_resnet"):
        yield _model(name, *_NETWORKS[name], 3)
    yield Model(
        "monai/unetr",
        network("monai.networks.nets:UNETR", 1, 2, (32, 32), feature_size=8, spatial_dims=2, **_TRANSFORMER),
        {"x_in": square(32, 1)},
        BATCHES,
    )
    yield Model(
        "monai/swin_unetr",
        network("monai.networks.nets:SwinUNETR", 1, 2, feature_size=12, depths=(1, 1, 1, 1), spatial_dims=2),
        {"x_in": square(64, 1)},
        BATCHES,
    )
    yield Model(
        "monai/vit",
        network("monai.networks.nets:ViT", 1, 32, 8, num_layers=2, classification=True, spatial_dims=2, **_TRANSFORMER),
        {"x": square(32, 1)},
        BATCHES,
    )
    yield Model(
        "monai/vit_autoenc",
        network("monai.networks.nets:ViTAutoEnc", 1, 32, 16, num_layers=2, spatial_dims=2, **_TRANSFORMER),
        {"x": square(32, 1)},
        BATCHES,
    )
    yield Model(
        "monai/regressor",
        network("monai.networks.nets:Regressor", (1, 32, 32), (2,), (4, 8), (2, 2)),
        {"x": square(32, 1)},
        BATCHES,
    )
    yield Model(
        "monai/decoder_only_transformer",
        network("monai.networks.nets:DecoderOnlyTransformer", 50, 64, 32, 2, 2),
        {"x": Input(("batch", "length"), ids(50))},
        ({"batch": 2, "length": 12}, {"batch": 1, "length": 7}, {"batch": 3, "length": 40}),
        {"length": {"max": 64}},
    )
    diffusion = _model("diffusion_unet", ":DiffusionModelUNet", {**_LATENT, "num_head_channels": 8}, 2)
    yield Model(
        diffusion.name,
        diffusion.make,
        {**diffusion.inputs, "timesteps": Input(("batch",), ids(1000))},
        diffusion.sizes,
        diffusion.dims,
    )
