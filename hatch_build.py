"""Build hook: generate kvpool/v1 from proto/kvpool/v1 with the protoc of grpcio-tools, pinned in pyproject.toml."""

import os
import sys
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ProtocHook(BuildHookInterface):
    def initialize(self, version, build_data):
        from grpc_tools import protoc

        # protoc looks there for its plug-ins: beside this Python when the build has no environment of its own.
        os.environ["PATH"] += os.pathsep + str(Path(sys.executable).parent)
        root = Path(self.root)
        protos = sorted(str(p) for p in (root / "proto").rglob("*.proto"))
        out = str(root)
        status = protoc.main(
            [
                "protoc",
                f"-I{root / 'proto'}",
                f"--python_out={out}",
                f"--grpc_python_out={out}",
                f"--mypy_out={out}",
                f"--mypy_grpc_out={out}",
                *protos,
            ]
        )
        if status:
            raise RuntimeError(f"protoc failed with status {status} on {protos}")
        (root / "kvpool" / "v1" / "__init__.py").write_text('"""Generated from proto/kvpool/v1: do not edit."""\n')
