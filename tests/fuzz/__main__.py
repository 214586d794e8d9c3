"""Runs fuzz targets under atheris, each in a process of its own: ``python -m tests.fuzz [TARGET...] [--runs N]``.

What breaks one is written beside its corpus; to keep it, move it to ``found/TARGET/``.
"""

import argparse
import logging
import os
import sys
import tempfile
import threading
import tracemalloc
import warnings
from pathlib import Path

import atheris
import structlog

with atheris.instrument_imports(include=["kvpool", "http", "yaml"]):
    from tests.fuzz.targets import TARGETS

INPUT_BYTES_MAX = 16_384
ONE_INPUT_S = 10
"""Longer than that for one input is a failure too."""

MEMORY = Path("/dev/shm")
PROCESS_MB_MAX = 1_024


def main() -> int:
    """How many targets failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"by default all: {', '.join(TARGETS)}")
    parser.add_argument("--runs", type=int, default=-1, help="inputs for each target; by default no limit")
    parser.add_argument("--seconds", type=int, default=0, help="time for each target; by default no limit")
    parser.add_argument("--seed", type=int, default=0, help="of what is tried; 0: another one each time")
    parser.add_argument("--corpus", type=Path, help="where inputs are kept; by default not")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvpool-fuzz-", dir=MEMORY if MEMORY.is_dir() else None) as scratch:
        tempfile.tempdir = scratch  # of the targets too
        corpora = arguments.corpus or Path(scratch)
        failed = [name for name in arguments.targets or TARGETS if not passes(name, corpora / name, arguments)]
    print(f"failed: {', '.join(failed)}" if failed else "no target failed")  # noqa: T201 - a program
    return len(failed)


def passes(name: str, corpus: Path, arguments: argparse.Namespace) -> bool:
    """Fuzz one target in a child, since libFuzzer ends the process that it ran in."""
    TARGETS[name].write_seeds(corpus)
    print(f"{name}: {len(TARGETS[name].found())} kept, corpus of {len(list(corpus.iterdir()))}", flush=True)  # noqa: T201
    child = os.fork()
    if not child:
        fuzz(name, corpus, arguments)
    _, status = os.waitpid(child, 0)
    return status == 0


def fuzz(name: str, corpus: Path, arguments: argparse.Namespace) -> None:
    """Does not return."""
    warnings.simplefilter("error")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    tracemalloc.start(1)
    options = {
        "runs": arguments.runs,
        "max_total_time": arguments.seconds,
        "seed": arguments.seed,
        "max_len": INPUT_BYTES_MAX,
        "timeout": ONE_INPUT_S,
        "rss_limit_mb": PROCESS_MB_MAX,
        "artifact_prefix": f"{corpus.parent}/{name}-",
        "print_final_stats": 0,
        "verbosity": int(arguments.seconds > 0),
    }
    target = TARGETS[name]
    atheris.Setup([sys.argv[0], *(f"-{key}={value}" for key, value in options.items()), str(corpus)], target)
    atheris.Fuzz()


if __name__ == "__main__":
    assert threading.active_count() == 1
    sys.exit(main())
