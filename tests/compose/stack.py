"""The shipped docker-compose.yml under a project name of the tests' own, and what can be done to its containers."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.http_pages import ask, metrics
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
IMAGE = os.environ.get("KVPOOL_IMAGE", "kvpool:latest")
NODES = ("node-1", "node-2", "node-3")
SERVICES = ("metadata", *NODES)
CLIENT_SCRIPT = (Path(__file__).parent / "client_script.py").read_text(encoding="utf-8")


def why_not() -> str:
    """Why there can be no containers here; empty if there can."""
    if not all(map(shutil.which, ("docker", "docker-compose"))):
        return "docker and docker-compose are not installed"
    if subprocess.run(["docker", "info"], capture_output=True, check=False).returncode:
        return "no Docker engine answers"
    if subprocess.run(["docker", "image", "inspect", IMAGE], capture_output=True, check=False).returncode:
        return f"there is no image {IMAGE}; run `make image`"
    return ""


class Stack:
    """Up with `up`, gone with `down`."""

    def __init__(self, project: str) -> None:
        self.project = project
        # Any free ports: another pool may run on this host.
        ports = {"KVPOOL_GRPC_PORT": "0", "KVPOOL_HTTP_PORT": "0"}
        self._environ = os.environ | ports | {"KVPOOL_IMAGE": IMAGE, "KVPOOL_NODE_SIZE": "64MiB"}
        self._container = f"{project}_engine"
        self._engine: subprocess.Popen[str] | None = None

    def up(self) -> None:
        self.compose("up", "-d")
        self.until_healthy(*SERVICES)
        self.compose("run", "-d", "--name", self._container, "--entrypoint", "sleep", "client", "infinity")
        self._engine = subprocess.Popen(
            ["docker", "exec", "-i", self._container, "python3", "-c", CLIENT_SCRIPT],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip

    def down(self) -> None:
        if self._engine is not None:
            self._engine.communicate()
        self._docker("rm", "-f", self._container)
        self.compose("down", "-v", "--remove-orphans", "-t", "20")

    def compose(self, *arguments: str) -> str:
        return self._run("docker-compose", "-p", self.project, "-f", str(ROOT / "docker-compose.yml"), *arguments)

    def inside(self, service: str, *command: str) -> str:
        """What a command says in a service's container."""
        return self._docker("exec", self.name(service), *command)

    def name(self, service: str) -> str:
        return self.compose("ps", "-q", service).strip()

    def state(self, service: str) -> Mapping:
        [found] = json.loads(self._docker("inspect", self.name(service)))
        return found["State"]

    def settings(self, service: str) -> Mapping:
        [found] = json.loads(self._docker("inspect", self.name(service)))
        return found

    def is_healthy(self, service: str) -> bool:
        state = self.state(service)
        return state["Running"] and state["Health"]["Status"] == "healthy"

    def until_healthy(self, *services: str) -> None:
        for service in services:
            eventually(lambda service=service: self.is_healthy(service))

    # What happens to containers

    def kill(self, service: str) -> None:
        """As an operator does: it stays away until `start`."""
        self._docker("kill", self.name(service))

    def crash(self, service: str) -> None:
        """As a defect does: the engine starts it again by itself."""
        os.kill(self.state(service)["Pid"], signal.SIGKILL)

    def start(self, service: str) -> None:
        self._docker("start", self.name(service))
        self.until_ready(service)

    def pause(self, service: str) -> None:
        self._docker("pause", self.name(service))

    def unpause(self, service: str) -> None:
        self._docker("unpause", self.name(service))

    def disconnect(self, service: str) -> None:
        self._docker("network", "disconnect", f"{self.project}_pool", self.name(service))

    def reconnect(self, service: str) -> None:
        self._docker("network", "connect", "--alias", service, f"{self.project}_pool", self.name(service))

    # What a client sees

    def client(self, what: str, seed: int, *, transports: str = "shm,tcp", timeout_s: float = 5.0) -> Mapping:
        """Store, match or load the chain that ``seed`` makes; see client_script.py."""
        print(json.dumps([what, seed, transports, timeout_s]), file=self._engine.stdin)
        line = self._engine.stdout.readline()
        assert line, "the client has ended"
        return json.loads(line)

    def metadata_metrics(self) -> dict[str, float]:
        return metrics(self._published("metadata", 7302))

    def metadata_is_ready(self) -> bool:
        return ask(self._published("metadata", 7302), "/readyz").status == 200

    def node_states(self) -> dict[str, str]:
        return self.client("nodes", 0)["nodes"]

    def until_ready(self, *services: str) -> None:
        """Until the pool counts the nodes in: sooner than their next health check."""
        eventually(lambda: all(self.node_states().get(service) == "ready" for service in services))

    def _published(self, service: str, port: int) -> str:
        return self.compose("port", service, str(port)).strip()

    def _docker(self, *arguments: str) -> str:
        return self._run("docker", *arguments)

    def _run(self, *command: str) -> str:
        done = subprocess.run(command, env=self._environ, capture_output=True, text=True, check=False, timeout=100)
        assert done.returncode == 0, f"{command}: {done.stderr[-2000:]}"
        return done.stdout
