from tests.unit.perf.conftest import choice, vectors

__all__ = ["choice", "vectors"]
