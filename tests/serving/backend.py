"""Replaces Triton's ONNX Runtime and PyTorch backends, which only NVIDIA's images contain.

Triton's Python backend runs this file in a separate process for each model. Like NVIDIA's backends, it names inputs
after those in the file, joins the rows of all pending requests into one batch, and returns each request its rows.
"""

import json
import os
import time

import numpy as np
import triton_python_backend_utils as triton


def _array(tensor):
    """Returns a tensor's values. Its as_numpy method needs NumPy 1, and so does the way back."""
    return np.from_dlpack(tensor).copy()


class TritonPythonModel:
    def initialize(self, args):
        self.config = json.loads(args["model_config"])
        path = os.path.join(args["model_repository"], args["model_version"], self.config["default_model_filename"])
        names = [output["name"] for output in self.config["output"]]
        if self.config["backend"] == "onnxruntime":
            import onnxruntime

            session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
            scalars = {value.name for value in session.get_inputs() if not value.shape}
            self.run = lambda inputs: session.run(
                names, {name: array.reshape(()) if name in scalars else array for name, array in inputs.items()}
            )
        else:
            import torch

            module = torch.jit.load(path)
            arguments = [argument.name for argument in module.forward.schema.arguments[1:]]
            positions = [int(name.removeprefix("OUTPUT__")) for name in names]

            def run(inputs):
                with torch.inference_mode():
                    results = module(*(torch.from_numpy(inputs[name].copy()) for name in arguments))
                return [results[place].numpy() for place in positions]

            self.run = run

    def execute(self, requests):
        time.sleep(0.05)  # so that simultaneous requests can meet
        names = [value["name"] for value in self.config["input"]]
        batches = [{name: _array(triton.get_input_tensor_by_name(each, name)) for name in names} for each in requests]
        if not self.config["max_batch_size"]:
            return [self._response(self.run(inputs)) for inputs in batches]
        results = self.run({name: np.concatenate([inputs[name] for inputs in batches]) for name in names})
        ends = np.cumsum([len(inputs[names[0]]) for inputs in batches])[:-1]
        return [self._response(parts) for parts in zip(*(np.split(result, ends) for result in results), strict=True)]

    def _response(self, results):
        return triton.InferenceResponse(
            [
                triton.Tensor.from_dlpack(output["name"], np.array(result).reshape(result.shape or (1,)))
                for output, result in zip(self.config["output"], results, strict=True)
            ]
        )
