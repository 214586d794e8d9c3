"""Follows a pool's events over ZeroMQ: live messages, replays of what was missed, snapshots where that is gone."""

import time
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Self

import zmq

from kvpool.core.errors import ClosedError, ProtocolError, UnavailableError
from kvpool.events.index import Fit, PoolIndex
from kvpool.ops.curve import CurveKeys
from kvpool.transport.wire.events import (
    END,
    MESSAGE_BYTES_MAX,
    PART_ROWS_MAX,
    TOPIC,
    AllBlocksCleared,
    Event,
    SnapshotPart,
    SnapshotRequest,
    decode_batch,
    decode_part,
    encode,
    pack_sequence,
    unpack_sequence,
)

ANSWER_S = 5.0
"""How long the service gets for each part of an answer."""

CHECK_S = 1.0
"""How often it is asked how far it is: what was lost last would not be noticed by any later message."""

MESSAGES_MAX = 100_000
"""Messages of the stream that wait to be read; further ones are lost, and asked for."""

SNAPSHOT_TRIES = 3
"""A service that restarts amid a snapshot is asked for another."""

FRAMES_MAX = 4


class Source(StrEnum):
    """How a message came."""

    LIVE = "live"
    REPLAY = "replay"
    """It was missed, and sent again."""
    SNAPSHOT = "snapshot"
    """More was missed than is kept: everything anew."""


@dataclass(frozen=True, slots=True)
class Told:
    """Events that were taken in.

    Attributes:
        source: How they came.
        sequence: Of their message; of a snapshot: of the last one that it knew of.
        events: In order. A snapshot begins with `AllBlocksCleared`.
    """

    source: Source
    sequence: int
    events: list[Event]


class Follower:
    """Keeps an index of what a pool holds. Not thread-safe; close it, or use it as a context manager.

    Args:
        endpoint: Of the stream, ``tcp://HOST:PORT``.
        replay_endpoint: Of replays and snapshots.
        keys: The follower's, for a pool with TLS: see `kvpool.ops.curve.follower_keys`.

    Attributes:
        index: What can be loaded, as far as is known.
    """

    def __init__(self, endpoint: str, replay_endpoint: str, keys: CurveKeys | None = None) -> None:
        self.index = PoolIndex()
        self._endpoint, self._replay_endpoint = endpoint, replay_endpoint
        self._keys = keys
        self._context = zmq.Context()
        self._stream = self._subscribe()
        self._asking: zmq.Socket[bytes] | None = None
        self._checked_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Follow no more; safe to call again."""
        self._context.destroy(linger=0)

    def poll(self, timeout_s: float) -> list[Told]:
        """What has been told since the last call, waiting up to ``timeout_s`` for something.

        Each question to the service takes up to `ANSWER_S` more, where it does not answer.

        Raises:
            UnavailableError: The service does not answer: it is not there, or serves nobody with this key. Calling
                again goes on; what was missed meanwhile is caught up with.
            ProtocolError: What came is no event of a pool.
            ClosedError: The follower was closed.
        """
        if self._context.closed:
            raise ClosedError("the follower is closed; make another one")
        if not self.index.incarnation:
            return [self._take_snapshot()]
        give_up_s = time.monotonic() + timeout_s
        told: list[Told] = []
        while not told:
            check_in_s = self._checked_s + CHECK_S - time.monotonic()
            if check_in_s <= 0:
                told += self._check()
                continue
            wait_s = min(check_in_s, give_up_s - time.monotonic())
            if self._stream.poll(max(0, round(wait_s * 1e3))):
                told += self._take_live()
            elif time.monotonic() >= give_up_s:
                break
        return told

    def _take_live(self) -> list[Told]:
        sequence, events = _message(_receive(self._stream))
        fit = self.index.fit(sequence)
        if fit is Fit.NEXT:
            self.index.advance(events)
            return [Told(Source.LIVE, sequence, events)]
        return self._catch_up(sequence) if fit is Fit.GAP else []

    def _check(self) -> list[Told]:
        """Ask how far the service is, and catch up with it."""
        at = self._ask_part(0, 0)
        self._checked_s = time.monotonic()
        if at.incarnation != self.index.incarnation:
            return [self._take_snapshot()]
        while self._stream.poll(0) and self.index.expected <= at.sequence:
            told = self._take_live()
            if told:
                return told
        return self._catch_up(at.sequence) if self.index.expected <= at.sequence else []

    def _catch_up(self, sequence: int) -> list[Told]:
        """Take in what was missed up to ``sequence``: sent again as far as it is kept, else everything."""
        told = self._take_replay()
        if self.index.expected <= sequence and told:
            self._checked_s = 0.0  # the rest did not come: the next call looks after it
        return told if told or self.index.expected > sequence else [self._take_snapshot()]

    def _take_replay(self) -> list[Told]:
        asking = self._ask(pack_sequence(self.index.expected))
        told: list[Told] = []
        while True:
            try:
                frames = self._answer(asking)
            except UnavailableError:
                if told:
                    return told  # the index has them: the caller must, too
                raise
            if len(frames) == 4 and frames[2] == END:
                return told
            sequence, events = _message(frames[1:])
            if self.index.fit(sequence) is Fit.NEXT:
                self.index.advance(events)
                told.append(Told(Source.REPLAY, sequence, events))

    def _take_snapshot(self) -> Told:
        for _ in range(SNAPSHOT_TRIES):
            parts = [self._ask_part(0, PART_ROWS_MAX)]
            while parts[-1].following is not None and parts[-1].incarnation == parts[0].incarnation:
                parts.append(self._ask_part(parts[-1].following, PART_ROWS_MAX))
            if parts[-1].incarnation == parts[0].incarnation:
                break
        else:
            raise UnavailableError(f"the service at {self._replay_endpoint} restarts all the time")
        self.index.restart(parts)
        self._checked_s = time.monotonic()
        stored: list[Event] = [event for part in parts for event in part.events]
        return Told(Source.SNAPSHOT, parts[0].sequence, [AllBlocksCleared(), *stored])

    def _ask_part(self, first: int, rows: int) -> SnapshotPart:
        frames = self._answer(self._ask(encode(SnapshotRequest(first, rows))))
        if len(frames) != 2:
            raise ProtocolError(f"part of a snapshot in {len(frames)} frames; it has an empty one and one")
        return decode_part(frames[1])

    def _ask(self, request: bytes) -> "zmq.Socket[bytes]":
        if self._asking is None:
            self._asking = self._connect(zmq.DEALER, self._replay_endpoint)
        self._asking.send_multipart((b"", request))
        return self._asking

    def _answer(self, asking: "zmq.Socket[bytes]") -> list[bytes]:
        if asking.poll(round(ANSWER_S * 1e3)):
            return _receive(asking)
        # A late answer must not be taken for that to another question; and ZeroMQ, once it was not let in, never tries
        # again, though a key may have been added since.
        asking.close(0)
        self._asking = None
        self._stream.close(0)
        self._stream = self._subscribe()
        raise UnavailableError(
            f"{self._replay_endpoint} does not answer: nobody is there, or it does not serve "
            + ("this key" if self._keys else "callers without a key")
        )

    def _subscribe(self) -> "zmq.Socket[bytes]":
        sock = self._connect(zmq.SUB, self._endpoint)
        sock.subscribe(TOPIC)
        return sock

    def _connect(self, kind: int, endpoint: str) -> "zmq.Socket[bytes]":
        sock = self._context.socket(kind)
        sock.set(zmq.LINGER, 0)
        sock.set(zmq.RCVHWM, MESSAGES_MAX)
        sock.set(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        sock.set(zmq.IPV6, int("[" in endpoint))
        if self._keys is not None:
            sock.set(zmq.CURVE_SERVERKEY, self._keys.server)
            sock.set(zmq.CURVE_PUBLICKEY, self._keys.public)
            sock.set(zmq.CURVE_SECRETKEY, self._keys.secret)
        sock.connect(endpoint)
        return sock


def _receive(sock: "zmq.Socket[bytes]") -> list[bytes]:
    """The frames of a message; raises ProtocolError when there are more than any has."""
    frames, count = [sock.recv()], 1
    while sock.get(zmq.RCVMORE):
        frame, count = sock.recv(), count + 1
        if count <= FRAMES_MAX:
            frames.append(frame)
    if count > FRAMES_MAX:
        raise ProtocolError(f"a message of {count} frames; it has at most {FRAMES_MAX}")
    return frames


def _message(frames: list[bytes]) -> tuple[int, list[Event]]:
    if len(frames) != 3:
        raise ProtocolError(f"a message of {len(frames)} frames; it has a topic, a sequence number and events")
    return unpack_sequence(frames[1]), decode_batch(frames[2]).events
