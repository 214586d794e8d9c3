"""Tenants of a real pool: one floods it, the other keeps what it has; limits change while it runs."""

import json

import numpy as np
import pytest

import kvpool
from kvpool.cli.main import main
from tests.integration.conftest import BLOCK_BYTES, random_chain
from tests.waiting import eventually

CHAIN_BLOCKS = 16
QUIET, NOISY = (
    kvpool.Namespace(model="m", block_tokens=16, block_bytes=BLOCK_BYTES, tenant=tenant)
    for tenant in ("quiet", "noisy")
)


def used_bytes(client, tenant):
    return next(t.used_bytes for t in client.status().tenants if t.tenant == tenant)


def store_chains(keyspace, count):
    content = np.ones((CHAIN_BLOCKS, BLOCK_BYTES), np.uint8)
    chains = [random_chain(CHAIN_BLOCKS) for _ in range(count)]
    return chains, [keyspace.store(chain, content) for chain in chains]


def hits(keyspace, chains):
    return sum(keyspace.match(chain).blocks for chain in chains)


def test_a_quiet_tenant_keeps_every_block_while_a_noisy_one_floods_and_limits_change(start_pool, capsys):
    pool = start_pool(size="16MiB")  # 256 blocks
    with pool.connect() as client:
        check_tenants(client, pool, capsys)


def check_tenants(client, pool, capsys):
    quiet, noisy = client.namespace(QUIET), client.namespace(NOISY)
    kept, _ = store_chains(quiet, 7)

    for _ in range(4):  # the quiet one's blocks are the oldest all the time
        store_chains(noisy, 16)
        assert hits(quiet, kept[:1]) == CHAIN_BLOCKS
    flooded = [tenant.used_bytes for tenant in client.status().tenants]
    assert hits(quiet, kept) == 7 * CHAIN_BLOCKS, "the quiet tenant hits everything"
    assert flooded == [9 * CHAIN_BLOCKS * BLOCK_BYTES, 7 * CHAIN_BLOCKS * BLOCK_BYTES]

    changed = command(capsys, pool, "noisy", "--bytes", "2MiB")
    assert changed[0]["quota_bytes"] == 2 << 20
    eventually(lambda: used_bytes(client, "noisy") <= 2 << 20)
    _, stored = store_chains(noisy, 3)
    assert sum(result.stored for result in stored) == 3 * CHAIN_BLOCKS, "its own oldest make room"
    assert used_bytes(client, "noisy") == 2 << 20
    assert hits(quiet, kept) == 7 * CHAIN_BLOCKS

    command(capsys, pool, "noisy", "--bytes", "none", "--writes-per-s", "16")
    chains, stored = store_chains(noisy, 8)
    refused = command(capsys, pool, "noisy")[0]["refused"]["writes"]
    assert 0 < refused == sum(result.refused for result in stored)
    command(capsys, pool, "noisy", "--lookups-per-s", "0.001")
    assert [noisy.match(chains[0]).reason for _ in range(2)][1] == kvpool.MissReason.QUOTA
    assert hits(quiet, kept) == 7 * CHAIN_BLOCKS
    shown = {tenant.tenant: tenant.refused for tenant in client.status().tenants}
    assert shown["noisy"]["lookups"] == 1
    assert not any(shown["quiet"].values())


def command(capsys, pool, *arguments):
    """What `kvpool quota` says."""
    capsys.readouterr()
    assert main(["quota", *arguments, "--pool", pool.uri, "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_wrong_limit_is_refused_by_the_command_and_the_service(pool, capsys):
    assert main(["quota", "noisy", "--bytes", "1", "--pool", pool.uri]) == 2
    assert "bytes is 1; write one page or more, e.g. 64GiB, or none" in capsys.readouterr().err
    assert main(["quota", "nobody", "--pool", pool.uri]) == 2
    assert "no tenant 'nobody'" in capsys.readouterr().err
    with pool.connect() as client, pytest.raises(kvpool.UsageError, match="they are bytes, share, pins"):
        client.set_quota("noisy", blocks=3)
