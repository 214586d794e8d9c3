"""The framed protocol: one codec for hot metadata calls and for block bytes. See `frame` and `messages`."""
