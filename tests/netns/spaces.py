"""Network namespaces on one bridge: hosts that share nothing but a wire that can be slowed and cut.

The bridge is in a namespace of its own, so that nothing is ever added to the machine's network, and all is gone when
the namespaces are.
"""

import ctypes
import itertools
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_CLONE_NEWNET = 0x40000000
_LINK = "eth0"
_SUBNET = "10.77.0"
"""The same in every run: no other namespace can see it."""

_networks = itertools.count()


@dataclass(frozen=True)
class Space:
    """One host: a namespace, its address, and its plug in the bridge."""

    name: str
    address: str
    hub: str
    plug: str

    @contextmanager
    def entered(self) -> Iterator[None]:
        """This thread's new sockets and child processes are in the namespace meanwhile; its files are not."""
        with Path(f"/proc/{os.getpid()}/task/{threading.get_native_id()}/ns/net").open() as home:
            with Path(f"/run/netns/{self.name}").open() as there:
                _enter(there.fileno())
            try:
                yield
            finally:
                _enter(home.fileno())

    def sent_bytes(self) -> int:
        """What has left the namespace so far."""
        answer = _run("ip", "-n", self.name, "-json", "-statistics", "link", "show", _LINK)
        return json.loads(answer)[0]["stats64"]["tx"]["bytes"]

    @contextmanager
    def slowed(self, rate: str) -> Iterator[None]:
        """Send no faster than this meanwhile, e.g. ``20mbit``."""
        _run("tc", "-n", self.name, "qdisc", "add", "dev", _LINK, "root", "tbf", "rate", rate, "burst", "32k",
             "latency", "400ms")  # fmt: skip
        try:
            yield
        finally:
            _run("tc", "-n", self.name, "qdisc", "del", "dev", _LINK, "root")

    @contextmanager
    def cut_off(self) -> Iterator[None]:
        """Nothing goes in or out meanwhile: frames are lost, no connection is told."""
        _run("ip", "-n", self.hub, "link", "set", self.plug, "down")
        try:
            yield
        finally:
            _run("ip", "-n", self.hub, "link", "set", self.plug, "up")

    @contextmanager
    def delayed(self, delay: str, jitter: str) -> Iterator[None]:
        """What it sends arrives later meanwhile, e.g. by ``200ms`` and more or less ``50ms``."""
        _run("tc", "-n", self.name, "qdisc", "add", "dev", _LINK, "root", "netem", "delay", delay, jitter)
        try:
            yield
        finally:
            _run("tc", "-n", self.name, "qdisc", "del", "dev", _LINK, "root")

    @contextmanager
    def lossy(self, percent: int) -> Iterator[None]:
        """So many packets in a hundred are lost meanwhile, of those it sends and of those it gets."""
        lose = f"numgen random mod 100 < {percent} drop"
        with self._filtered(sends=lose, gets=lose):
            yield

    @contextmanager
    def deaf_to(self, *others: "Space") -> Iterator[None]:
        """Nothing that it sends to the others arrives meanwhile, and it is not told; what they send does."""
        with self._filtered(sends=f"ip daddr {_either(others)} drop"):
            yield

    @contextmanager
    def apart_from(self, *others: "Space") -> Iterator[None]:
        """Nothing passes between it and the others meanwhile."""
        with self._filtered(sends=f"ip daddr {_either(others)} drop", gets=f"ip saddr {_either(others)} drop"):
            yield

    @contextmanager
    def reached_at(self, *ports: int) -> Iterator[None]:
        """Connections to other ports of its hang meanwhile: a firewall drops what begins them."""
        others = f"tcp dport != {{ {', '.join(map(str, ports))} }} " if ports else ""
        with self._filtered(gets=f"tcp flags & (syn | ack) == syn {others}drop"):
            yield

    @contextmanager
    def _filtered(self, sends: str = "", gets: str = "") -> Iterator[None]:
        chains = [
            f"chain {hook} {{ type filter hook {hook} priority 0\n {rule}\n }}"
            for hook, rule in (("output", sends), ("input", gets))
        ]
        _run("ip", "netns", "exec", self.name, "nft", "table inet faults {\n" + "\n".join(chains) + "\n}")
        try:
            yield
        finally:
            _run("ip", "netns", "exec", self.name, "nft", "delete", "table", "inet", "faults")


class Network:
    """Namespaces on one bridge; all are removed when it is closed."""

    def __init__(self) -> None:
        self._prefix = f"kvpool-{os.getpid()}-{next(_networks)}"
        self._hub = f"{self._prefix}-hub"
        self._spaces = 0
        self._stack = ExitStack()
        with ExitStack() as undo:
            undo.enter_context(self._stack)
            self._add(self._hub)
            _run("ip", "-n", self._hub, "link", "add", "bridge", "type", "bridge")
            _run("ip", "-n", self._hub, "link", "set", "bridge", "up")
            undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def __len__(self) -> int:
        return self._spaces

    def space(self, role: str) -> Space:
        """A further host on the bridge."""
        self._spaces += 1
        space = Space(f"{self._prefix}-{role}", f"{_SUBNET}.{self._spaces}", self._hub, f"plug{self._spaces}")
        self._add(space.name)
        _run("ip", "link", "add", _LINK, "netns", space.name, "type", "veth", "peer", "name", space.plug,
             "netns", self._hub)  # fmt: skip
        _run("ip", "-n", self._hub, "link", "set", space.plug, "master", "bridge", "up")
        _run("ip", "-n", space.name, "address", "add", f"{space.address}/24", "dev", _LINK)
        _run("ip", "-n", space.name, "link", "set", _LINK, "up")
        return space

    def _add(self, name: str) -> None:
        _run("ip", "netns", "add", name)
        self._stack.callback(_remove, name)
        _run("ip", "-n", name, "link", "set", "lo", "up")


def why_not(*faults: Callable[[Space], AbstractContextManager[None]]) -> str:
    """Why namespaces, and these faults in them, cannot be used here; empty when they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [name for name in ("ip", "tc", "nft") if shutil.which(name) is None]:
        return f"{' and '.join(missing)} missing: apt-get install iproute2 nftables"
    try:
        with Network() as network, ExitStack() as stack:
            for fault in (lambda probe: probe.slowed("1mbit"), *faults):
                stack.enter_context(fault(network.space(f"probe{len(network)}")))
            return ""
    except subprocess.CalledProcessError as error:
        return f"network namespaces do not work here: {' '.join(error.cmd)}: {error.stderr.strip()}"


def _either(spaces: Iterable[Space]) -> str:
    return f"{{ {', '.join(space.address for space in spaces)} }}"


def _remove(name: str) -> None:
    with suppress(subprocess.CalledProcessError):
        _run("ip", "netns", "delete", name)


def _enter(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns came with Python 3.12
    if libc.setns(descriptor, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
