"""Metadata services whose state is in Redis: any number of them serve one pool, and any of them can die."""
