"""What a pool whose state is in Redis does not do yet."""

from typing import NoReturn

from kvpool.core.errors import UsageError


class NoDrains:
    """Stands where a service in one process moves blocks between nodes."""

    def drain(self, node_id: str, timeout_s: float, *, stay: bool) -> NoReturn:  # noqa: ARG002
        """Refused; raises UsageError."""
        raise _refusal(node_id)

    def progress(self, node_id: str) -> NoReturn:
        """Refused; raises UsageError."""
        raise _refusal(node_id)

    def cancel(self, node_id: str) -> NoReturn:
        """Refused; raises UsageError."""
        raise _refusal(node_id)


def _refusal(node_id: str) -> UsageError:
    return UsageError(
        f"node {node_id!r} cannot be drained: a pool whose state is in Redis does not copy blocks between nodes yet; "
        "stop the node, and its blocks return with it"
    )
