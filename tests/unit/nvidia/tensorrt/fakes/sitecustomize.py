"""One H200, for processes that tests start with this folder on PYTHONPATH: libcuda answers as the driver does.

FAKE_GPUS is another number of GPUs, or "no driver": libcuda then does not load, whatever this machine has.
libnvinfer, which tritonserver's backend names, has the version in FAKE_SERVED, and does not load without it.
"""

import ctypes
import os

_real = ctypes.CDLL
ATTRIBUTES = {75: int(os.environ.get("FAKE_MAJOR", "9")), 76: 0}  # compute capability


def put(pointer, value):
    ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int))[0] = value


class Driver:
    def cuInit(self, flags):
        return 0

    def cuDeviceGetCount(self, count):
        put(count, int(os.environ.get("FAKE_GPUS", "1")))
        return 0

    def cuDeviceGet(self, handle, device):
        put(handle, device)
        return 0

    def cuDeviceGetAttribute(self, value, attribute, handle):
        put(value, ATTRIBUTES[attribute])
        return 0


class Inference:
    def getInferLibVersion(self):
        return int(os.environ["FAKE_SERVED"])


class Library(_real):
    def __new__(cls, name=None, *rest, **options):
        if name == "libnvinfer.so.8" and "FAKE_SERVED" in os.environ:
            return Inference()
        if name == "libcuda.so.1" and os.environ.get("FAKE_GPUS") == "no driver":
            raise OSError(f"{name}: cannot open shared object file: No such file or directory")
        return Driver() if name == "libcuda.so.1" else super().__new__(cls)


vars(ctypes)["CDLL"] = Library
