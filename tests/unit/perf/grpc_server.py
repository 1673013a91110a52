"""A gRPC server of grpcio's with Triton's method, which a function answers."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

from perf.open_loop import INFER

Answers = Callable[[bytes, grpc.ServicerContext], bytes]


@contextlib.contextmanager
def serving(answers: Answers, workers: int = 8, options: tuple[tuple[str, int], ...] = ()) -> Iterator[str]:
    """-> "127.0.0.1:port". workers: calls answered at a time."""
    _, service, method = INFER.split("/")
    handler = grpc.method_handlers_generic_handler(service, {method: grpc.unary_unary_rpc_method_handler(answers)})
    server = grpc.server(ThreadPoolExecutor(workers), [handler], options=options)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
