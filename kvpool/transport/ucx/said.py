"""What UCX says in its log: what it moves bytes over, and what it does not find. NIXL tells neither.

A line with a choice, written when UCX meets the first peer of a kind (``ucp_worker_print_used_tls``)::

    [1.0] [host:1:0] ucp_worker.c:1998 UCX  INFO  NAME inter-node cfg#2 rma(rc_mlx5/mlx5_0:1)  am(…)  ka(ud_mlx5/…)

Each lane is transport/device. ``rma`` lanes are one-sided; ``rma_am`` says that UCX does reads by messages, as over
TCP; bulk data also takes the ``am`` lanes. ``ka`` and ``amo`` carry none of ours.
"""

import ctypes
import os
import re
import threading
from collections.abc import Mapping

from kvpool.ops.logging import get_logger

_CHOICE = re.compile(r"(?:intra|inter)-node cfg#\d+ (.*)")
_LANES = re.compile(r"\b(?:rma|rma_am|am)\(([^)]*)\)")
_MISSING = re.compile(
    r"UCX  WARN  (network device|transport)s? ('.*') (?:is|are) not available, please use one or more of: (.*)"
)
_ERROR = re.compile(r"UCX  ERROR +(.*)")

_READ_BYTES = 1 << 20

log = get_logger("kvpool.transport.ucx")


def carrier_of(line: str) -> str:
    """What the line says that UCX moves data over, space between lanes; empty if it says nothing of that."""
    choice = _CHOICE.search(line)
    if choice is None:
        return ""
    return " ".join(dict.fromkeys(lane for group in _LANES.findall(choice[1]) for lane in group.split()))


def runs_over_tcp(carrier: str) -> bool:
    """Whether all lanes are TCP: shared memory, or any hardware, is something better."""
    return bool(carrier) and all(lane.startswith("tcp/") for lane in carrier.split())


def why_useless(said: str, error: str, environ: Mapping[str, str]) -> str:
    """Why UCX did not start with an ``error``, by what it ``said`` meanwhile: names the values asked for, and a fix."""
    asked = [f"{name}={environ[name]!r}" for name in ("UCX_TLS", "UCX_NET_DEVICES") if environ.get(name)]
    values = " and ".join(asked) or "what this host has"
    missing = {kind: (names, there) for kind, names, there in _MISSING.findall(said)}
    if "network device" in missing:
        names, there = missing["network device"]
        return f"UCX does not find {names} of {values}; use one or more of {there}"
    if "transport" in missing:
        names, there = missing["transport"]
        return f"UCX does not have {names} of {values}; use one or more of {there}"
    return f"UCX does not work with {values}: {(_ERROR.findall(said) or [error])[-1]}"


def refuses_memory(said: str) -> bool:
    """Whether some device did not take memory that it was given. UCX may go on without that device."""
    return "failed to register" in said


class UcxLog:
    """What UCX says, in memory: its choices, for `carrier`, and its warnings, for our log.

    UCX opens the file when it is loaded, so this must be there before. It writes nothing on a transfer's way.
    """

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("ucx-log")
        self._libc = ctypes.CDLL(None)
        self._lock = threading.Lock()
        self._read_bytes = 0
        self._carrier = ""
        os.environ.setdefault("UCX_LOG_FILE", f"/proc/self/fd/{self._descriptor}")
        os.environ.setdefault("UCX_LOG_LEVEL", "info")

    def carrier(self) -> str:
        """What UCX moves data over, as far as it has said; passes on what else it has said since the last call."""
        self.read()
        return self._carrier

    def read(self) -> str:
        """What UCX has said since the last call; its warnings go to our log."""
        with self._lock:
            self._libc.fflush(None)
            raw = os.pread(self._descriptor, _READ_BYTES, self._read_bytes)
            raw = raw[: raw.rfind(b"\n") + 1]  # the rest of the line may be on its way
            self._read_bytes += len(raw)
            said = raw.decode(errors="replace")
            for line in said.splitlines():
                self._carrier = carrier_of(line) or self._carrier
                if "UCX  WARN" in line or "UCX  ERROR" in line:
                    log.warning("ucx_says", line=line)
            return said

    def close(self) -> None:
        """Forget what was said."""
        os.close(self._descriptor)
