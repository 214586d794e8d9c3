"""Where a shared state may be, and what is refused before anything starts."""

import os
import time

import pytest
from pydantic import ValidationError

from kvpool.core.errors import SettingsError, UnavailableError
from kvpool.meta import MetaServer
from kvpool.meta.shared.service import SharedMetaService
from kvpool.meta.store.link import RedisLink, library
from kvpool.ops.settings import ClientSettings, MetaSettings, NodeSettings

NOBODY = "redis://127.0.0.1:1"


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("redis+cluster://here", "no address"),
        ("redis+sentinel://127.0.0.1:26379", "names no primary"),
        ("http://127.0.0.1:6379", "no place"),
        ("redis://", "no place"),
    ],
)
def test_a_url_that_leads_nowhere_is_refused(url, problem):
    with pytest.raises(SettingsError, match=problem):
        RedisLink(url, 0.1)


def test_a_password_in_the_url_is_refused_since_settings_are_shown():
    with pytest.raises(ValidationError, match="state_password_file"):
        MetaSettings(state="redis://user:secret@127.0.0.1:6379")
    assert MetaSettings(state="redis://user@127.0.0.1:6379").state


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("policy", "default"),
        ("tenants", {"acme": {"bytes": "1GiB"}}),
        ("tenant_default", {"pins": 3}),
        ("events_port", 7305),
    ],
)
def test_what_is_not_there_in_redis_is_refused_by_its_name(name, value):
    with pytest.raises(SettingsError, match=rf"meta\.{name} is .*; with meta\.state"):
        MetaServer(MetaSettings(state=NOBODY, **{name: value}))


def test_a_password_file_that_is_not_there_is_named(tmp_path):
    settings = MetaSettings(state=NOBODY, state_password_file=tmp_path / "secret")
    with pytest.raises(SettingsError, match="state_password_file cannot be read"):
        SharedMetaService(settings, time.monotonic, os.urandom)


def test_without_redis_a_service_starts_and_answers_with_misses():
    service = SharedMetaService(MetaSettings(state=NOBODY), time.monotonic, os.urandom)
    asked = [service.match(bytes(32), bytes(64), 0, 0.0) for _ in range(3)]
    assert [(match.blocks, match.reason) for match in asked] == [(0, "recovering")] * 3
    assert service.locate(bytes(32), bytes(64), 0, None).reason == "recovering"
    assert service.away == 4
    with pytest.raises(UnavailableError):
        service.reserve(bytes(32), bytes(64), 0, b"", "", 1.0)
    service.tick()
    service.close()


def test_pools_are_named_by_one_service_or_by_several():
    several = "grpc://127.0.0.1:7300,grpc://meta-2:7300"
    assert NodeSettings(meta=several).meta == several
    assert ClientSettings(pool=several).pool == several
    with pytest.raises(ValidationError, match="several with commas"):
        NodeSettings(meta="grpc://127.0.0.1:7300,127.0.0.1:7301")


def test_the_library_is_named_after_what_it_does():
    source, suffix = library()
    assert source.startswith(f"#!lua name=kvpool{suffix}\n")
