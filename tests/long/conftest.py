from tests.unit.gateway.conftest import closed
from tests.unit.perf.conftest import run

__all__ = ["closed", "run"]
