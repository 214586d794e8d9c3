"""Whose something is: the tenant of a namespace, of a lease and of a reservation."""

from kvpool.core.directory.state import DirectoryState


def tenant_of_namespace(state: DirectoryState, namespace_id: bytes) -> str | None:
    """The tenant whose blocks are in the namespace; None when it is not open."""
    entry = state.namespaces.get(namespace_id)
    return None if entry is None else entry.namespace.tenant


def tenant_of_lease(state: DirectoryState, lease: int) -> str | None:
    """The tenant whose blocks are leased; None when the lease is over."""
    row = state.leases.row_of(lease)
    return None if row is None else state.entries[state.blocks.namespace[row]].namespace.tenant


def tenant_of_reservation(state: DirectoryState, number: int) -> str | None:
    """The tenant whose blocks are being written; None when it is over, or is a copy that the pool makes itself."""
    reservation = state.reservations.get(number)
    return None if reservation is None else state.entries[reservation.namespace].namespace.tenant
