"""The event stream without sockets: what its messages say, what is kept of them, and what a follower makes of them."""

import stat

import msgspec
import pytest
import zmq
from fake_node import SmallPool, chain, make_namespace
from zmq.utils import z85

from kvpool.cli.events import _show
from kvpool.cli.main import main
from kvpool.cli.output import Format
from kvpool.core.directory import Changes, Pile
from kvpool.core.directory.journal import Journal
from kvpool.core.errors import CapacityError, ProtocolError, SettingsError
from kvpool.events import Source, Told
from kvpool.events.index import Fit, PoolIndex
from kvpool.meta.events import EventPublisher, stream
from kvpool.meta.events.admitting import admit
from kvpool.meta.events.encoding import BLOCKS_MAX, EVENTS_MAX, batches_of, events_of
from kvpool.meta.events.stream import EventStream
from kvpool.meta.service import MetaService
from kvpool.ops.curve import Followers, follower_keys, read_keys, secret_file
from kvpool.ops.settings import MetaSettings, TlsSettings
from kvpool.transport.wire import events as wire
from kvpool.transport.wire.events import AllBlocksCleared, BlockRemoved, BlockStored, SnapshotPart, SnapshotRequest

SMALL, LARGE = make_namespace(), make_namespace(pages=2)
HASHES = [bytes([i]) * 32 for i in range(200)]


def stored(hashes, parent=None, namespace=SMALL):
    return BlockStored(
        block_hashes=hashes, parent_block_hash=parent, block_size=1, ownership=wire.ownership(namespace.id)
    )


def removed(hashes, namespace=SMALL):
    return BlockRemoved(block_hashes=hashes, ownership=wire.ownership(namespace.id))


def events(*changes):
    return list(events_of(columns(*changes), [SMALL, LARGE]))


def columns(*changes):
    """(namespace number, hash, parent) as columns."""
    return Changes(*map(list, zip(*changes, strict=True)))


def new_stream(replay_batches=100):
    made = EventStream(1000, 7, replay_batches, lambda: 0.0)
    made.learn([SMALL, LARGE])
    return made


def told(message):
    return wire.decode_batch(message.payload).events


# Messages


def test_a_chain_is_one_event():
    a, b, c, d, *_ = HASHES

    assert events((0, a, b""), (0, b, a), (0, c, b)) == [stored([a, b, c])]
    assert events((0, c, b), (0, d, c)) == [stored([c, d], parent=b)]


def test_branches_and_namespaces_are_events_of_their_own():
    a, b, c, *_ = HASHES

    assert events((0, a, b""), (0, b, a), (0, c, a)) == [stored([a, b]), stored([c], parent=a)]
    assert events((0, a, b""), (1, a, b"")) == [stored([a]), stored([a], namespace=LARGE)]


def test_blocks_that_go_together_are_one_event_and_order_is_kept():
    a, b, *_ = HASHES

    assert events((0, b, None), (0, a, None), (0, a, b"")) == [removed([b, a]), stored([a])]


def test_a_message_has_a_limit_of_blocks_and_of_events():
    one_chain = columns(*[(0, i.to_bytes(32), (i - 1).to_bytes(32) if i else b"") for i in range(BLOCKS_MAX + 1)])
    many_roots = columns(*[(0, i.to_bytes(32), b"") for i in range(EVENTS_MAX + 1)])

    lengths = [[len(e.block_hashes) for e in b] for b in batches_of(events_of(one_chain, [SMALL]))]
    counts = [len(batch) for batch in batches_of(events_of(many_roots, [SMALL]))]

    assert lengths == [[BLOCKS_MAX], [1]]
    assert counts == [EVENTS_MAX, 1]


def test_tokens_are_told_to_nobody():
    record = msgspec.msgpack.decode(wire.encode(wire.EventBatch(0.0, [stored(HASHES[:2])])))[1][0]

    assert record["token_ids"] == []
    assert set(record) == {
        "type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
        "locality", "ownership",
    }  # fmt: skip


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x91" * 1000,
        msgspec.msgpack.encode([0.0, [{"type": "BlockExploded"}]]),
        msgspec.msgpack.encode([0.0, [{"type": "BlockRemoved", "block_hashes": [bytes(31)]}]]),
        wire.encode(wire.EventBatch(0.0, [BlockRemoved(block_hashes=[bytes(31)], ownership=wire.ownership(SMALL.id))])),
        wire.encode(wire.EventBatch(0.0, [BlockRemoved(block_hashes=[bytes(32)], ownership="lmcache:00")])),
        wire.encode(wire.EventBatch(0.0, [BlockRemoved(block_hashes=[bytes(32)])])),
        bytes(wire.MESSAGE_BYTES_MAX + 1),
    ],
)
def test_what_is_no_message_is_a_protocol_error(data):
    with pytest.raises(ProtocolError):
        wire.decode_batch(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes(wire.REQUEST_BYTES_MAX + 1),
        msgspec.msgpack.encode(["snapshot", 0]),
        msgspec.msgpack.encode(["snapshot", -1, 1]),
        msgspec.msgpack.encode(["snapshot", 0, wire.PART_ROWS_MAX + 1]),
        msgspec.msgpack.encode(["snapshot", 1 << 40, 1]),
        msgspec.msgpack.encode(["everything", 0, 1]),
    ],
)
def test_what_is_no_request_is_a_protocol_error(data):
    with pytest.raises(ProtocolError):
        wire.decode_request(data)


def test_a_request_is_read_as_it_was_written():
    assert wire.decode_request(wire.encode(SnapshotRequest(3, 5))) == SnapshotRequest(3, 5)


def test_the_largest_messages_are_within_the_limit():
    """As many events as there can be, and as many blocks in one."""
    lonely = [stored([HASHES[i % 200]], HASHES[0]) for i in range(wire.PART_ROWS_MAX)]

    part = wire.encode(SnapshotPart(1 << 62, 1 << 62, lonely, 1 << 30))
    batch = wire.encode(wire.EventBatch(0.0, [*lonely[:EVENTS_MAX], stored(HASHES[:1] * BLOCKS_MAX)]))

    assert max(len(part), len(batch)) < wire.MESSAGE_BYTES_MAX
    assert wire.decode_part(part).events == lonely


# The stream


def test_messages_are_numbered_and_begin_by_clearing_what_an_earlier_service_told():
    made = new_stream()

    first = made.begin()
    second, third = (
        *made.advance(Pile(columns((0, HASHES[0], b"")))),
        *made.advance(Pile(columns((0, HASHES[0], None)))),
    )

    assert [first.sequence, second.sequence, third.sequence] == [1000, 1001, 1002]
    assert [told(m) for m in (first, second, third)] == [
        [AllBlocksCleared()],
        [stored([HASHES[0]])],
        [removed([HASHES[0]])],
    ]
    assert made.blocks == 2


def test_the_last_messages_are_kept_by_number_and_by_bytes(monkeypatch):
    made = new_stream(replay_batches=3)
    messages = [message for h in HASHES[:5] for message in made.advance(Pile(columns((0, h, b""))))]
    assert made.since(0) == messages[2:]
    assert made.since(messages[3].sequence) == messages[3:]
    assert made.since(messages[-1].sequence + 1) == []

    monkeypatch.setattr(stream, "REPLAY_BYTES_MAX", 2 * len(messages[0].payload))
    messages += made.advance(Pile(columns((0, HASHES[5], b""))))
    assert made.since(0) == messages[-2:]


def test_changes_that_nobody_took_in_time_are_a_gap_that_no_replay_fills():
    directory = SmallPool(8).directory
    journal = Journal(directory._state.blocks, lambda: None, most=2)
    rows = [directory._state.chains.insert(0, h, b"", 1, 0) for h in HASHES[:5]]
    for row in rows:
        journal.stored_all([row])
    pile = journal.take()
    made = new_stream()
    before = made.begin()

    cleared, rest = made.advance(pile)

    assert (pile.lost, len(pile.changes)) == (4, 1)
    assert cleared.sequence == before.sequence + 2
    assert (told(cleared), told(rest)) == ([AllBlocksCleared()], [stored([HASHES[4]])])
    assert made.since(0) == [cleared, rest]
    assert made.lost == 4
    assert journal.take() == Pile()


def test_whoever_takes_changes_is_woken_once_for_each_time():
    pool, woken = SmallPool(8), []
    pool.directory.following.begin(lambda: woken.append(1))

    pool.store(chain(0, 1))
    pool.store(chain(2))
    assert woken == [1]
    assert len(pool.directory.following.take().changes) == 3

    pool.store(chain(3))
    assert woken == [1, 1]


def test_nothing_is_written_down_when_nobody_follows():
    pool = SmallPool(8)
    pool.store(chain(0, 1))
    assert pool.directory.following.take() == Pile()

    pool.directory.following.begin(lambda: None)
    pool.directory.following.end()
    pool.store(chain(2))
    assert pool.directory.following.take() == Pile()


def test_many_blocks_that_come_and_go_at_once_are_told_of():
    """With their common parent: what is done row by row for a few is done in columns for many."""
    pool = SmallPool(80)
    root = chain(0)[0]
    pool.store(chain(0))
    for i in range(50):
        pool.store(chain(0, i))
    pool.directory.following.begin(lambda: None)

    pool.lose_block(root)
    gone = pool.directory.following.take().changes
    pool.store(chain(0))
    back = pool.directory.following.take().changes

    assert set(gone.hashes) == {root, *(chain(0, i)[1] for i in range(50))}
    assert set(gone.parents) == {None}
    assert (back.hashes[0], back.parents[0]) == (root, b"")
    assert set(back.hashes[1:]) == {chain(0, i)[1] for i in range(50)}
    assert set(back.parents[1:]) == {root}


# Who follows


def test_a_message_is_next_known_or_beyond_a_gap():
    index = PoolIndex()
    index.restart([SnapshotPart(7, 10, [stored(HASHES[:2])], None)])

    assert [index.fit(n) for n in (10, 11, 12)] == [Fit.OLD, Fit.NEXT, Fit.GAP]
    index.advance([stored([HASHES[2]], HASHES[1]), removed([HASHES[0]]), stored([HASHES[0]], namespace=LARGE)])
    assert index.namespaces == {SMALL.id: {HASHES[1], HASHES[2]}, LARGE.id: {HASHES[0]}}
    assert (index.blocks, index.expected) == (3, 12)
    index.advance([AllBlocksCleared()])
    assert index.namespaces == {}


@pytest.mark.parametrize("held", range(5))
def test_a_router_asks_how_much_of_a_chain_is_held(held):
    index = PoolIndex()
    index.restart([SnapshotPart(7, 10, [stored(HASHES[:held])], None)])

    assert index.prefix(SMALL.id, HASHES[:4]) == held
    assert index.prefix(SMALL.id, HASHES[:2]) == min(held, 2)
    assert index.prefix(LARGE.id, HASHES[:4]) == 0


def test_people_are_shown_a_line_for_each_event(capsys):
    events = [AllBlocksCleared(), stored(HASHES[1:3], HASHES[0]), removed(HASHES[1:2])]
    _show(Told(Source.REPLAY, 7, events), Format.TEXT)
    whose = SMALL.id.hex()[:16]

    assert capsys.readouterr().out.splitlines() == [
        "7 replay   cleared",
        f"7 replay   stored  {whose}     2 {'01' * 8}…{'02' * 8} below {'00' * 8}",
        f"7 replay   removed {whose}     1 {'01' * 8}",
    ]


def test_an_address_that_is_taken_is_refused_and_nothing_is_left_running():
    settings = MetaSettings(grpc_port=0, framed_port=0, events_port=0)
    service = MetaService(settings, lambda: 0.0, bytes)
    first = EventPublisher(service, settings, TlsSettings())
    first.start()
    taken = MetaSettings(grpc_port=0, framed_port=0, listen="localhost", events_port=int(first.endpoint.split(":")[-1]))
    second = EventPublisher(service, taken, TlsSettings())

    with pytest.raises(CapacityError, match="cannot listen on localhost"):
        second.start()
    second.stop()
    first.stop()
    assert not first.is_alive


# Keys


@pytest.fixture
def folder(tmp_path):
    assert main(["certs", str(tmp_path / "certs"), "--observer", "--client", "acme/e1", "--format", "json"]) == 0
    return tmp_path / "certs"


def asked(public, mechanism=b"CURVE"):
    return [b"1.0", b"1", b"kvpool", b"::1", b"", mechanism, z85.decode(public)]


def status_of(question, followers):
    return admit(question, followers)[2]


def test_certs_makes_keys_for_the_service_and_for_whoever_may_know_of_all_tenants(folder):
    keys = sorted(path.name for path in folder.glob("*.events-key"))

    assert keys == ["admin.events-key", "meta.events-key", "observer.events-key"]
    assert {stat.S_IMODE((folder / name).stat().st_mode) for name in keys} == {0o600}
    assert follower_keys(folder).server == read_keys(secret_file(folder, "meta")).public
    assert "secret" not in repr(follower_keys(folder))


def test_certs_keeps_keys(folder, capsys):
    before = {path: path.read_bytes() for path in folder.glob("*events*")}
    assert main(["certs", str(folder), "--renew", "--format", "json"]) == 0

    assert {path: path.read_bytes() for path in folder.glob("*events*")} == before


def test_followers_are_let_in_by_their_keys_alone(folder):
    followers = Followers(folder / "events-followers")
    own = {name: read_keys(secret_file(folder, name)).public for name in ("admin", "observer", "meta")}

    assert admit(asked(own["observer"]), followers)[2:5] == [b"200", b"OK", b"observer"]
    assert status_of(asked(own["admin"]), followers) == b"200"
    assert status_of(asked(own["meta"]), followers) == b"400"
    assert status_of(asked(zmq.curve_keypair()[0]), followers) == b"400"
    assert status_of(asked(own["observer"], b"PLAIN"), followers) == b"400"
    assert status_of([*asked(own["observer"])[:5], b"NULL"], followers) == b"400"
    assert status_of([], followers) == b"400"


def test_a_line_that_goes_is_a_follower_that_is_not_served_any_more(folder):
    path = folder / "events-followers"
    followers = Followers(path)
    admin, observer = (asked(read_keys(secret_file(folder, name)).public) for name in ("admin", "observer"))
    assert status_of(observer, followers) == b"200"

    path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if "observer" not in line))
    assert (status_of(admin, followers), status_of(observer, followers)) == (b"200", b"400")
    assert followers.refused == 1

    path.write_text("nonsense\n")  # half a file: those known stay
    assert status_of(admin, followers) == b"200"


@pytest.mark.parametrize(
    "line",
    ["nonsense", "short kvpool://observer/x", f"{'k' * 40} kvpool://client/acme/e1", f"{'k' * 40} kvpool://meta"],
)
def test_a_file_of_followers_that_cannot_be_is_refused_by_its_line(tmp_path, line):
    path = tmp_path / "events-followers"
    path.write_text(f"# who follows\n{line}\n")

    with pytest.raises(SettingsError, match=r"events-followers.* 40|line 2"):
        Followers(path)


def new_publisher(tls):
    settings = MetaSettings(grpc_port=0, framed_port=0, events_port=0)
    return EventPublisher(MetaService(settings, lambda: 0.0, bytes), settings, tls)


def test_with_tls_a_publisher_needs_keys_that_nobody_else_can_read(folder):
    with pytest.raises(SettingsError, match=r"needs tls\.dir"):
        new_publisher(TlsSettings(ca=folder / "ca.pem"))

    secret_file(folder, "meta").chmod(0o644)
    with pytest.raises(SettingsError, match="can be read by others"):
        new_publisher(TlsSettings(dir=folder))

    secret_file(folder, "meta").unlink()
    with pytest.raises(SettingsError, match="kvpool certs"):
        new_publisher(TlsSettings(dir=folder))
