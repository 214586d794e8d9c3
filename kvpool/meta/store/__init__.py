"""Where a metadata service keeps its directory: in its own memory, or in Redis for many services to share."""
