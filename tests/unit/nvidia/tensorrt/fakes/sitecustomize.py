"""One H200, for processes that tests start with this folder on PYTHONPATH: libcuda answers as the driver does."""

import ctypes
import os

_real = ctypes.CDLL
ATTRIBUTES = {75: 9, 76: 0}  # compute capability


class Driver:
    def cuInit(self, flags):
        return 0

    def cuDeviceGetCount(self, count):
        count._obj.value = int(os.environ.get("FAKE_GPUS", "1"))
        return 0

    def cuDeviceGet(self, handle, device):
        handle._obj.value = device
        return 0

    def cuDeviceGetAttribute(self, value, attribute, handle):
        value._obj.value = ATTRIBUTES[attribute]
        return 0


class Library(_real):
    def __new__(cls, name=None, *rest, **options):
        return Driver() if name == "libcuda.so.1" else super().__new__(cls)


ctypes.CDLL = Library
