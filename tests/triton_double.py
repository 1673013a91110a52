"""A double of tritonserver: real gRPC on a real port, in this process or as the program of a wheel, and no model that computes.

It loads and unloads what the configs of a repository say, or those that it is sent, as tritonserver does, and reports that.
"""

from __future__ import annotations

import argparse
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from google.protobuf.json_format import Parse
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

from repository.triton.models import Model, read_config, read_repository

PROJECT = Path(__file__).parents[1]
PROGRAM = f"""#!{sys.executable}
import sys
sys.path.insert(0, {str(PROJECT)!r})
from tests.triton_double import main
main()
"""


def accept(model: str) -> str:
    return ""


class TritonDouble(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Serves a repository at a gRPC port.

    before_load, before_unload, before_index: called with a model's name ("" for the index); return why to refuse, "" to go on
    loads: whether it loads the models at once
    """

    def __init__(self, repo: Path, grpc_port: int, loads: bool = True) -> None:
        self.repo = repo
        self.before_load: Callable[[str], str] = accept
        self.before_unload: Callable[[str], str] = accept
        self.before_index: Callable[[str], str] = accept
        self.states: dict[tuple[str, int], str] = {}
        for model in read_repository(repo):
            if loads:
                self._load(model)
            else:
                self.states[model.name, 0] = ""
        self._server = grpc.server(ThreadPoolExecutor(8))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"127.0.0.1:{grpc_port}")
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None).wait()

    def _load(self, model: Model) -> None:
        self._unload(model.name)
        self.states |= {(model.name, version): "READY" for version in model.versions_loaded}

    def _unload(self, name: str) -> None:
        self.states |= {place: "UNAVAILABLE" for place in self.states if place[0] == name}

    def ServerLive(self, request, context):
        return service_pb2.ServerLiveResponse(live=True)

    def ServerReady(self, request, context):
        return service_pb2.ServerReadyResponse(ready=True)

    def RepositoryIndex(self, request, context):
        _refuse(context, self.before_index(""))
        response = service_pb2.RepositoryIndexResponse()
        for (name, version), state in self.states.items():
            if (self.repo / name).exists():  # tritonserver lists no model without a folder
                response.models.add(name=name, version=str(version), state=state)
        return response

    def ModelMetadata(self, request, context):
        loaded = [str(version) for (name, version), state in self.states.items() if (name, state) == (request.name, "READY")]
        if not loaded:
            context.abort(grpc.StatusCode.NOT_FOUND, f"Request for unknown model: '{request.name}' has no available versions")
        return service_pb2.ModelMetadataResponse(name=request.name, versions=loaded)

    def RepositoryModelLoad(self, request, context):
        name = request.model_name
        _refuse(context, self.before_load(name))
        sent = request.parameters["config"].string_param
        config = Parse(sent, model_config_pb2.ModelConfig()) if sent else read_config(self.repo / name / "config.pbtxt")
        self._load(Model(name, self.repo / name, config))
        return service_pb2.RepositoryModelLoadResponse()

    def RepositoryModelUnload(self, request, context):
        _refuse(context, self.before_unload(request.model_name))
        self._unload(request.model_name)
        return service_pb2.RepositoryModelUnloadResponse()


def _refuse(context: grpc.ServicerContext, reason: str) -> None:
    if reason:
        context.abort(grpc.StatusCode.UNAVAILABLE, reason)


def write_wheel(folder: Path) -> None:
    """Write the package that has tritonserver (server/start/environment.py) with the double as its program."""
    root = folder / "pytriton" / "tritonserver"
    stub = root / "python_backend_stubs" / f"{sys.version_info.major}.{sys.version_info.minor}" / "triton_python_backend_stub"
    for path in (root / "bin" / "tritonserver", root / "backends" / "python" / "libtriton_python.so", stub):
        path.parent.mkdir(parents=True)
        path.write_text(PROGRAM)
        path.chmod(0o700)
    (folder / "pytriton" / "__init__.py").touch()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-repository", type=Path)
    parser.add_argument("--grpc-port", type=int)
    parser.add_argument("--metrics-port", type=int)
    parser.add_argument("--load-model")
    options, _ = parser.parse_known_args()
    with socket.create_server(("127.0.0.1", options.metrics_port)):
        TritonDouble(options.model_repository, options.grpc_port, loads=options.load_model == "*")
        print(f"Started GRPCInferenceService at 127.0.0.1:{options.grpc_port}", flush=True)
        threading.Event().wait()
