"""The payload of a request, which a session receives straight to where it belongs."""

from kvpool.core.errors import ProtocolError
from kvpool.core.limits import DEADLINE_S_MAX
from kvpool.transport.wire.framed import FramedSocket

UNSAID_S = 30.0
"""Time of a request whose peer does not say how long it waits."""


class Payload:
    """The payload of the request at hand, to be received at most once, and dropped if the session does not.

    Attributes:
        size_bytes: Its length.
        timeout_s: Time that the peer gives the request; `UNSAID_S` when it does not say.
    """

    def __init__(self, framed: FramedSocket, size_bytes: int, deadline_ms: int = 0) -> None:
        self.size_bytes = size_bytes
        self.timeout_s = min(deadline_ms / 1000, DEADLINE_S_MAX) or UNSAID_S
        self._framed = framed
        self._left = size_bytes

    def receive_into(self, view: memoryview) -> None:
        """Fill ``view`` with the next bytes of the payload."""
        if len(view) > self._left:
            raise ProtocolError(f"payload has {self._left} bytes left, not {len(view)}")
        self._left -= len(view)
        self._framed.receive_into(view)

    def skip(self, size_bytes: int) -> None:
        """Read and drop the next ``size_bytes``."""
        self._left -= size_bytes
        self._framed.drain(size_bytes)

    def is_wanted(self) -> bool:
        """Whether the peer is still there to be answered."""
        return not self._framed.hung_up()

    def drop(self) -> None:
        """Read what the session left over, so that the next frame can be read."""
        self.skip(self._left)
