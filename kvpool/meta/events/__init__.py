"""Publishes what becomes loadable from the pool and what ceases to be, for routers that follow it."""

from kvpool.meta.events.publisher import EventPublisher

__all__ = ["EventPublisher"]
