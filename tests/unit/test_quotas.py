"""Limits of tenants from the outside: settings, what operators change, and what the log says."""

import threading

import pytest
import structlog
from fake_node import SmallPool, chain
from rich.console import Console

from kvpool.cli.quota import quota
from kvpool.cli.tenants import shows_tenants, tenants_table
from kvpool.client import TenantStatus
from kvpool.core.directory import DirectoryConfig
from kvpool.core.errors import SettingsError, UsageError
from kvpool.core.limits import PAGE_BYTES
from kvpool.core.namespace import Namespace
from kvpool.core.tenants import UNLIMITED, TenantLimits
from kvpool.meta.directory_config import directory_config
from kvpool.meta.quotas import LOG_EVERY_S, TRIM_BLOCKS, Quotas, tenant_message
from kvpool.ops.sources import load_settings

NOISY = Namespace(model="demo", block_tokens=1, block_bytes=PAGE_BYTES, tenant="noisy")


class Service:
    """A directory with one tenant, and what changes its limits."""

    def __init__(self, pages=50, **limits):
        config = DirectoryConfig(tenants={"noisy": TenantLimits(**limits)})
        self.pool = SmallPool(pages, namespaces=(NOISY,), config=config)
        self.work = threading.Event()
        self.quotas = Quotas(self.pool.directory, threading.Lock(), self.pool.clock, self.work)


# Settings


def test_limits_come_from_the_file_and_the_environment(tmp_path):
    path = tmp_path / "kvpool.yaml"
    path.write_text(
        "meta:\n  tenants:\n    acme: {bytes: 64GiB, share: 2, pins: 10}\n    free: {bytes: none}\n", encoding="utf-8"
    )
    environ = {"KVPOOL_META__TENANT_DEFAULT": "{bytes: 1GiB, lookups_per_s: 100, writes_per_s: 1e3}"}

    config = directory_config(load_settings(path, None, environ).meta, 0)

    assert config.tenants == {"acme": TenantLimits(bytes=64 << 30, share=2.0, pins=10), "free": UNLIMITED}
    assert config.tenant_default == TenantLimits(bytes=1 << 30, lookups_per_s=100.0, writes_per_s=1000.0)


def test_the_environment_names_tenants_too():
    environ = {"KVPOOL_META__TENANTS": "{acme: {bytes: 1GiB}}"}

    assert load_settings(None, None, environ).meta.tenants["acme"].limits == TenantLimits(bytes=1 << 30)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{acme: {bytes: 0}}", r"meta\.tenants\.acme = .*KVPOOL_META__TENANTS\): bytes is 0; write one page or more"),
        ("{acme: {bytes: 64G}}", r"meta\.tenants\.acme\.bytes = '64G' \(.*unit 'G' is not known"),
        ("{acme: {share: -1}}", r"share is -1\.0; it must be above 0"),
        ("{acme: {shares: 1}}", r"meta\.tenants\.acme\.shares = 1 .*see docs/design/quotas\.md"),
        ("{acme: {pins: many}}", r"meta\.tenants\.acme\.pins = 'many'"),
        ("{'': {pins: 1}}", "a tenant's name has 0 characters"),
        ("{acme: ", "is no YAML; write e.g."),
        ("[acme]", r"meta\.tenants = '\[acme\]'"),
    ],
)
def test_a_wrong_value_fails_with_its_key_and_a_fix(text, says):
    with pytest.raises(SettingsError, match=says):
        load_settings(None, None, {"KVPOOL_META__TENANTS": text})


# Changes


def test_a_change_keeps_what_it_does_not_name_and_wakes_the_service():
    service = Service(bytes=8 * PAGE_BYTES, pins=3)

    changed = service.quotas.change("noisy", {"share": 2.0, "lookups_per_s": 5.0}, ["pins"])

    assert changed.limits == TenantLimits(bytes=8 * PAGE_BYTES, share=2.0, lookups_per_s=5.0)
    assert service.work.is_set()


def test_a_tenant_that_has_not_come_yet_can_be_limited():
    service = Service()

    service.quotas.change("later", {"bytes": PAGE_BYTES}, [])

    later = Namespace(model="demo", block_tokens=1, block_bytes=PAGE_BYTES, tenant="later")
    service.pool.directory.open_namespace(later)
    service.pool.namespaces += (later,)
    service.pool.store(chain(1), later)
    service.pool.store(chain(2), later)
    assert [tenant.used_bytes for tenant in service.pool.directory.tenants()] == [PAGE_BYTES, 0]


@pytest.mark.parametrize(
    ("tenant", "limits", "unlimited", "says"),
    [
        ("noisy", {}, ["share"], "no limit 'share' to lift; use one of bytes, pins, lookups_per_s, writes_per_s"),
        ("noisy", {"bytes": 1}, [], "bytes is 1"),
        ("noisy", {"pins": 1}, ["pins"], "pins of 'noisy' is set and lifted at once"),
        ("", {"pins": 1}, [], "name has 0 characters"),
    ],
)
def test_a_change_that_cannot_be_changes_nothing(tenant, limits, unlimited, says):
    service = Service(pins=3)

    with pytest.raises(UsageError, match=says):
        service.quotas.change(tenant, limits, unlimited)

    assert [t.limits for t in service.pool.directory.tenants()] == [TenantLimits(pins=3)]


def test_a_tick_brings_about_a_lowered_quota_however_much_is_above():
    blocks = 2 * TRIM_BLOCKS + 1
    service = Service(blocks)
    for token in range(blocks):
        service.pool.store(chain(token))
    service.quotas.change("noisy", {"bytes": PAGE_BYTES}, [])

    service.quotas.tick()

    assert service.pool.directory.stats().used_bytes == PAGE_BYTES


# The log


def test_who_is_refused_is_logged_once_a_period():
    service = Service(lookups_per_s=1.0)
    service.pool.store(chain(1))

    def refuse(times):
        for _ in range(times + 1):
            service.pool.directory.match(NOISY.id, chain(1)[0])

    with structlog.testing.capture_logs() as logs:
        refuse(3)
        service.quotas.tick()
        assert logs == []
        service.pool.clock.advance(LOG_EVERY_S)
        service.quotas.tick()
        refuse(2)
        service.quotas.tick()
        service.pool.clock.advance(LOG_EVERY_S)
        service.quotas.tick()
        service.pool.clock.advance(LOG_EVERY_S)
        service.quotas.tick()

    said = [(entry["event"], entry["tenant"], entry["lookups"]) for entry in logs]
    assert said == [("tenant_refused", "noisy", 3), ("tenant_refused", "noisy", 2)]


# What people see


def status(service):
    return [TenantStatus.of(tenant_message(tenant)) for tenant in service.pool.directory.tenants()]


def test_a_table_shows_what_a_tenant_has_may_have_and_was_refused():
    service = Service(bytes=8 * PAGE_BYTES, pins=0, writes_per_s=2.0)
    service.pool.store(chain(1, 2, 3))

    with (console := Console(width=200)).capture() as shown:
        console.print(tenants_table(status(service)))

    row = shown.get().rstrip().splitlines()[-1]
    assert " ".join(row.split()) == "noisy 8 KiB 200 KiB 1 32 KiB 0 of 0 none 2 1 writes"


@pytest.mark.parametrize(("limits", "shows"), [({}, False), ({"share": 2.0}, False), ({"pins": 0}, True)])
def test_status_shows_tenants_where_there_is_something_to_see(limits, shows):
    assert shows_tenants(status(Service(**limits))) == shows


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"size": "1GiB"}, "which tenant is to change"),
        ({"tenant": "noisy", "size": "64G"}, "unit 'G' is not known"),
        ({"tenant": "noisy", "lookups": "many"}, "--lookups-per-s is 'many'; write a number, or none"),
        ({"tenant": "noisy", "pins": "1.5"}, "--pins is '1.5'"),
    ],
)
def test_the_command_refuses_what_it_cannot_read_before_it_connects(options, says):
    with pytest.raises(UsageError, match=says):
        quota(**options)
