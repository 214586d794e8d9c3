"""What GPU memory needs, and what to do when it is not there."""

from importlib import import_module
from typing import Any

from kvpool.core.errors import UnavailableError

INSTALL = "pip install 'kvpool[cuda13]'   (with CUDA 12: pip install 'kvpool[cuda12]')"


def require_gpu() -> Any:  # noqa: ANN401 - a module that may not be installed
    """CuPy, and with it a GPU.

    Raises:
        UnavailableError: One of the two is missing; says how to install CuPy.
    """
    try:
        cupy = import_module("cupy")
        devices = cupy.cuda.runtime.getDeviceCount()
    except ImportError as error:
        raise UnavailableError(f"GPU memory needs CuPy, which cannot be imported ({error}): {INSTALL}") from error
    except Exception as error:  # CuPy's own, which cannot be named without it
        raise UnavailableError(f"GPU memory needs a CUDA device and its driver: {error}") from error
    if not devices:
        raise UnavailableError("GPU memory needs a CUDA device; CUDA_VISIBLE_DEVICES hides all, or there is none")
    return cupy
