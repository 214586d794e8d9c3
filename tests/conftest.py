"""What holds for all tests, and Hypothesis profiles: ``ci`` finds the same examples each time, ``dev`` searches on.

``KVPOOL_HYPOTHESIS_PROFILE=dev pytest tests/property`` looks for new failures; it prints how to repeat one.
"""

import os

import pytest
import structlog
from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=400, stateful_step_count=50)
settings.register_profile("dev", deadline=None, max_examples=5_000, stateful_step_count=80, print_blob=True)
settings.load_profile(os.environ.get("KVPOOL_HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(autouse=True)
def reset_logging():
    """A command that runs in this process sets it to a standard error that ends with its test."""
    yield
    structlog.reset_defaults()
