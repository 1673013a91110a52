from tests.unit.perf.conftest import run

__all__ = ["run"]
