"""The stream's thread and sockets: whatever subscribers do, it waits for none of them, and nobody waits for it.

XPUB sends the stream and drops what a subscriber at its high-water mark has no room for; ROUTER answers those who ask
what they missed. Both are this thread's alone. The service wakes it under its lock, by writing eight bytes.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from math import ceil
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvpool.core.directory import Changes, Directory, Part, Pile
from kvpool.core.errors import CapacityError, ProtocolError, SettingsError
from kvpool.core.members import Members
from kvpool.core.namespace import Namespace
from kvpool.meta.events.admitting import ZAP_ENDPOINT, admit
from kvpool.meta.events.stream import EventStream, Message
from kvpool.meta.service import MetaService
from kvpool.ops.addresses import shown_host
from kvpool.ops.curve import FOLLOWERS_FILE, SERVER, Followers, read_keys, secret_file
from kvpool.ops.logging import get_logger
from kvpool.ops.settings import MetaSettings, TlsSettings
from kvpool.transport.wire.events import (
    END,
    SEQUENCE_BYTES,
    TOPIC,
    decode_request,
    encode,
    pack_sequence,
    unpack_sequence,
)

PACE_S = 0.005
"""Shortest time between two looks at the pile: what changes meanwhile goes in one message."""

REQUEST_FRAMES_MAX = 4
REQUEST_FRAME_BYTES_MAX = 1024
HANDSHAKE_MS = 5_000
SEND_BUFFER_BYTES = 256 << 10
"""Of the system, for each subscriber: what waits there waits beside the high-water mark."""

PING_MS = 10_000
"""A subscriber that does not answer for three times as long is disconnected, and what waits for it is let go."""

_DOMAIN = b"kvpool"

log = get_logger(__name__)


class EventPublisher:
    """Publishes the service's events until it is stopped.

    Args:
        service: Whose.
        settings: Ports and limits.
        tls: With its folder's keys subscribers are told from others; without TLS anybody who gets here is served.

    Attributes:
        endpoint: ``tcp://HOST:PORT`` of the stream, once started.
        replay_endpoint: That of replays and snapshots.

    Raises:
        SettingsError: Keys that are missing or cannot be used.
    """

    def __init__(self, service: MetaService, settings: MetaSettings, tls: TlsSettings) -> None:
        self.endpoint = ""
        self.replay_endpoint = ""
        self._service = service
        self._settings = settings
        # Numbers of a later service must be above those of this one: the time of day is nearly always.
        first = time.time_ns() // 1000  # noqa: TID251 - see EventStream
        self._stream = EventStream(first, service.incarnation, settings.events_replay_batches, time.time)  # noqa: TID251
        self._followers, self._keys = None, None
        if tls.enabled:
            folder = _folder(tls)
            self._followers, self._keys = Followers(folder / FOLLOWERS_FILE), read_keys(secret_file(folder, SERVER))
        self._counts = dict.fromkeys(("messages", "dropped", "replays", "snapshot_parts", "refused_requests"), 0)
        self._subscribers: set[int] = set()
        self._lag_s = 0.0
        self._woken_s = self._oldest_s = 0.0
        self._context = zmq.Context()
        self._wake = -1
        self._unsaid = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvpool-events", daemon=True)

    def start(self) -> None:
        """Listen and publish; raises CapacityError when an address cannot be had, with nothing left running."""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            self._admission = self._context.socket(zmq.REP)
            self._admission.bind(ZAP_ENDPOINT)  # before anybody can ask
            self._publish_socket = self._socket(zmq.XPUB, self._settings.events_hwm)
            self._publish_socket.set(zmq.XPUB_NODROP, 1)  # see _send
            self._monitor = self._publish_socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
            # A replay whole must fit, or a quick reader would never get one.
            self._replay_socket = self._socket(zmq.ROUTER, self._settings.events_replay_batches + 2)
            self._replay_socket.set(zmq.ROUTER_MANDATORY, 1)
            port = self._settings.events_port or 0
            self.endpoint = self._bind(self._publish_socket, port)
            self.replay_endpoint = self._bind(self._replay_socket, port + 1 if port else 0)
        except BaseException:
            self._close()
            raise
        self._service.follow(self._on_first)
        self._thread.start()

    def stop(self) -> None:
        """Publish no more; returns when the thread and the sockets are gone."""
        self._service.follow(None)
        self._stopping = True
        if self._thread.ident is not None:
            os.eventfd_write(self._wake, 1)
            self._thread.join()
        self._close()

    @property
    def is_alive(self) -> bool:
        """Whether it publishes."""
        return self._thread.is_alive()

    def counts(self) -> dict[str, int]:
        """What was told and what was not, by name."""
        counts = {"blocks": self._stream.blocks, "lost": self._stream.lost, "sequence": self._stream.sequence}
        counts |= self._counts | {"subscribers": len(self._subscribers)}
        counts["refused_callers"] = 0 if self._followers is None else self._followers.refused
        return {f"events_{name}": count for name, count in counts.items()}

    @property
    def lag_s(self) -> float:
        """How long the oldest change of the last message had waited."""
        return self._lag_s

    # Set-up

    def _socket(self, kind: int, messages_max: int) -> zmq.Socket[bytes]:
        sock = self._context.socket(kind)
        sock.set(zmq.LINGER, 0)
        sock.set(zmq.SNDHWM, messages_max)
        sock.set(zmq.SNDBUF, SEND_BUFFER_BYTES)
        sock.set(zmq.MAXMSGSIZE, REQUEST_FRAME_BYTES_MAX)
        sock.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        sock.set(zmq.HEARTBEAT_IVL, PING_MS)
        sock.set(zmq.HEARTBEAT_TIMEOUT, 3 * PING_MS)
        if self._keys is not None:
            sock.set(zmq.ZAP_DOMAIN, _DOMAIN)
            sock.set(zmq.CURVE_SERVER, 1)
            sock.set(zmq.CURVE_SECRETKEY, self._keys.secret)
        return sock

    def _bind(self, sock: zmq.Socket[bytes], port: int) -> str:
        host = shown_host(self._settings.listen)
        try:
            # ZeroMQ listens on addresses alone.
            address = socket.getaddrinfo(self._settings.listen, None, type=socket.SOCK_STREAM)[0][4][0]
            sock.set(zmq.IPV6, int(":" in str(address)))
            sock.bind(f"tcp://{shown_host(str(address))}:{port or '*'}")
        except (OSError, zmq.ZMQError) as error:
            raise CapacityError(f"cannot listen on {host}:{port}: {error}; choose another address") from error
        bound = sock.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        return f"tcp://{host}:{bound}"

    def _close(self) -> None:
        self._context.destroy(linger=0)
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1

    # The thread

    def _on_first(self) -> None:
        self._woken_s = time.monotonic()
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        handlers: dict[object, Callable[[], None]] = {
            self._publish_socket: self._take_subscription,
            self._monitor: self._note_connection,
            self._replay_socket: self._answer,
            self._admission: self._admit,
        }
        poller = zmq.Poller()
        for source in (*handlers, self._wake):
            poller.register(source, zmq.POLLIN)
        self._send(self._stream.begin())
        is_due, next_s = False, 0.0
        while not self._stopping:
            wait_ms = max(0, ceil((next_s - time.monotonic()) * 1e3)) if is_due else None
            for source, _ in poller.poll(wait_ms):
                if source == self._wake:
                    os.eventfd_read(self._wake)
                    is_due = True
                else:
                    is_due |= not self._do(handlers[source])
            if is_due and time.monotonic() >= next_s:
                is_due = not self._do(self._publish)
                next_s = time.monotonic() + PACE_S

    def _do(self, step: Callable[[], None]) -> bool:
        """Do something that may tell of changes; False when there was no memory for it, and they are lost."""
        try:
            with contextlib.suppress(zmq.Again):  # nothing is there to be read after all
                step()
        except MemoryError:
            self._unsaid += 1
            log.warning("out_of_memory", what="events")
            return False
        return True

    def _publish(self) -> None:
        pile, _ = self._look(None)
        self._tell(pile)

    def _look(self, rows: tuple[int, int] | None) -> tuple[Pile, Part]:
        """What has changed, and part of the whole, of one moment."""

        def question(directory: Directory, _members: Members) -> tuple[Pile, Part, list[Namespace]]:
            following = directory.following
            part = Part(Changes(), None) if rows is None else following.visible(*rows)
            self._oldest_s = self._woken_s
            return following.take(), part, directory.namespaces(self._stream.namespaces)

        pile, part, namespaces = self._service.ask(question)
        self._stream.learn(namespaces)
        return pile, part

    def _tell(self, pile: Pile) -> None:
        lost = pile.lost + self._unsaid
        for message in self._stream.advance(Pile(pile.changes, lost)):
            self._send(message)
        if lost:
            log.warning("events_lost", changes=lost)
            self._unsaid = 0
        if pile.changes:
            self._lag_s = time.monotonic() - self._oldest_s

    def _send(self, message: Message) -> None:
        """Send to whoever has room. The first message that somebody has none for is counted, with what follows."""
        frames = (TOPIC, pack_sequence(message.sequence), message.payload)
        self._counts["messages"] += 1
        try:
            self._publish_socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self._counts["dropped"] += 1
            self._publish_socket.set(zmq.XPUB_NODROP, 0)
            self._publish_socket.send_multipart(frames, zmq.NOBLOCK)
            self._publish_socket.set(zmq.XPUB_NODROP, 1)

    def _take_subscription(self) -> None:
        """Read on: what they subscribe to is ZeroMQ's business."""
        self._publish_socket.recv_multipart(zmq.NOBLOCK)

    def _note_connection(self) -> None:
        happened = recv_monitor_message(self._monitor, zmq.NOBLOCK)
        if happened["event"] == zmq.EVENT_ACCEPTED:
            self._subscribers.add(happened["value"])
        else:
            self._subscribers.discard(happened["value"])

    def _admit(self) -> None:
        assert self._followers is not None
        self._admission.send_multipart(admit(self._admission.recv_multipart(zmq.NOBLOCK), self._followers))

    def _answer(self) -> None:
        frames = self._request()
        try:
            if len(frames) != 3 or frames[1]:
                raise ProtocolError(f"a request of {len(frames)} frames; it has an empty one and one")
            self._answer_one(frames[0], frames[2])
        except ProtocolError as error:
            self._counts["refused_requests"] += 1
            log.warning("event_request_refused", reason=str(error))
        except (zmq.Again, zmq.ZMQError) as error:
            self._counts["dropped"] += 1  # gone, or does not read: it asks again for what it did not get
            log.debug("event_answer_dropped", reason=str(error))

    def _answer_one(self, peer: bytes, request: bytes) -> None:
        if len(request) == SEQUENCE_BYTES:
            self._counts["replays"] += 1
            for message in self._stream.since(unpack_sequence(request)):
                self._reply(peer, TOPIC, pack_sequence(message.sequence), message.payload)
            self._reply(peer, b"", END, b"")
            return
        wanted = decode_request(request)
        self._counts["snapshot_parts"] += bool(wanted.rows)
        pile, part = self._look((wanted.first, wanted.rows))
        self._tell(pile)
        self._reply(peer, encode(self._stream.part(part)))

    def _reply(self, peer: bytes, *frames: bytes) -> None:
        self._replay_socket.send_multipart((peer, b"", *frames), zmq.NOBLOCK)

    def _request(self) -> list[bytes]:
        """The frames of a request; no more than a right one may have, however many there are."""
        frames: list[bytes] = []
        while True:
            frame = self._replay_socket.recv(zmq.NOBLOCK)
            if len(frames) < REQUEST_FRAMES_MAX:
                frames.append(frame)
            if not self._replay_socket.get(zmq.RCVMORE):
                return frames


def _folder(tls: TlsSettings) -> Path:
    if tls.dir is None:
        raise SettingsError("meta.events_port with TLS needs tls.dir: `kvpool certs` puts the keys of followers there")
    return tls.dir
