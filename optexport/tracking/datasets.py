"""Traced and user-supplied inputs of a bundle as MLflow datasets."""

from __future__ import annotations

import re
from typing import Any

from optexport.bundle.layout import REFERENCE
from optexport.tracking.bundle_record import BUNDLE, BundleRecord

# safetensors dtypes that NumPy lacks.
_NOT_NUMPYS = ("BF16", "F8_E4M3", "F8_E5M2")


def datasets(finished: BundleRecord) -> list[Any]:
    """Returns the MLflow dataset inputs of a run, each with name, digest and shapes.

    The tensors themselves are in the bundle only.
    """
    from mlflow.data.code_dataset_source import CodeDatasetSource
    from mlflow.data.numpy_dataset import from_numpy
    from mlflow.entities import Dataset, DatasetInput, InputTag
    from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT
    from safetensors import safe_open

    found = []
    # By default mlflow records the path of this program on this machine.
    source = CodeDatasetSource({"file": f"{BUNDLE}/{REFERENCE}", **finished.identity})
    with safe_open(finished.folder / REFERENCE, framework="np") as file:
        for index, case in enumerate(finished.manifest.reference_cases):
            if not re.fullmatch(r"traced|data( \d+)?", case):
                continue
            prefix = f"{index}.inputs."
            names = [key for key in file.keys() if key.startswith(prefix)]  # noqa: SIM118 - not a mapping
            if not names or any(file.get_slice(name).get_dtype() in _NOT_NUMPYS for name in names):
                continue
            features = {name.removeprefix(prefix): file.get_tensor(name) for name in names}
            made = from_numpy(features, source=source, name=case)
            context = InputTag(MLFLOW_DATASET_CONTEXT, "parity")
            found.append(DatasetInput(Dataset(**made.to_dict()), [context]))
    return found
