"""Stand-ins for NVIDIA's backends in a copy of a merlin repository: they enforce the backends' documented rules and compute
from the exported files. What they refuse, the real ones refuse or answer wrongly; what only a GPU can tell, they cannot.

    hps         ps.json through both parsers, `key` and `emb_vector` as raw bytes
    tensorrt    model.onnx by ONNX Runtime, rounded where its types say so, shapes held against the profiles of engine.json

`stand_in(repository, mount)` swaps the backends; `Hps` and `TensorRT` are what the swapped models run.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np

from hps_config.parsers import load_json
from hps_config.reader import check_document
from repository.triton.models import read_config, write_config
from serving.contract.errors import RequestError

Arrays = dict[str, np.ndarray]
PROJECT = Path(__file__).parents[3]
RESERVED = (-1, 2**63 - 1)
MODEL_PY = """
import sys
sys.path.insert(0, {project!r})
import triton_python_backend_utils as pb_utils
from tests.server.support.merlin_doubles import {kind}

class TritonPythonModel:
    def initialize(self, args):
        try:
            self.model = {kind}({folder!r}, {config!r})
        except Exception as error:
            raise pb_utils.TritonModelException(repr(error)) from error

    def execute(self, requests):
        tensors = [tensor for request in requests for tensor in request.inputs()]
        given = [{{tensor.name(): tensor.as_numpy() for tensor in request.inputs()}} for request in requests]
        try:
            answers = self.model.batch(given, all(tensor.is_cpu() for tensor in tensors))
        except Exception as error:
            return [pb_utils.InferenceResponse(error=pb_utils.TritonError(repr(error))) for _ in requests]
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in outputs.items()]) for outputs in answers
        ]
"""


def stand_in(repository: Path, mount: str) -> None:
    """Replace the backends `hps` and `tensorrt` by Python ones, in place; ps.json gets the paths of this machine."""
    ps = repository / "ps.json"
    if ps.exists():
        ps.write_text(ps.read_text().replace(f'"{mount}/', f'"{repository}/'))
    for model in sorted(path.parent for path in repository.glob("*/config.pbtxt")):
        config = read_config(model / "config.pbtxt")
        kind = {"hps": "Hps", "tensorrt": "TensorRT"}.get(config.backend)
        if kind is None:
            continue
        text = (model / "config.pbtxt").read_text()
        folder = model / str(config.version_policy.specific.versions[0])
        code = MODEL_PY.format(project=str(PROJECT), kind=kind, folder=str(folder), config=text)
        (folder / "model.py").write_text(code)
        (folder / "__pycache__").touch()
        config.backend, config.platform, config.default_model_filename = "python", "", "model.py"
        config.ClearField("optimization")
        del config.model_warmup[:]
        del config.instance_group[:]
        config.instance_group.add(kind=2, count=1)  # KIND_CPU
        write_config(model / "config.pbtxt", config)


def demand(condition: bool, rule: str, found: object) -> None:
    if not condition:
        raise RequestError(f"{rule}; found {found}.")


class Hps:
    """One model of the `hps` backend (docs of the rules: hps.cc, model_state.cpp, model_instance_state.cpp)."""

    def __init__(self, folder: str, config_text: str) -> None:
        from google.protobuf import text_format
        from tritonclient.grpc import model_config_pb2 as pb

        config = text_format.Parse(config_text, pb.ModelConfig())
        self.check_config(config, pb)
        document = load_json(Path(folder).parents[1] / "ps.json")
        parsed, findings = check_document(document)
        errors = [str(finding) for finding in findings if finding.level == "error"]
        demand(not errors, "ps.json satisfies both parsers", errors)
        self.params = {model.model: model for model in parsed.models}[config.name]  # .at(): the name must be there
        [group] = config.instance_group
        demand(set(group.gpus) <= set(self.params.deployed_device_list), "every gpu is deployed", group.gpus)
        demand(group.count <= self.params.num_of_worker_buffer_in_pool, "a worker buffer per instance", group.count)
        demand(self.params.exact, "answers are compared: hit_rate_threshold of 1 or more", self.params.hit_rate_threshold)
        self.rows = [
            self.read(Path(path), width)
            for path, width in zip(self.params.sparse_files, self.params.embedding_vecsize_per_table, strict=True)
        ]

    @staticmethod
    def check_config(config, pb) -> None:
        inputs = [(tensor.name, tensor.data_type, tensor.dims[0]) for tensor in config.input]
        demand(inputs == [("KEYS", pb.TYPE_INT64, -1), ("NUMKEYS", pb.TYPE_INT32, -1)], "inputs KEYS, NUMKEYS", inputs)
        outputs = [(tensor.data_type, tensor.dims[0]) for tensor in config.output]
        demand(outputs == [(pb.TYPE_FP32, -1)], "one FP32 output [-1]", outputs)
        demand(not config.HasField("dynamic_batching"), "no dynamic batching", "dynamic_batching")
        demand(len(config.instance_group) == 1 and config.instance_group[0].kind == pb.ModelInstanceGroup.KIND_GPU, "GPU", "")
        interval = config.parameters["refresh_interval"].string_value
        demand(interval.isdecimal(), "refresh_interval is a whole number of seconds", interval)

    @staticmethod
    def read(folder: Path, width: int) -> dict[int, bytes]:
        """Return the bytes of each key's vector, read without the code that wrote them."""
        keys, vectors = (folder / "key").read_bytes(), (folder / "emb_vector").read_bytes()
        demand(len(keys) % 8 == 0 and len(vectors) == len(keys) // 8 * 4 * width, "8n and 4 n width bytes", folder)
        rows = {key: vectors[i * 4 * width : (i + 1) * 4 * width] for i, (key,) in enumerate(struct.iter_unpack("<q", keys))}
        demand(len(rows) == len(keys) // 8 and not rows.keys() & set(RESERVED), "unique keys, none reserved", folder)
        return rows

    def batch(self, requests: list[Arrays], on_cpu: bool) -> list[Arrays]:
        """The backend runs one request at a time, whatever it is handed."""
        demand(len(requests) == 1, "one request at a time", len(requests))
        return [self(requests[0], on_cpu)]

    def __call__(self, inputs: Arrays, on_cpu: bool) -> Arrays:
        keys, counts = inputs["KEYS"], inputs["NUMKEYS"]
        tables = len(self.params.sparse_files)
        demand(on_cpu, "inputs lie in CPU memory", "GPU")
        demand(keys.dtype == np.int64 and counts.dtype == np.int32, "INT64 and INT32", (keys.dtype, counts.dtype))
        demand(keys.ndim == 2 and keys.shape[0] == 1 and keys.flags.c_contiguous, "KEYS is [1, K] in one buffer", keys.shape)
        demand(counts.shape == (1, tables), f"NUMKEYS is [1, {tables}]", counts.shape)
        demand(counts.sum() == keys.size, "NUMKEYS sums to the number of keys", (counts.tolist(), keys.size))
        demand(not np.isin(keys, RESERVED).any(), "no reserved key", RESERVED)
        per_sample = sum(self.params.maxnum_catfeature_query_per_table_per_sample)
        demand(keys.size % per_sample == 0, f"whole samples of {per_sample} keys", keys.size)
        demand(keys.size // per_sample <= self.params.max_batch_size, "at most max_batch_size samples", keys.size // per_sample)
        flat, start = [], 0
        for table, count in enumerate(counts[0].tolist()):
            default = struct.pack("<f", self.params.default_value_for_each_table[table])
            default *= self.params.embedding_vecsize_per_table[table]
            flat += [self.rows[table].get(key, default) for key in keys[0, start : start + count].tolist()]
            start += count
        return {"OUTPUT0": np.frombuffer(b"".join(flat), "<f4")}


class TensorRT:
    """One engine, as tritonserver would run it: float32 in, shapes that some profile accepts."""

    def __init__(self, folder: str, config_text: str) -> None:
        import onnx
        from google.protobuf import text_format
        from tritonclient.grpc import model_config_pb2 as pb

        from export.nvidia.precision.faithful import open_faithful_session

        config = text_format.Parse(config_text, pb.ModelConfig())
        demand(config.platform == "tensorrt_plan", "platform tensorrt_plan", config.platform)
        demand(config.default_model_filename == "model.plan", "model.plan", config.default_model_filename)
        demand(all(g.kind == pb.ModelInstanceGroup.KIND_GPU and g.gpus for g in config.instance_group), "GPUs only", "other")
        self.batched = config.max_batch_size > 0
        self.dims = {tensor.name: tuple(tensor.dims) for tensor in config.input}
        self.outputs = [tensor.name for tensor in config.output]
        self.profiles = json.loads((Path(folder) / "engine.json").read_text())["profiles"]
        self.session = open_faithful_session(onnx.load(str(Path(folder) / "model.onnx")))
        engine = {tensor.name: len(tensor.shape) for tensor in self.session.get_inputs()}
        demand(engine == {n: len(d) + self.batched for n, d in self.dims.items()}, "one axis more where Triton batches", engine)

    def batch(self, requests: list[Arrays], on_cpu: bool) -> list[Arrays]:
        """Run requests that tritonserver passes together as one batch: the profiles must accept all its rows."""
        if not self.batched:
            demand(len(requests) == 1, "one request at a time where the model has no batch axis", len(requests))
            return [self(requests[0])]
        rows = [len(next(iter(request.values()))) for request in requests]
        outputs = self({name: np.concatenate([request[name] for request in requests]) for name in requests[0]})
        ends = np.cumsum(rows).tolist()
        return [{name: array[end - n : end] for name, array in outputs.items()} for n, end in zip(rows, ends, strict=True)]

    def __call__(self, inputs: Arrays) -> Arrays:
        for name, array in inputs.items():
            demand(array.dtype == np.float32, f"{name} is FP32", array.dtype)
        accepting = [profile for profile in self.profiles if all(within(inputs[n].shape, span) for n, span in profile.items())]
        demand(bool(accepting), "shapes within a profile", {name: array.shape for name, array in inputs.items()})
        return dict(zip(self.outputs, self.session.run(self.outputs, inputs), strict=True))


def within(shape: tuple[int, ...], span: list[list[int]]) -> bool:
    smallest, _, largest = span
    return len(shape) == len(largest) and all(a <= n <= b for a, n, b in zip(smallest, shape, largest, strict=True))
