"""The store node of an engine's host: decides whether one has to be started, and starts one that outlives the engine.

A node that was started here holds a lock in the state folder while it lives. Whoever needs a node tries to start one
under that lock, so that any number of engines end with one node; the system frees the lock however the node ends.
"""

import os
import re
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import kvpool
from kvpool.core.errors import KvpoolError, SettingsError, UnavailableError, UsageError
from kvpool.core.limits import PAGE_BYTES
from kvpool.core.units import parse_size
from kvpool.ops.settings import Settings, node_lock
from kvpool.ops.sources import effective, flag_name, load_settings
from kvpool_connector import detached

JOIN_TIMEOUT_S = 600.0
"""How long a node that an engine starts waits for its pool: they may be started together, in any order."""

STATUS_TIMEOUT_S = 2.0

_POLL_S = 0.02
_LOG_TAIL_BYTES = 4_096
_ENGINE_VARIABLES = re.compile(r"(VLLM|CUDA|NCCL|OMP|KMP|MKL|GOMP|TORCH|PYTORCH|RAY|HF)_|LD_PRELOAD$")


@dataclass(frozen=True, slots=True)
class LocalNode:
    """The store node of this host.

    Attributes:
        node_id: Its name in the pool.
        started: Whether this call started it.
        pid: Its process, if an engine started it: what to send SIGTERM to when it shall end.
        log_path: Where nodes that engines start under this name write.
    """

    node_id: str
    started: bool
    pid: int | None
    log_path: Path


def ensure_local_node(
    pool: str,
    size: str,
    *,
    node_id: str | None = None,
    timeout_s: float = 30.0,
    tls: kvpool.TlsSettings | None = None,
) -> LocalNode:
    """Start a store node on this host unless there is one; returns when it serves, joined to its pool or not yet.

    The node takes its other settings from ``KVPOOL_NODE__*`` and ``KVPOOL_CONFIG``, but any free ports when these
    name none. It runs on when the engine ends. One that is found keeps the size that it has.

    Args:
        pool: The pool to join; it need not run yet.
        size: Memory of the node, e.g. ``8GiB``.
        node_id: Its name; by default the one in the settings, else the host's.
        timeout_s: After this the node is trusted to come up, if it lives.
        tls: The engine's certificates; the node takes its own, ``node-ID.pem``, from the same folder.

    Raises:
        SettingsError: A value that cannot be, or this host's node serves another pool.
        UnavailableError: The node ended as soon as it was started; the message has its last words.
    """
    plan = _plan(pool, size, node_id, tls)
    deadline = time.monotonic() + timeout_s
    while True:
        words_before = _log_bytes(plan.log)
        outcome = _start(plan)
        if outcome == detached.RUNNING_ELSEWHERE:
            return LocalNode(plan.node_id, started=False, pid=None, log_path=plan.log)
        if _lives(plan, deadline):
            return _checked(plan, started=outcome == detached.STARTED)
        if outcome == detached.RUNNING and time.monotonic() < deadline:
            continue  # the other engine's node has ended: this one's turn
        if _is_served(plan, tls):
            return LocalNode(plan.node_id, started=False, pid=None, log_path=plan.log)
        raise UnavailableError(
            f"the store node {plan.node_id!r} ended as soon as it was started: "
            f"{_last_words(plan.log, words_before)} (log: {plan.log})"
        )


class _Plan(NamedTuple):
    """How this host's node is started, and how it is recognised."""

    node_id: str
    pool: str
    command: list[str]
    socket: Path
    segment_lock: Path
    lock: Path
    log: Path


def _plan(pool: str, size: str, node_id: str | None, tls: kvpool.TlsSettings | None) -> _Plan:
    _check_size(size)
    own = {"node.meta": pool, "node.size": size, "tls.dir": str(tls.dir) if tls is not None and tls.dir else None}
    settings = load_settings(overrides={**own, "node.node_id": node_id})
    node, folder = settings.node, _state_folder()
    flags = {**own, "node.node_id": node.node_id, **_unless_set(settings)}
    words = [f"{flag_name(key)}={value}" for key, value in flags.items() if value is not None]
    return _Plan(
        node_id=node.node_id,
        pool=pool,
        command=[sys.executable, "-P", "-m", "kvpool.cli.main", "node", *words],
        socket=node.unix_socket,
        segment_lock=node_lock(node.segment_dir, node.node_id),
        lock=folder / f"{node.node_id}.lock",
        log=folder / f"{node.node_id}.log",
    )


def _check_size(size: str) -> None:
    try:
        size_bytes = parse_size(size)
    except UsageError as error:
        raise SettingsError(f"local_node: {error}") from error
    if size_bytes < PAGE_BYTES:
        raise SettingsError(f"local_node: size {size!r} holds not one page of {PAGE_BYTES} bytes; write e.g. 8GiB")


def _unless_set(settings: Settings) -> dict[str, object]:
    """Several nodes may share a host, and clients learn the ports from the pool: any will do."""
    defaults = {"node.data_port": 0, "node.grpc_port": 0, "node.join_timeout_s": JOIN_TIMEOUT_S}
    unset = {setting.key for setting in effective(settings) if setting.source == "default"}
    return {key: value for key, value in defaults.items() if key in unset}


def _state_folder() -> Path:
    """A folder that only this user can write, so that nobody can plant a log or a lock."""
    state = os.environ.get("XDG_STATE_HOME", "")
    try:
        # The rules of XDG: a relative path is to be ignored.
        folder = (Path(state) if state.startswith("/") else Path.home() / ".local" / "state") / "kvpool"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fchmod(descriptor, 0o700)  # fails for a folder of another user
        finally:
            os.close(descriptor)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home
        raise SettingsError(
            f"cannot keep the log of a store node: {error}; set XDG_STATE_HOME to a folder of your own"
        ) from error
    return folder


def _start(plan: _Plan) -> int:
    """Try to start the node; one of the exit codes of `detached`."""
    environ = {name: value for name, value in os.environ.items() if _ENGINE_VARIABLES.match(name) is None}
    script = [sys.executable, "-P", "-S", detached.__file__]
    arguments = [str(plan.lock), str(plan.segment_lock), plan.pool, *plan.command]
    words_before = _log_bytes(plan.log)
    with _open_log(plan.log) as log:
        outcome = subprocess.run(  # noqa: S603 - our own interpreter, arguments as a list
            [*script, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environ,
            start_new_session=True,
            check=False,
        ).returncode
    if outcome not in {detached.STARTED, detached.RUNNING, detached.RUNNING_ELSEWHERE}:
        raise UnavailableError(f"cannot start a store node: {_last_words(plan.log, words_before)} (log: {plan.log})")
    return outcome


def _lives(plan: _Plan, deadline: float) -> bool:
    """Whether the node comes up: it serves, or lives and has no more time to show it."""
    while not _serves(plan):
        if not detached.is_held(plan.lock):
            return False
        if time.monotonic() >= deadline:
            return True
        time.sleep(_POLL_S)
    return True


def _serves(plan: _Plan) -> bool:
    """Whether the process that was started listens: it has its memory then, which is what can fail."""
    with suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        probe.connect(str(plan.socket))
        credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return bool(struct.unpack("3i", credentials)[0] == _running(plan)[0])
    return False


def _running(plan: _Plan) -> tuple[int | None, str]:
    """Process and pool of the node that was started last; (None, "") while that is being written."""
    pid, _, pool = plan.lock.read_text(encoding="utf-8").partition(" ")
    return (int(pid), pool) if pid else (None, "")


def _checked(plan: _Plan, *, started: bool) -> LocalNode:
    pid, pool = _running(plan)
    if pid is not None and pool != plan.pool:
        raise SettingsError(
            f"the store node {plan.node_id!r} of this host (process {pid}) serves {pool}, not {plan.pool}: name the "
            f"pool the same way in every engine, or set KVPOOL_NODE__NODE_ID for a second node"
        )
    return LocalNode(plan.node_id, started=started, pid=pid, log_path=plan.log)


def _is_served(plan: _Plan, tls: kvpool.TlsSettings | None) -> bool:
    """Whether the pool has a node of this name that this host's shared memory leads to: another user's, say."""
    with (
        suppress(KvpoolError),
        kvpool.connect(plan.pool, transports=["shm"], timeout_s=STATUS_TIMEOUT_S, tls=tls) as client,
    ):
        return any(
            (node.node_id, node.state, node.transport) == (plan.node_id, "ready", "shm")
            for node in client.status(reach=True).nodes
        )
    return False


def _open_log(log: Path) -> BinaryIO:
    try:
        return os.fdopen(
            os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600), "ab"
        )
    except OSError as error:
        raise SettingsError(f"cannot write the log of a store node: {error}; remove what is there") from error


def _log_bytes(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def _last_words(log: Path, since: int) -> str:
    with log.open("rb") as file:
        file.seek(max(since, _log_bytes(log) - _LOG_TAIL_BYTES))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "it said nothing")
