from tests.unit.gateway.conftest import change, door, gateway, own_repo, repo

__all__ = ["change", "door", "gateway", "own_repo", "repo"]
