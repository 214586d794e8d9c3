"""The one file that touches NIXL: an agent with one registered region, and batched reads from other agents' regions."""

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

import numpy as np
from numpy.typing import NDArray

from kvpool.core.errors import ProtocolError, SettingsError, UnavailableError
from kvpool.core.limits import PAGE_BYTES
from kvpool.ops.logging import get_logger
from kvpool.transport.ucx.messages import Region
from kvpool.transport.ucx.said import refuses_memory

INSTALL = "pip install 'kvpool[ucx]'"

PACKAGES = ("nixl_cu12", "nixl_cu13")
"""Builds of NIXL, in the order to try them; all run without a GPU."""

IDLE_POLL_US = 200_000
"""How often NIXL's progress thread looks for work when UCX has not woken it. NIXL's own Python class asks for 0, which
keeps a core busy for ever; that is why the bindings below it are used here."""

WAIT_S_MAX = 0.0005

Memory = NDArray[np.uint8]

log = get_logger("kvpool.transport.ucx")


def require_nixl() -> str:
    """The package that has NIXL here, without loading it; raises SettingsError with what to install if none has."""
    for package in PACKAGES:
        if find_spec(package) is not None:
            return package
    raise SettingsError(f"the ucx transport needs NIXL, which is not installed here; run: {INSTALL}")


@dataclass(slots=True)
class _Peer:
    """Another agent's region, prepared to be read; ``users`` is how often it was added and not forgotten."""

    name: str
    agent: bytes
    pages: int
    size_bytes: int
    users: int = 1
    broken: bool = False


class Agent:
    """A NIXL agent over UCX, and its region. Thread-safe; lives as long as the process.

    Args:
        name: Unique among all agents that it will meet.
        exported: What others may read.
        local: The same memory to write into, where ``exported`` may not be written; else the same array.
        devices: Network devices to use, as UCX names them; empty: all. ``UCX_NET_DEVICES`` goes before it.
        said: What UCX has said since it was last asked; NIXL does not tell all that fails.
    """

    def __init__(
        self,
        name: str,
        exported: Memory,
        local: Memory,
        devices: str,
        said: Callable[[], str] = str,
    ) -> None:
        self._nixl = import_module(f"{require_nixl()}._bindings")
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = IDLE_POLL_US
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_RW
        self._agent = self._nixl.nixlAgent(name, config)
        options = {"engine_config": f"NET_DEVICES={devices}"} if devices else {}
        self._backend = self._agent.createBackend("UCX", options)
        shown, regions = self._register_all(exported, local, said)
        agent = bytes(self._agent.getLocalPartialMD(regions, inc_conn_info=True, backends=[self._backend]))
        self.region = Region(agent, shown.ctypes.data, shown.nbytes)
        self._pages = self._prepare(self._nixl.NIXL_INIT_AGENT, local.ctypes.data, local.nbytes)
        self._size_bytes = local.nbytes
        self._lock = threading.Lock()
        self._peers: dict[int, _Peer] = {}
        self._numbers = itertools.count(1)

    def add_peer(self, region: Region) -> int:
        """Make ``region`` known; the peer's number. It is forgotten when it was as often as it was added.

        Raises:
            UnavailableError: Nobody can be reached there, or not at that region.
        """
        with self._lock:
            for number, peer in self._peers.items():
                if peer.agent == region.agent and not peer.broken:
                    peer.users += 1
                    return number
            try:
                name = self._agent.loadRemoteMD(region.agent)
                name = name.decode() if isinstance(name, bytes) else name
                pages = self._prepare(name, region.address, region.size_bytes)
            except Exception as error:
                raise UnavailableError(f"the peer's memory cannot be reached over UCX: {error}") from error
            number = next(self._numbers)
            self._peers[number] = _Peer(name, region.agent, pages, region.size_bytes)
            return number

    def forget_peer(self, number: int) -> None:
        """The other end of `add_peer`; with the last one all that NIXL keeps of the peer goes."""
        with self._lock:
            peer = self._peers.get(number)
            if peer is None:
                return
            peer.users -= 1
            if not peer.users:
                del self._peers[number]
                self._break(peer)
                self._attempt(self._agent.releasedDlistH, peer.pages)

    def read(self, number: int, pages_each: int, ours: NDArray[np.uint32], theirs: NDArray[np.uint32]) -> None:
        """Read blocks from a peer; returns when nothing of them can arrive any more, however long that takes.

        Raises:
            ProtocolError: Pages that are not there.
            UnavailableError: The peer has gone.
        """
        peer = self._peers.get(number)
        if peer is None:
            raise UnavailableError("the peer is not known any more; meet it again")
        _check_pages(ours, pages_each, self._size_bytes)
        _check_pages(theirs, pages_each, peer.size_bytes)
        try:
            handle = self._agent.makeXferReq(
                self._nixl.NIXL_READ,
                self._pages,
                _each_page(ours, pages_each),
                peer.pages,
                _each_page(theirs, pages_each),
                "",
                [self._backend],
                False,  # noqa: FBT003 - neighbours are merged into one read
            )
            try:
                self._drive(handle)
            finally:
                self._attempt(self._agent.releaseXferReq, handle)
        except Exception as error:
            with self._lock:
                self._break(peer)
            raise UnavailableError(f"the peer's memory cannot be read over UCX: {error}") from error

    def _drive(self, handle: int) -> None:
        """Post a transfer and wait for its end. The progress thread does the work; asking for the state helps it."""
        begun_s = time.monotonic()
        state = self._agent.postXferReq(handle, "")
        while state == self._nixl.NIXL_IN_PROG:
            waited_s = time.monotonic() - begun_s
            time.sleep(min(waited_s / 8, WAIT_S_MAX))
            state = self._agent.getXferStatus(handle)
        if state != self._nixl.NIXL_SUCCESS:
            raise UnavailableError(f"UCX gave up a read: {state}")

    def _register_all(self, exported: Memory, local: Memory, said: Callable[[], str]) -> tuple[Memory, object]:
        """Register both; which of them others may read, and NIXL's list of it.

        Verbs register only memory that may be written (openucx/ucx issue 4924), whatever it is for. Then others are
        shown ``local``, and could write it if they wanted to.
        """
        if exported is local:
            return local, self._register(local)
        try:
            regions = self._register(exported)
            refused = refuses_memory(said())
        except Exception:  # noqa: BLE001 - what NIXL raises has no common base
            refused = True
        ours = self._register(local)
        if refused:
            log.warning("registered_writable", reason="a device takes no memory that may only be read")
            return local, ours
        return exported, regions

    def _register(self, memory: Memory) -> object:
        regions = self._nixl.nixlRegDList(self._nixl.DRAM_SEG, [(memory.ctypes.data, memory.nbytes, 0, "")])
        self._agent.registerMem(regions, [self._backend])
        return regions

    def _prepare(self, name: str, address: int, size_bytes: int) -> int:
        """A region's pages as a descriptor list, made once: a transfer names pages of it, whatever blocks they hold."""
        pages = [[address, PAGE_BYTES, 0, PAGE_BYTES, size_bytes // PAGE_BYTES]]
        handle = self._agent.prepXferDlist(name, self._nixl.DRAM_SEG, np.array(pages, np.uint64), [self._backend])
        return int(handle)

    def _break(self, peer: _Peer) -> None:
        """Drop the connection to a peer, once: whoever adds it again gets another one."""
        if not peer.broken:
            peer.broken = True
            self._attempt(self._agent.invalidateRemoteMD, peer.name)

    def _attempt(self, call: Callable[..., object], *args: object) -> None:
        try:
            call(*args)
        except Exception as error:
            # A peer that broke off is forgotten by NIXL itself.
            if type(error).__name__ not in {"nixlNotFoundError", "nixlRemoteDisconnectError"}:
                raise


def _each_page(firsts: NDArray[np.uint32], pages_each: int) -> NDArray[np.int32]:
    return np.add.outer(firsts.astype(np.int32), np.arange(pages_each, dtype=np.int32)).ravel()


def _check_pages(firsts: NDArray[np.uint32], pages_each: int, size_bytes: int) -> None:
    if not len(firsts) or pages_each < 1:
        raise ProtocolError("a transfer of no pages")
    last = int(firsts.max()) + pages_each
    if last > size_bytes // PAGE_BYTES:
        raise ProtocolError(f"page {last - 1} is not in a region of {size_bytes // PAGE_BYTES} pages")
