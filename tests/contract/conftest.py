import sys

from tests.contract import fake_backend
from tests.unit.gateway.conftest import closed

__all__ = ["closed"]

sys.modules["triton_python_backend_utils"] = fake_backend  # what Triton's stub provides inside the server
