"""Fuzzers of what reads bytes from outside: `make fuzz` for minutes, `make test` for a moment. See `target.py`."""
