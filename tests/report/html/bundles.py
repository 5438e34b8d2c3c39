"""Makes bundles for reports: a real one with times, and changed or hostile ones."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from optexport.bundle import digest_json
from optexport.bundle.manifest import Manifest
from optexport.report.html import page
from tests._helpers import exports

BENCH = {
    "threads": 1,
    "rounds": 12,
    "artifacts": [
        {"name": "onnx", "format": "onnx", "bytes": 14573, "proven": True},
        {"name": "plain onnx", "format": "onnx", "bytes": 14600, "proven": False},
    ],
    "figures": [
        {"artifact": name, "format": "onnx", "shape": "batch=1,sequence=16", "sizes": {"batch": 1}, "rows": 1,
         "p50_ms": p50, "p90_ms": 1.2 * p50, "p99_ms": 1.5 * p50, "low_ms": 0.9 * p50, "high_ms": 1.1 * p50,
         "rows_per_second": 1e3 / p50, "load_seconds": 0.2, "peak_memory_bytes": 1 << 20}
        for name, p50 in (("onnx", 10.0), ("plain onnx", 12.0))
    ],
    "comparisons": [
        {"artifact": "onnx", "baseline": "plain onnx", "format": "onnx", "shape": "batch=1,sequence=16",
         "speedup": 1.2, "low": 1.1, "high": 1.3, "verdict": "faster", "more_rounds": None}
    ],
    "notes": ["a note"],
}  # fmt: skip
_COMPARISON = {"speedup": 1.05, "low": 0.97, "high": 1.1, "verdict": "inconclusive", "more_rounds": 40, "rounds": 12}
_TRIAL = {
    "change": "as configured",
    "rules": [0],
    "passes": [],
    "refused": None,
    "comparison": None,
    "earlier": False,
}
TUNE = [
    {
        "format": "onnx",
        "chosen": _TRIAL,
        "measure": "as configured",
        "over_plain": _COMPARISON,
        "trials": [
            _TRIAL,
            {**_TRIAL, "change": "with gemm", "comparison": _COMPARISON},
            {**_TRIAL, "change": "with attention", "refused": "it is too far"},
        ],
        "untried": ["with sum-residuals"],
        "shapes": ["batch=1,sequence=16"],
    }
]


def copied(folder: Path, *, measured: bool = True) -> Path:
    """Copies a real bundle, adds invented times if asked, and writes its report."""
    shutil.copytree(exports.exported().output, folder)
    if measured:
        exports.edit_json(folder / "measurements.json", lambda m: m.update(bench=BENCH, tune=TUNE))
    page.write(folder)
    return folder


def manifest_of(folder: Path) -> Manifest:
    """Returns the manifest without checking it."""
    return Manifest.model_validate(digest_json.read(folder / "manifest.json"))


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Changes and reseals a bundle's manifest, and writes its report."""
    exports.edit_json(folder / "manifest.json", change)
    page.write(folder)
    return folder


# Fields with fixed values, or that link documents.
_FIXED = {
    "format",
    "device",
    "precision",
    "kept",
    "scores",
    "preprocessors",
    "digest",
    "manifest",
    "verdict",
    "path",
    "sha256",
}


def renamed(value: Any, prefix: str) -> Any:
    """Adds a prefix to every text and every name in a document."""
    if isinstance(value, dict):
        return {_key(key, prefix): v if key in _FIXED else renamed(v, prefix) for key, v in value.items()}
    if isinstance(value, list):
        return [renamed(item, prefix) for item in value]
    return f"{prefix}{value}" if isinstance(value, str) else value


_KEYS = {
    key
    for schema in (Manifest.model_json_schema(),)
    for part in (schema, *schema["$defs"].values())
    for key in part.get("properties", {})
} | {key for document in (BENCH, TUNE[0], _COMPARISON, _TRIAL) for key in document}
_KEYS |= {key for rows in ("artifacts", "figures", "comparisons") for key in BENCH[rows][0]}  # type: ignore[index]
_KEYS |= {"date", "host", "platform", "processor", "cpus", "threads", "seconds", "bench", "tune", "manifest", "digest"}


def _key(key: str, prefix: str) -> str:
    return key if key in _KEYS else f"{prefix}{key}"


def hostile(folder: Path, prefix: str) -> Path:
    """Adds a prefix to every text of a bundle's manifest, measurements, graphs and config."""
    for name in ("graph_before.txt", "graph_after.txt"):
        text = (folder / name).read_text(encoding="utf-8")
        (folder / name).write_text(text.replace("target=", f"target={prefix}"), encoding="utf-8")
    (folder / "config.toml").write_text(f'source = "{prefix}"\n', encoding="utf-8")
    measurements = json.loads((folder / "measurements.json").read_text(encoding="utf-8"))
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    changed = renamed(copy.deepcopy(manifest), prefix)
    changed["transformations"] = [
        {**new, "formats": [], "changes": old["changes"]}  # unchanged, so that they match the graphs
        for new, old in zip(changed["transformations"], manifest["transformations"], strict=True)
    ]
    changed["transformations"][0] |= renamed(
        {"changes": [{"nodes": ["node"], "target": "target", "replaced": ["old"]}]}, prefix
    )
    changed["transformations"][0]["near_misses"] = [{"node": f"{prefix}node", "reason": f"{prefix}reason"}]
    changed["parity"] |= {"left_out": [f"{prefix}left"], "unguided": [f"{prefix}u"], "fallback": f"{prefix}because"}
    changed["fixed_axes"] = [f"{prefix}axis"]
    changed["skipped_checks"] = [f"{prefix}check"]
    changed["artifacts"][0]["fixed_shape"] = f"{prefix}shape"
    changed["constants"] = {f"{prefix}constant": f"{prefix}value"}
    changed["application"]["outputs"] = manifest["application"]["outputs"]  # a fixed value
    digest_json.write(folder / "manifest.json", {key: value for key, value in changed.items() if key != "digest"})
    digest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["digest"]
    measurements = {**renamed(measurements, prefix), "manifest": digest}
    del measurements["digest"]
    digest_json.write(folder / "measurements.json", measurements)
    page.write(folder)
    return folder
