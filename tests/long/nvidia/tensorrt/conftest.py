from tests.unit.nvidia.tensorrt.conftest import version

__all__ = ["version"]
