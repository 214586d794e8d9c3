"""`python -m kvpool.ops.metrics`, in the repository's root: writes the files that are made of the declarations."""

from pathlib import Path

from kvpool.ops.metrics.generate import generated

if __name__ == "__main__":
    for path, content in generated().items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(content, encoding="utf-8")
