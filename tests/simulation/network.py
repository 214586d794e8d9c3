"""A simulated network under the real framed protocol: connections between processes of hosts.

A connection keeps order and drops nothing silently, as TCP does; what a network does to it is delay, packets lost
(which come late), a direction that goes dead without a word, a reset. Different connections overtake each other. A
request may arrive a second time on a connection of its own, after the first: what retries and proxies do.
"""

import math
import socket
from collections import deque
from dataclasses import dataclass, field

from kvpool.core.errors import UnavailableError
from kvpool.transport.wire.frame import Header
from kvpool.transport.wire.messages import Hello, Message, Welcome

from .scheduler import current
from .shims import COPY_BYTES

KEEPALIVE_S = 4.0
"""A peer that is silent for so long is given up: by TCP's keep-alive, and by gRPC's pings (a minute in earnest)."""

RETRANSMIT_S = 0.3
END = object()


@dataclass
class Weather:
    """How bad the network is: probabilities a message."""

    delay_s: float = 0.002
    slow: float = 0.0
    lost: float = 0.0
    dead: float = 0.0
    reset: float = 0.0
    twice: float = 0.0

    @property
    def calm(self):
        return not (self.slow or self.lost or self.dead or self.reset or self.twice)


@dataclass
class Frame:
    message: object
    correlation: int = 0
    payload: bytes = b""
    taken: int = 0


@dataclass(eq=False)
class Wire:
    """One direction of a connection: frames under way, in order."""

    source: "Socket"
    target: "Socket"
    flight: deque = field(default_factory=deque)
    last_s: float = 0.0
    dead: bool = False


class Socket:
    """One end of a connection; as much of `socket.socket` as the framed protocol looks at."""

    def __init__(self, network, process, family, *, pings=False):
        self.network = network
        self.process = process
        self.family = family
        self.pings = pings
        self.inbox = deque()
        self.wire = None
        self.reader = None
        self.is_open = True
        self.broken = False
        self.descriptors = []
        process.sockets.add(self)

    @property
    def peer(self):
        return self.wire.target

    def fileno(self):
        return 3 if self.is_open else -1

    def shutdown(self, _how=0):
        self.close()

    def close(self):
        """Close this end; the other learns it when what was sent before has arrived."""
        if self.is_open:
            self.is_open = False
            self.process.sockets.discard(self)
            self.network.send(self.wire, END)
            self.wake()

    def abort(self):
        """Broken from outside: whoever waits here learns it at once."""
        self.broken = True
        self.wake()

    def wake(self):
        if self.reader is not None:
            current().wake(self.reader)

    def receive(self, timeout_s):
        """The next frame; None when none came in time. Raises ConnectionResetError at the end."""
        scheduler = current()
        until_s = scheduler.now_s + timeout_s
        while not self.inbox:
            if not self.is_open or self.broken:
                raise ConnectionResetError("the connection is closed")
            if scheduler.now_s >= until_s:
                return None
            self.reader = scheduler.task
            scheduler.block(until_s - scheduler.now_s if until_s < math.inf else None)
            self.reader = None
        frame = self.inbox.popleft()
        if frame is END:
            self.broken = True
            raise ConnectionResetError("the peer closed the connection")
        return frame


class Network:
    """Who listens where, which ways are cut, and what is under way."""

    def __init__(self, scheduler, weather):
        self.scheduler = scheduler
        self.rng = scheduler.rng
        self.weather = weather
        self.servers = {}
        self.cuts = set()
        self.counts = {}

    def listen(self, name, process, serve):
        """``serve(socket, kind)`` runs as a task of ``process`` for each connection to ``name``."""
        self.servers[name] = (process, serve)

    def dial(self, name, timeout_s, family=socket.AF_INET, *, kind="framed"):
        """A connected socket to ``name``; raises UnavailableError."""
        scheduler, client = self.scheduler, self.scheduler.task.process
        if name not in self.servers:
            raise UnavailableError(f"{name} refuses connections")
        server, serve = self.servers[name]
        while self._is_cut(client.host, server.host) or self._is_cut(server.host, client.host):
            if timeout_s <= 0:
                raise UnavailableError(f"{name} did not answer in time")
            scheduler.sleep(min(timeout_s, RETRANSMIT_S))
            timeout_s -= RETRANSMIT_S
        delay_s = 2 * self._delay_s()
        scheduler.sleep(min(delay_s, timeout_s))
        server, serve = self.servers[name]
        if delay_s > timeout_s:
            raise UnavailableError(f"{name} did not answer in time")
        if not server.alive:
            raise UnavailableError(f"{name} refuses connections")
        near = Socket(self, client, family, pings=kind == "grpc")
        far = Socket(self, server, family, pings=kind == "grpc")
        near.wire, far.wire = Wire(near, far), Wire(far, near)
        scheduler.spawn(server, serve, far, kind)
        return near

    def send(self, wire, frame):
        """Put a frame on its way."""
        weather, now_s = self.weather, self.scheduler.now_s
        if wire.dead or wire.source.broken:
            return
        if frame is not END and wire.source.process.host != wire.target.process.host:
            chance = self.rng.random()
            if chance < weather.dead:
                self._count("dead")
                wire.dead = True
                self._notice_silence(wire.source)
                return
            if chance < weather.dead + weather.reset:
                self._count("reset")
                self.reset(wire.source)
                return
        wire.last_s = max(wire.last_s, now_s + self._delay_s())
        wire.flight.append((wire.last_s, frame))
        if len(wire.flight) == 1:
            self.scheduler.at(wire.last_s - now_s, self._arrive, wire)

    def reset(self, end):
        """Both ends of the connection see it break."""
        for side in (end, end.peer):
            side.wire.dead = True
            side.abort()

    def cut(self, source, target):
        """Nothing gets from host ``source`` to host ``target`` any more."""
        self.cuts.add((source, target))
        self.scheduler.at(KEEPALIVE_S, self._lose_silent, source, target)

    def heal(self):
        """All ways are open again."""
        self.cuts.clear()

    def fell_silent(self, process):
        """``process`` is stopped: those who ping it give it up after a while."""

        def give_up():
            if process.paused and process.paused_at_s <= self.scheduler.now_s - KEEPALIVE_S:
                for end in [end for end in process.sockets if end.pings]:
                    self.reset(end)

        self.scheduler.at(KEEPALIVE_S, give_up)

    def died(self, process, *, silent):
        """``process`` was killed: its peers see resets, or nothing at all when its whole host went."""
        for end in list(process.sockets):
            if not silent:
                self.scheduler.at(self._delay_s(), self.reset, end)
            else:
                end.wire.dead = end.peer.wire.dead = True
                self._notice_silence(end)

    def forget(self, process):
        """The host of a process that died in silence is back: it answers old connections with resets."""
        for end in list(process.sockets):
            self.reset(end)

    def _arrive(self, wire):
        if wire.dead or not wire.flight:
            return
        if self._is_cut(wire.source.process.host, wire.target.process.host):
            self.scheduler.at(RETRANSMIT_S, self._arrive, wire)
            return
        _, frame = wire.flight.popleft()
        wire.target.inbox.append(frame)
        wire.target.wake()
        self._maybe_again(wire, frame)
        if wire.flight:
            self.scheduler.at(max(0.0, wire.flight[0][0] - self.scheduler.now_s), self._arrive, wire)

    def _maybe_again(self, wire, frame):
        """A second copy of a request, on a connection that nobody reads from."""
        is_request = isinstance(getattr(frame, "message", None), Message) and frame.message.kind % 2 == 0
        if not is_request or isinstance(frame.message, Hello) or self.rng.random() >= self.weather.twice:
            return
        self._count("twice")
        server = wire.target.process
        near, far = Socket(self, wire.source.process, socket.AF_INET), Socket(self, server, socket.AF_INET)
        near.wire, far.wire = Wire(near, far), Wire(far, near)
        far.wire.dead = True
        name = next((name for name, (process, _) in self.servers.items() if process is server), None)
        if name is None:
            return
        copy = Frame(frame.message, frame.correlation, frame.payload)
        self.scheduler.at(self.rng.random() * 3, self._deliver_again, frame, wire.target, name, near, far, copy)

    def _deliver_again(self, frame, first, name, near, far, copy):
        server = first.process
        if not server.alive or self.servers[name][0] is not server:
            return
        if any(waiting is frame for waiting in first.inbox):  # never before the first was served
            self.scheduler.at(1.0, self._deliver_again, frame, first, name, near, far, copy)
            return
        far.inbox += [copy]
        self.scheduler.spawn(server, self.servers[name][1], far, "framed")
        self.scheduler.at(0.5, near.close)

    def _notice_silence(self, end):
        self.scheduler.at(KEEPALIVE_S, self.reset, end)

    def _lose_silent(self, source, target):
        if (source, target) not in self.cuts:
            return
        for process, _ in self.servers.values():
            for end in list(process.sockets):
                if {end.process.host, end.peer.process.host} == {source, target}:
                    self.reset(end)

    def _is_cut(self, source, target):
        return source != target and (source, target) in self.cuts

    def _delay_s(self):
        weather, rng = self.weather, self.rng
        delay_s = rng.random() * weather.delay_s
        chance = rng.random()
        if chance < weather.lost:
            return delay_s + RETRANSMIT_S * (1 + rng.random())
        if chance < weather.lost + weather.slow:
            return delay_s + rng.random() * 0.1
        return delay_s

    def _count(self, what):
        self.counts[what] = self.counts.get(what, 0) + 1


class Framed:
    """`FramedSocket` over a simulated socket: messages travel as they are, payloads are copied step by step."""

    def __init__(self, sock):
        self.sock = sock
        self.until_s = math.inf
        self._armed_s = math.inf
        self._frame = None
        self.caller = None
        self.trace = ""

    def arm(self, timeout_s):
        self._armed_s = timeout_s

    def send(self, message, correlation, deadline_ms=0, payload=()):
        sent = bytearray()
        for piece in payload:
            for start in range(0, len(piece), COPY_BYTES):
                sent += piece[start : start + COPY_BYTES]
                current().step()
        if not self.sock.is_open or self.sock.broken:
            raise BrokenPipeError("the connection is closed")
        self.sock.network.send(self.sock.wire, Frame(message, correlation, bytes(sent)))

    def poll_header(self):
        frame = self._frame = self.sock.receive(self._armed_s)
        if frame is None:
            return None
        return Header(frame.message.kind, frame.correlation, 0, 0, len(frame.payload))

    def receive_header(self):
        header = self.poll_header()
        if header is None:
            raise BlockingIOError("no frame in time")
        return header

    def receive_body(self, _header):
        return self._frame.message

    def receive_into(self, view):
        frame = self._frame
        for start in range(0, len(view), COPY_BYTES):
            piece = view[start : start + COPY_BYTES]
            piece[:] = frame.payload[frame.taken : frame.taken + len(piece)]
            frame.taken += len(piece)
            current().step()
            if not self.sock.is_open or self.sock.broken:
                raise ConnectionResetError("the connection is closed")

    def receive_pieces(self, pieces):
        for piece in pieces:
            self.receive_into(piece)

    def drain(self, size_bytes):
        self._frame.taken += size_bytes

    def close(self):
        self.sock.close()


assert Welcome.kind % 2
