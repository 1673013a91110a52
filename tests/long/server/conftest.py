from tests.unit.server.conftest import installed_double, run_dir, sleeping, state

__all__ = ["installed_double", "run_dir", "sleeping", "state"]
