"""Pools for crowds are those of the integration tests."""

from tests.integration.conftest import start_pool

__all__ = ["start_pool"]
