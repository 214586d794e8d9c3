"""Where one command runs: its processes and segments can be told from all others."""

import os
import uuid
from pathlib import Path

import psutil

MARK = "TEST_PLACE_MARK"
"""Environment variable by which every process of one test is found, whoever its parent is by now."""


class Place:
    """An environment for one command: its processes carry a mark, its segments lie in a folder of their own."""

    def __init__(self, segments: Path) -> None:
        self.segments = segments
        self.environ = os.environ | {MARK: uuid.uuid4().hex, "KVPOOL_NODE__SEGMENT_DIR": str(segments)}

    def processes(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == self.environ[MARK]
        except psutil.Error:
            return False

    def assert_clean(self) -> None:
        assert self.processes() == []
        assert list(self.segments.iterdir()) == []
