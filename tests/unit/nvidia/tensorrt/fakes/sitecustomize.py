"""One H200, for processes that tests start with this folder on PYTHONPATH: libcuda answers as the driver does."""

import ctypes
import os

_real = ctypes.CDLL
ATTRIBUTES = {75: 9, 76: 0}  # compute capability


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


class Library(_real):
    def __new__(cls, name=None, *rest, **options):
        return Driver() if name == "libcuda.so.1" else super().__new__(cls)


vars(ctypes)["CDLL"] = Library
