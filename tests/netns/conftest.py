"""Pools and engines on hosts of their own; those with engines need vLLM to be collected, and all need root."""

import importlib.util

_found = importlib.util.find_spec("vllm")
if _found is None or _found.origin is None:  # without vLLM, tests/vllm may be found as a namespace package
    collect_ignore = ["test_hosts.py"]
