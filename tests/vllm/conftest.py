"""Tests with vLLM's own classes: collected only where vLLM is installed. Fixtures of real engines and of schedulers."""

import importlib.util
import warnings

_found = importlib.util.find_spec("vllm")
if _found is None or _found.origin is None:  # without vLLM, this folder itself may be found as a namespace package
    collect_ignore_glob = ["*.py"]
else:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's and torch's own, while they are imported
        from tests.vllm.engine_fixtures import cluster, healthy_cluster, model, prompt
        from tests.vllm.scheduler_fixtures import (
            engines,
            own_engines,
            own_pool,
            shared_pool,
            tiny_model,
            tokens,
        )

    __all__ = [
        "cluster",
        "engines",
        "healthy_cluster",
        "model",
        "own_engines",
        "own_pool",
        "prompt",
        "shared_pool",
        "tiny_model",
        "tokens",
    ]
