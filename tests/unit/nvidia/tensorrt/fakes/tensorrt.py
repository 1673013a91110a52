"""`import tensorrt` for processes that tests start with this folder on PYTHONPATH: the version in FAKE_TENSORRT."""

import importlib.util
import os
from pathlib import Path

_path = Path(__file__).parents[1] / "fake_tensorrt.py"
_spec = importlib.util.spec_from_file_location("fake_tensorrt", _path)
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
if "FAKE_TENSORRT" not in os.environ:
    raise ImportError("libnvinfer.so cannot be opened")
globals().update({name: value for name, value in vars(_module.fake(os.environ["FAKE_TENSORRT"])).items() if name != "__name__"})
