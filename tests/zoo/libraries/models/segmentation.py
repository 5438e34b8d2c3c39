"""Networks from images to images: segmentation-models-pytorch, spandrel (super-resolution) and kornia (features)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.zoo.libraries.model import Input, Model, network, uniform
from tests.zoo.libraries.models.images import ANY_SIZE, BATCHES, EVEN_SIZE, IMAGE, square

_SMALL_ENCODER = "timm-mobilenetv3_small_minimal_100"
_SEGMENTATION: dict[str, dict[str, Any]] = {
    "Unet": {"encoder_depth": 3, "decoder_channels": (32, 16, 8)},
    "UnetPlusPlus": {"encoder_depth": 3, "decoder_channels": (32, 16, 8)},
    "FPN": {},
    "Linknet": {},
    "MAnet": {"encoder_depth": 3, "decoder_channels": (32, 16, 8)},
    "PSPNet": {},
    "DeepLabV3Plus": {"encoder_name": "tu-resnet10t", "decoder_channels": 16},
    "Segformer": {"encoder_name": "mit_b0"},
    "UPerNet": {"decoder_channels": 16},
}
_SCALED = {"any": ANY_SIZE, "even": EVEN_SIZE}
# Module, class, sizes and options by name.
_RESTORATION: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dncnn": ("DnCNN.__arch.network_dncnn:DnCNN", "any", {"in_nc": 3, "out_nc": 3, "nc": 16, "nb": 4}),
    "compact": ("Compact.__arch.SRVGG:SRVGGNetCompact", "any", {"num_feat": 16, "num_conv": 2, "upscale": 2}),
    "esrgan": ("ESRGAN.__arch.RRDB:RRDBNet", "any", {"num_filters": 16, "num_blocks": 1, "scale": 2}),
    "span": ("SPAN.__arch.span:SPAN", "any", {"num_in_ch": 3, "num_out_ch": 3, "feature_channels": 16, "upscale": 2}),
    "safmn": ("SAFMN.__arch.safmn:SAFMN", "any", {"dim": 16, "n_blocks": 2, "upscaling_factor": 2}),
    "rcan": ("RCAN.__arch.rcan_arch:RCAN", "any", {"scale": 2, "n_resgroups": 1, "n_resblocks": 2, "n_feats": 16}),
    "plksr": ("PLKSR.__arch.PLKSR:PLKSR", "any", {"dim": 16, "n_blocks": 1, "upscaling_factor": 2}),
    "swift_srgan": (
        "SwiftSRGAN.__arch.SwiftSRGAN:Generator",
        "any",
        {"num_channels": 16, "num_blocks": 2, "upscale_factor": 2},
    ),
    "nafnet": (
        "NAFNet.__arch.NAFNet_arch:NAFNet",
        "any",
        {"width": 8, "middle_blk_num": 1, "enc_blk_nums": [1, 1], "dec_blk_nums": [1, 1]},
    ),
    "swinir": (
        "SwinIR.__arch.SwinIR:SwinIR",
        "any",
        {
            "img_size": 16,
            "window_size": 4,
            "embed_dim": 16,
            "depths": [2],
            "num_heads": [2],
            "upscale": 2,
            "upsampler": "pixelshuffledirect",
        },
    ),
    "omnisr": ("OmniSR.__arch.OmniSR:OmniSR", "any", {"num_feat": 16, "window_size": 4, "up_scale": 2}),
    "ditn": (
        "DITN.__arch.DITN_Real:DITN_Real",
        "any",
        {"dim": 12, "ITL_blocks": 1, "SAL_blocks": 1, "UFONE_blocks": 1, "patch_size": 4, "upscale": 2},
    ),
    "dat": (
        "DAT.__arch.DAT:DAT",
        "even",
        {"img_size": 16, "embed_dim": 16, "split_size": [4, 4], "depth": [1], "num_heads": [2]},
    ),
}
_PATCHES = {"HardNet": 32, "HyNet": 32, "SOSNet": 32, "TFeat": 32, "OriNet": 32}


def models() -> Iterator[Model]:
    """Yields the models."""
    dims = {axis: {"min": 32, "multiple_of": 32} for axis in ("height", "width")}
    for name, options in _SEGMENTATION.items():
        common = {"encoder_name": _SMALL_ENCODER, "encoder_weights": None, "in_channels": 3, "classes": 2}
        make = network(f"segmentation_models_pytorch:{name}", **common | options)
        yield Model(f"segmentation-models-pytorch/{name.lower()}", make, {"x": IMAGE}, EVEN_SIZE, dims)
    for name, (path, sizes, options) in _RESTORATION.items():
        argument = {"nafnet": "inp", "ditn": "inp_img"}.get(name, "x")
        smaller = [{key: size // 4 if key != "batch" else size for key, size in s.items()} for s in _SCALED[sizes]]
        image = Input(IMAGE.shape, uniform)
        limits = {axis: {"min": 16} | ({"multiple_of": 8} if sizes == "even" else {}) for axis in ("height", "width")}
        yield Model(
            f"spandrel/{name}", network(f"spandrel.architectures.{path}", **options), {argument: image}, smaller, limits
        )
    for name, side in _PATCHES.items():
        argument = {"OriNet": "patch", "HyNet": "x"}.get(name, "input")
        yield Model(
            f"kornia/{name.lower()}",
            network(f"kornia.feature:{name}", pretrained=False),
            {argument: square(side, 1)},
            BATCHES,
        )
    gray = Input(("batch", 1, "height", "width"), uniform)
    yield Model("kornia/xfeat", network("kornia.feature:XFeatModel"), {"x": gray}, EVEN_SIZE, dims)
    yield Model(
        "kornia/sobel", network("kornia.filters:Sobel"), {"input": IMAGE}, ANY_SIZE, {a: {"min": 3} for a in dims}
    )
    yield Model(
        "kornia/gaussian_blur", network("kornia.filters:GaussianBlur2d", (5, 5), (1.5, 1.5)), {"input": IMAGE}, ANY_SIZE
    )
    yield Model("kornia/rgb_to_lab", network("kornia.color:RgbToLab"), {"image": Input(IMAGE.shape, uniform)}, ANY_SIZE)
