"""Published as model.py beside model.onnx: the TensorRT engine's tensors, from ONNX Runtime in the Python backend.

Needs only numpy and onnxruntime, which merlin-hugectr images contain.
"""

import json
import os

import numpy as np
import triton_python_backend_utils as pb_utils

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # without it, ONNX Runtime's wheels report to Microsoft from the import on
import onnxruntime as ort

PROVIDERS = ("CUDAExecutionProvider", "CPUExecutionProvider")


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        self.batched = int(config["max_batch_size"]) > 0
        self.inputs = [tensor["name"] for tensor in config["input"]]
        self.outputs = [tensor["name"] for tensor in config["output"]]
        path = os.path.join(args["model_repository"], args["model_version"], "model.onnx")
        options = ort.SessionOptions()
        options.inter_op_num_threads = 1
        available = ort.get_available_providers()
        self.session = ort.InferenceSession(path, options, providers=[name for name in PROVIDERS if name in available])

    def execute(self, requests: list) -> list:
        """Run all requests at once where they have a batch axis, else one by one."""
        feeds = [{tensor.name(): tensor.as_numpy() for tensor in request.inputs()} for request in requests]
        if not self.batched:
            return [self._make_response(self.session.run(self.outputs, feed)) for feed in feeds]
        joined = {name: np.concatenate([feed[name] for feed in feeds]) for name in self.inputs}
        ends = np.cumsum([len(feed[self.inputs[0]]) for feed in feeds])[:-1]
        parts = zip(*(np.split(array, ends) for array in self.session.run(self.outputs, joined)), strict=True)
        return [self._make_response(arrays) for arrays in parts]

    def _make_response(self, arrays) -> "pb_utils.InferenceResponse":
        tensors = [pb_utils.Tensor(name, np.ascontiguousarray(array)) for name, array in zip(self.outputs, arrays, strict=True)]
        return pb_utils.InferenceResponse(output_tensors=tensors)
