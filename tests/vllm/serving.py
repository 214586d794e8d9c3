"""vLLM's API server as a child process: what `EngineProcess` is for the benchmarks, with vLLM's own metrics and salts.

It answers prompts of token ids, greedily. Its processes are one group, which is killed in the end.
"""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kvpool.bench.vllm_model import BLOCK_TOKENS
from tests.waiting import eventually

KV_BYTES = 128 << 20
REPLY_S = 60.0
STOP_S = 20.0
_ENVIRON = {
    "DO_NOT_TRACK": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",
    "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # has it reset its cache
}
_SAMPLE = re.compile(r"^([a-zA-Z_:]+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


def kv_transfer(pool_uri: str, **extra: object) -> dict[str, object]:
    """What `kvpool vllm-config` prints, with a connector's further settings."""
    return {
        "kv_connector": "KVPoolConnector",
        "kv_connector_module_path": "kvpool_connector.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"pool": pool_uri, "transports": ["shm"], **extra},
    }


@dataclass(frozen=True)
class Answer:
    """What a prompt was answered, and how many of its tokens were not computed for it."""

    tokens: tuple[int, ...]
    cached_tokens: int


class Server:
    """One engine; a context manager that leaves no process behind.

    Args:
        model: Its folder.
        log: File for all that vLLM says.
        transfer: ``--kv-transfer-config``: a dict or the text itself; none by default.
        host: Address to listen on.
        inside: Where it is started, and where it is asked from.
        environ: Further environment variables.
        options: vLLM's flags; True for one without a value.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        transfer: Mapping[str, object] | str | None = None,
        host: str = "127.0.0.1",
        inside: Callable[[], AbstractContextManager[None]] | None = None,
        environ: Mapping[str, str] | None = None,
        **options: object,
    ) -> None:
        self.log = log
        self._address = (host, _free_port(host) if inside is None else 8000)
        self._inside = inside or nullcontext
        flags = {
            "model": model,
            "served-model-name": "tiny",
            "host": host,
            "port": self._address[1],
            "dtype": "float32",  # "auto" makes bfloat16 of float32 weights, whose rounding changes answers
            "block-size": BLOCK_TOKENS,
            "max-model-len": 2_048,
            "max-num-seqs": 8,
            "kv-cache-memory-bytes": KV_BYTES,
            "enforce-eager": True,
            "skip-tokenizer-init": True,
            "enable-prompt-tokens-details": True,
            **{name.replace("_", "-"): value for name, value in options.items()},
        }
        if transfer is not None:
            flags["kv-transfer-config"] = transfer if isinstance(transfer, str) else json.dumps(transfer)
        arguments = [f"--{name}" if value is True else f"--{name}={value}" for name, value in flags.items()]
        with log.open("wb") as output, self._inside():
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | _ENVIRON | dict(environ or {}),
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def ready(self) -> "Server":
        """Wait until it serves."""
        eventually(self._serves)
        return self

    def ask(self, prompt: list[int], max_tokens: int = 8, salt: str | None = None) -> Answer:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        body |= {"return_token_ids": True} | ({"cache_salt": salt} if salt else {})
        answer = json.loads(self._request("POST", "/v1/completions", json.dumps(body)))
        return Answer(
            tuple(answer["choices"][0]["token_ids"]), answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        )

    def forget(self) -> None:
        """Forget what the engine itself has cached, once all that it saves is saved: until then saves hold blocks."""
        eventually(lambda: json.loads(self._request("POST", "/reset_prefix_cache"))["success"])

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of this name that have these labels."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        samples = _SAMPLE.findall(self.metrics())
        found = [float(value) for found, have, value in samples if found == name and all(w in have for w in wanted)]
        assert found, f"no metric {name} {labels}"
        return sum(found)

    def metrics(self) -> str:
        return self._request("GET", "/metrics")

    def said(self, pattern: str) -> list[str]:
        """Lines of its log in which the pattern is found."""
        return [line for line in self.log.read_text(errors="replace").splitlines() if re.search(pattern, line)]

    def close(self) -> None:
        """Ask it to end, wait, and kill all its processes."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _serves(self) -> bool:
        ended = self._process.poll()
        assert ended is None, f"the engine ended with status {ended}: {self.log.read_text(errors='replace')[-4_000:]}"
        try:
            self._request("GET", "/health")
        except OSError:
            return False
        return True

    def _request(self, method: str, path: str, body: str | None = None) -> str:
        connection = http.client.HTTPConnection(*self._address, timeout=REPLY_S)
        try:
            with self._inside():
                connection.connect()
            connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        assert response.status == 200, f"{method} {path}: {response.status} {text[:1_000]}"
        return text


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]
