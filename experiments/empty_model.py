"""Serve a model that computes nothing: it answers every request with zeros in the shapes that its config.pbtxt promises.

Copied as `model.py` by `experiments/overhead.py`; it imports nothing of ours.
"""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.dims = {output["name"]: [int(n) for n in output["dims"]] for output in config["output"]}
        self.dtypes = {output["name"]: pb_utils.triton_string_to_numpy(output["data_type"]) for output in config["output"]}

    def execute(self, requests):
        return [self.answer(len(request.inputs()[0].as_numpy())) for request in requests]

    def answer(self, rows):
        tensors = [pb_utils.Tensor(name, np.zeros((rows, *dims), self.dtypes[name])) for name, dims in self.dims.items()]
        return pb_utils.InferenceResponse(tensors)
