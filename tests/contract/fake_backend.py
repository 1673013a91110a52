"""`triton_python_backend_utils` as the Python backend documents it, so that tests of the adapter need no server."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np


class TritonModelException(Exception):
    pass


class TritonError:
    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message, self._code = message, code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class Tensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array


class InferenceRequest:
    """Texts are decoded when they are read: over HTTP, tritonserver takes any bytes for them."""

    def __init__(self, parameters: bytes | str = b"{}", request_id: bytes = b"fake-request", /, **tensors: np.ndarray) -> None:
        self._parameters = parameters.encode() if isinstance(parameters, str) else parameters
        self._request_id = request_id
        self._inputs = [Tensor(name, array) for name, array in tensors.items()]

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def parameters(self) -> str:
        return self._parameters.decode()

    def request_id(self) -> str:
        return self._request_id.decode()


class InferenceResponse:
    def __init__(self, output_tensors: list[Tensor] | None = None, error: TritonError | None = None) -> None:
        self._outputs, self._error = output_tensors or [], error

    def output_tensors(self) -> list[Tensor]:
        return self._outputs

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error


class Metric:
    def __init__(self) -> None:
        self.value = 0.0

    def increment(self, amount: float) -> None:
        assert amount >= 0
        self.value += amount

    def set(self, value: float) -> None:
        self.value = value


class MetricFamily:
    COUNTER, GAUGE = 0, 1
    metrics: ClassVar[dict[str, Metric]] = {}

    def __init__(self, name: str, description: str, kind: int) -> None:
        self._name = name

    def Metric(self, labels: dict[str, str]) -> Any:
        return self.metrics.setdefault("/".join([self._name, *labels.values()]), Metric())


class Logger:
    lines: ClassVar[list[str]] = []

    @classmethod
    def log_error(cls, line: str) -> None:
        cls.lines.append(line)

    log_warn = log_error
