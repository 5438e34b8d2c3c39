"""Bundles of models whose sizes must be multiples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from optexport import Bundle
from optexport.errors import ConfigError
from optexport.signature.signature import Dim
from tests._helpers.exports import quick
from tests.tracing.shapes.test_range_limits import UNet


@pytest.mark.slow
def test_bundle_takes_multiples_and_refuses_other_sizes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = UNet().eval()
    dynamic = {"x": {0: "batch", 2: Dim("height", 8, 64, 8), 3: Dim("width", 4, 64, 4)}}
    result = quick(model, {"x": torch.randn(2, 2, 16, 24)}, tmp_path / "bundle", dynamic=dynamic)
    assert result.manifest.dims["height"].model_dump() == {"min": 8, "max": 64, "multiple_of": 8}
    bundle = Bundle.load(result.output)
    batch = torch.randn(1, 2, 40, 52)
    with torch.no_grad():
        expected = model(batch).numpy()
    np.testing.assert_allclose(next(iter(bundle(x=batch.numpy()).values())), expected, atol=1e-5)
    with pytest.raises(ConfigError, match="height: expected a multiple of 8, found 20") as caught:
        bundle(x=np.zeros((1, 2, 20, 20), np.float32))
    assert caught.value.hint == "Resize or pad the input to a size of 8 to 64, multiples of 8."


def test_input_between_multiples_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="axis 2 has size 20, which is not a multiple of 8"):
        quick(UNet(), {"x": torch.randn(2, 2, 20, 24)}, tmp_path / "b", dynamic={"x": {2: Dim("height", 8, 64, 8)}})
