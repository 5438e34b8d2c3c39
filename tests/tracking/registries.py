"""An MLflow model registry and the model that tests upload to it."""

from __future__ import annotations

import json
from pathlib import Path

import mlflow

from optexport.tracking.registry.registration import Registered
from optexport.tracking.upload import upload_bundle
from tests._helpers import exports, stores
from tests.tracking.bundles import bundle, registering, timed


class Registry:
    """A store and the entries of its registry for the model "block"."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.uri = stores.store(folder)
        self.client = mlflow.MlflowClient(self.uri)

    def log(self, size: int = 1000) -> Registered:
        """Uploads a bundle with ``size`` extra bytes in its ONNX file."""
        target = bundle(self.folder, measurements=timed(1.0, 1.1))
        # Uploads check the digests, so the ONNX file must really contain the extra bytes.
        return self.send(target, size)

    def send(self, target: Path, size: int) -> Registered:
        exports.edit_json(target / "manifest.json", registering())
        onnx = target / "model.onnx"
        with onnx.open("ab") as file:  # an unknown protobuf field, which readers skip
            file.write(b"\xba\x3e" + _varint(size) + bytes(size))
        exports.reseal(target, "model.onnx")
        logged = upload_bundle(target, self.uri)
        assert logged.registered is not None
        return logged.registered

    def send_undecided(self) -> Path:
        """Uploads a bundle as if the program had stopped before recording the decision on its version."""
        target = bundle(self.folder)
        version = self.send(target, 1000).version
        for tag in ("optexport.register", "optexport.register.why"):
            self.client.delete_model_version_tag("block", version, tag)
        return target

    @property
    def holder(self) -> str | None:
        version = self.client.get_registered_model("block").aliases.get("champion")
        return None if version is None else str(version)

    @property
    def history(self) -> list[tuple[str, str]]:
        tags = self.client.get_registered_model("block").tags
        return [(entry["version"], entry["by"]) for entry in json.loads(tags["optexport.history.champion"])]

    def tags(self, version: str) -> dict[str, str]:
        return dict(self.client.get_model_version("block", version).tags)


def _varint(number: int) -> bytes:
    content = bytearray()
    while number > 127:
        content.append(number & 127 | 128)
        number >>= 7
    return bytes([*content, number])
