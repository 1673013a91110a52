import sys

from tests.contract import fake_backend

sys.modules["triton_python_backend_utils"] = fake_backend  # what Triton's stub provides inside the server
