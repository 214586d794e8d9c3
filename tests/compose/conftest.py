"""One stack for all tests here: starting it costs more than most of them."""

import os
from collections.abc import Iterator

import pytest

from tests.compose.stack import NODES, Stack, why_not


@pytest.fixture(scope="session")
def running() -> Iterator[Stack]:
    if reason := why_not():
        pytest.skip(reason)
    stack = Stack(f"kvpooltest{os.getpid()}")
    try:
        stack.up()
        yield stack
    finally:
        stack.down()


@pytest.fixture
def stack(running: Stack) -> Iterator[Stack]:
    """The stack, whole before and after each test."""
    running.until_ready(*NODES)
    yield running
    running.until_ready(*NODES)
