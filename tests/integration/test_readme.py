"""The Python of the README runs as it stands there."""

import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"
URI = "grpc://127.0.0.1:7300"


def test_the_readmes_python_runs(embedded):
    [code] = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert URI in code
    names = {}

    try:
        exec(compile(code.replace(URI, embedded.uri), str(README), "exec"), names)
        assert names["result"].loaded == 4
    finally:
        if "pool" in names:
            names["pool"].close()
