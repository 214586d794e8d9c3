"""Transports by URI scheme: known ones open, unknown ones are named with what could be meant."""

from importlib import import_module

import pytest

from kvpool.core.errors import SettingsError, UnavailableError
from kvpool.transport import SCHEMES, Target, Transport, open_transport, scheme_of
from kvpool.transport.registry import SCHEMES as REGISTRY


def test_the_schemes_are_tried_best_first():
    assert list(SCHEMES) == ["inproc", "cuda", "shm", "ucx", "unix", "tcp"]
    assert SCHEMES is REGISTRY


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_names_a_transport(scheme):
    module, _, name = SCHEMES[scheme].partition(":")

    assert issubclass(getattr(import_module(module), name), Transport)
    assert scheme_of(f"{scheme}://anywhere") == scheme


@pytest.mark.parametrize("uri", ["rdma://host", "TCP://host:1", "", "127.0.0.1:7310", "://"])
def test_an_unknown_scheme_is_refused_with_the_known_ones(uri):
    with pytest.raises(SettingsError, match="use one of inproc, cuda, shm, ucx, unix, tcp"):
        scheme_of(uri)
    with pytest.raises(SettingsError, match="is not known"):
        open_transport(Target(uri, "me", 1, 1, 1.0))


@pytest.mark.parametrize("scheme", ["inproc", "shm", "unix"])
def test_a_node_that_is_not_there_is_unavailable(scheme, tmp_path):
    with pytest.raises(UnavailableError):
        open_transport(Target(f"{scheme}://{tmp_path}/nobody", "me", 1, 1, 1.0))
