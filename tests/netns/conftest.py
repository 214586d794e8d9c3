"""Pools and engines on hosts of their own: only vLLM is needed to collect these tests, and root to run them."""

import importlib.util

_found = importlib.util.find_spec("vllm")
if _found is None or _found.origin is None:  # without vLLM, tests/vllm may be found as a namespace package
    collect_ignore_glob = ["test_*.py"]
