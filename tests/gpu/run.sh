#!/usr/bin/env bash
# Runs everything that needs an NVIDIA GPU, without network, in at most 8 minutes:
#
#     bash tests/gpu/run.sh [FOLDER]
#
# It needs an environment with optexport's packages, pytest, hypothesis and a torch build for CUDA. ONNX is included if
# the environment has onnxruntime-gpu. PYTHON names the interpreter. FOLDER (build/gpu) gets the log and the figures.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python3}
folder=${1:-build/gpu}
mkdir -p "$folder"
export PYTHONUNBUFFERED=1 OPTEXPORT_CACHE=

{
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv
  "$python" -c 'import sys, torch, transformers, onnxruntime
print("Python", sys.version.split()[0], "torch", torch.__version__, "transformers", transformers.__version__,
      "onnxruntime", onnxruntime.__version__, onnxruntime.get_available_providers())'
  timeout 150 "$python" -m pytest -m gpu tests/gpu -rs --durations=5
  timeout 320 "$python" -m tests.gpu.speed "$folder/speed"
} 2>&1 | tee "$folder/log.txt"
