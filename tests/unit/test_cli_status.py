"""What `kvpool status` says of how a pool is guarded, and of who follows it."""

from dataclasses import replace

import pytest

from kvpool.cli.status import _events, _security
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


def test_a_status_says_where_events_are_and_whether_followers_keep_up():
    counts = {"events_subscribers": 2, "events_messages": 1234, "events_dropped": 5, "events_lost": 0}
    publishing = replace(pool("tls"), events=("tcp://10.0.0.1:7305", "tcp://10.0.0.1:7306"), counters=counts)

    assert _events(pool("tls")) == []
    assert _events(publishing) == ["events at tcp://10.0.0.1:7305: 2 subscribers, 1,234 messages, 5 drops, 0 lost"]
    to_a_tenant = replace(publishing, counters={})
    assert _events(to_a_tenant) == ["events at tcp://10.0.0.1:7305"]
