"""Triton's HTTP protocol over a fake, in this process: JSON and binary tensors, as a KServe v2 server takes them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import numpy as np
from tritonclient.utils import deserialize_bytes_tensor, np_to_triton_dtype, triton_to_np_dtype

from tests.pages import POLL_S
from tests.unit.clients.grpc_double import CONTEXT, SIZES
from triton_recommender.models import Call
from triton_recommender.testing import FakeTransport

LENGTH = "Inference-Header-Content-Length"


class Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print no traceback of a client that gave up: it parses source code, which no two threads may do at a time."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class HttpDouble:
    """`failures`: statuses and messages to answer the next infer calls with.

    `headers`, `connections`: of every infer call, its headers, and the number of its connection.
    """

    def __init__(self, handler: Callable, **sizes: int) -> None:
        """sizes: instead of those of SIZES"""
        self.fake = FakeTransport(handler, context=CONTEXT, **SIZES | sizes)
        self.failures: list[tuple[int, str]] = []
        self.headers: list[dict[str, str]] = []
        self.connections: list[int] = []
        self._server = Server(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        Thread(target=self._server.serve_forever, args=(POLL_S,), daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def describe(self, model: str) -> dict:
        def tensors(described) -> list[dict]:
            return [
                {"name": name, "data_type": "TYPE_STRING" if dtype == "BYTES" else f"TYPE_{dtype}", "dims": [str(length)]}
                for name, (dtype, length) in described.items()
            ]

        found = self.fake.models[model]
        return {"input": tensors(found.inputs), "output": tensors(found.outputs), "max_batch_size": found.max_batch}

    def infer(self, model: str, body: bytes, header_length: int | None) -> tuple[bytes, int | None]:
        """Return the body, and the length of its JSON where tensors follow it."""
        header = json.loads(body[:header_length])
        rest, inputs = body[header_length:] if header_length is not None else b"", {}
        for tensor in header["inputs"]:
            size = tensor.get("parameters", {}).get("binary_data_size")
            inputs[tensor["name"]] = _from_json(tensor) if size is None else _from_bytes(tensor, rest[:size])
            rest = rest[size or 0 :]
        outputs = self.fake.infer(Call(inputs, model=model))
        described = [
            {"name": name, "datatype": np_to_triton_dtype(array.dtype), "shape": list(array.shape)}
            for name, array in outputs.items()
        ]
        if not header.get("parameters", {}).get("binary_data_output"):
            for tensor, array in zip(described, outputs.values(), strict=True):
                tensor["data"] = array.ravel().tolist()
            return json.dumps({"model_name": model, "outputs": described}).encode(), None
        for tensor, array in zip(described, outputs.values(), strict=True):
            tensor["parameters"] = {"binary_data_size": array.nbytes}
        text = json.dumps({"model_name": model, "outputs": described}).encode()
        return text + b"".join(array.tobytes() for array in outputs.values()), len(text)

    def _handler(double):
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                parts = self.path.strip("/").split("/")
                documents = {"config": lambda: double.describe(parts[2]), "ready": lambda: {}}
                self._answer(200, json.dumps(documents.get(parts[-1], lambda: {"versions": ["2"]})()).encode())

            def do_POST(self):
                double.headers.append(dict(self.headers.items()))
                double.connections.append(self.client_address[1])
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if double.failures:
                    status, message = double.failures.pop(0)
                    self._answer(status, json.dumps({"error": message}).encode())
                    return
                length = self.headers.get(LENGTH)
                data, json_length = double.infer(self.path.split("/")[3], body, None if length is None else int(length))
                self._answer(200, data, json_length)

            def _answer(self, status: int, body: bytes, json_length: int | None = None) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                if json_length is not None:
                    self.send_header(LENGTH, str(json_length))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Quiet."""

        return Handler


def _from_json(tensor: dict) -> np.ndarray:
    dtype = triton_to_np_dtype(tensor["datatype"])
    values = [text.encode() for text in tensor["data"]] if tensor["datatype"] == "BYTES" else tensor["data"]
    return np.array(values, dtype).reshape(tensor["shape"])


def _from_bytes(tensor: dict, raw: bytes) -> np.ndarray:
    is_text = tensor["datatype"] == "BYTES"
    values = deserialize_bytes_tensor(raw) if is_text else np.frombuffer(raw, triton_to_np_dtype(tensor["datatype"]))
    return values.reshape(tensor["shape"])
