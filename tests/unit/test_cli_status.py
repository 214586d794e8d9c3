"""What `kvpool status` says of how a pool is guarded."""

import pytest

from kvpool.cli.status import _security
from kvpool.client.results import NodeStatus, PoolStatus, RecoveryStatus


def pool(security, *endpoints):
    node = NodeStatus("n0", "ready", 0, 0, 0, endpoints, None, ())
    return PoolStatus(
        1,
        "0",
        {},
        (node,),
        {},
        RecoveryStatus(active=False, nodes_reported=1, nodes_expected=1, lasted_s=0.0),
        security,
    )


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (pool("tls", "tls://10.0.0.1:7310"), "security: TLS"),
        (pool("loopback", "tcp://127.0.0.1:7310", "shm:///run/n0"), "security: none, on loopback alone"),
        (pool("loopback", "tcp://[::1]:7310"), "security: none, on loopback alone"),
        (pool("insecure", "tls://10.0.0.1:7310"), "INSECURE: plaintext, for anybody who reaches the metadata service"),
        (pool("tls", "tcp://10.0.0.1:7310"), "INSECURE: plaintext, for anybody who reaches n0"),
    ],
)
def test_every_status_says_how_the_pool_is_guarded(status, says):
    (line,) = _security(status)
    assert line.startswith(says)
