"""gRPC servers: one of grpcio's with Triton's method, which a function answers, and one that says what a script says."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
from hyperframe.frame import Frame

from perf.load.open_loop import INFER
from perf.load.unary import FRAME_HEADER, PREFACE

Answers = Callable[[bytes, grpc.ServicerContext], bytes]


@contextlib.contextmanager
def serving(answers: Answers, workers: int = 8, options: tuple[tuple[str, int], ...] = ()) -> Iterator[str]:
    """Return "127.0.0.1:port". workers: calls answered at a time."""
    _, service, method = INFER.split("/")
    handler = grpc.method_handlers_generic_handler(service, {method: grpc.unary_unary_rpc_method_handler(answers)})
    server = grpc.server(ThreadPoolExecutor(workers), [handler], options=options)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@contextlib.contextmanager
def scripted(script):
    """A server of one connection: `script` gets its socket when the client has said who it is. -> its address"""

    def accept():
        with contextlib.suppress(OSError), listening.accept()[0] as peer:
            peer.recv(len(PREFACE))
            script(peer)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = threading.Thread(target=accept)
        serving.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
        serving.join()


def frames_of(peer):
    """Yield the frames that the client sends, until it closes."""
    while header := peer.recv(FRAME_HEADER.size, socket.MSG_WAITALL):
        frame, length = Frame.parse_frame_header(memoryview(header))
        frame.parse_body(memoryview(peer.recv(length, socket.MSG_WAITALL)))
        yield frame
