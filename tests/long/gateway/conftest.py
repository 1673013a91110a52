from tests.unit.gateway.conftest import own_repo

__all__ = ["own_repo"]
