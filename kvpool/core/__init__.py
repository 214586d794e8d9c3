"""Pure state: keys, namespaces, the directory, leases, eviction, slots. No I/O, no clock, no randomness of its own."""
