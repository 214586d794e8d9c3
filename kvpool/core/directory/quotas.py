"""Tenants that came above their quota other than by writing: it was lowered, or a node brought blocks back."""

from kvpool.core.directory.state import DirectoryState


def trim(state: DirectoryState, most: int) -> bool:
    """See `Directory.trim`."""
    now_us = state.now_us()
    for owner in state.tenants.over_quota():
        while (state.tenants.room_bytes(owner) or 0) < 0:
            if not most:
                return True
            if not state.placer.give_back(owner, now_us):
                break  # all is held: once more when leases have ended
            most -= 1
    return False
