"""The Helm chart: what it makes fits Kubernetes' own schemas, kvpool's settings, and itself."""

import json
from functools import cache
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from kvpool.cli.main import main
from kvpool.ops.settings import Settings
from kvpool.ops.sources import load_settings
from tests.helm_chart import CHART, NAMESPACE, Helm, find_helm

VERSIONS = ("1.27", "1.37")
OF_THE_OPERATOR = {"ServiceMonitor", "PrometheusRule"}
"""Kinds that the Prometheus operator brings, without a schema here."""

FROM_THE_POD = {"spec.nodeName": "worker-1", "status.podIP": "10.1.2.3"}

VALUES = {
    "plain": {"insecure": True},
    "everything watched": {
        "insecure": True,
        "metrics": {
            "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
            "prometheusRule": {"enabled": True},
            "dashboard": {"enabled": True},
        },
        "imagePullSecrets": [{"name": "registry"}],
        "metadata": {"expectedNodes": 3, "settings": {"lease_max_s": "60s", "reflection": True, "tombstones": 1000}},
        "vllm": {"tenant": "acme"},
    },
    "tls and rdma": {
        "tls": {"enabled": True, "metadataSecret": "kvpool-meta", "nodeHostPath": "/etc/kvpool/certs"},
        "node": {
            "size": "64Gi",
            "hugepages": "require",
            "rdma": {"enabled": True, "count": 2},
            "nodeSelector": {"rdma": "true"},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "priorityClassName": "system-node-critical",
        },
        "metrics": {"enabled": False},
    },
    "memory of the pod, a disk, the host's network": {
        "tls": {"enabled": True, "metadataSecret": "kvpool-meta", "nodesSecret": "kvpool-nodes"},
        "node": {
            "memory": {"kind": "emptyDir"},
            "disk": {"hostPath": "/mnt/nvme/kvpool", "size": "1Ti"},
            "rdma": {"enabled": True, "resource": ""},
            "hostNetwork": True,
            "maxUnavailable": "10%",
        },
        "networkPolicy": {"enabled": False},
        "podDisruptionBudget": {"enabled": False},
    },
}

REFUSED = {
    "insecure: true": {},
    "leave one of them out": {"insecure": True, "tls": {"enabled": True}},
    "needs tls.metadataSecret": {"tls": {"enabled": True}},
    "either tls.nodeHostPath or tls.nodesSecret": {"tls": {"enabled": True, "metadataSecret": "s"}},
    "go together": {"insecure": True, "node": {"disk": {"hostPath": "/mnt"}}},
    "/node/size": {"insecure": True, "node": {"size": "64GB"}},
    "'siez' not allowed": {"insecure": True, "node": {"siez": "64Gi"}},
    "/node/memory/kind": {"insecure": True, "node": {"memory": {"kind": "nfs"}}},
    "/runAsUser": {"insecure": True, "runAsUser": 0},
}


@pytest.fixture(scope="module")
def helm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("helm")
    path = find_helm(folder)
    if path is None:
        pytest.skip("helm is not installed, nor is a package that carries it (`make setup` installs one)")
    return Helm(path, folder)


@pytest.fixture(scope="module")
def rendered(helm):
    return cache(lambda name: helm.render(VALUES[name]))


def of_kind(objects, kind):
    return [found for found in objects if found["kind"] == kind]


def pods(objects):
    return [found["spec"]["template"] for found in objects if found["kind"] in {"Deployment", "DaemonSet"}]


def containers(objects):
    for pod in pods(objects):
        yield from [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def settings_of(container) -> Settings:
    """What kvpool makes of the container's environment."""
    environ = {
        entry["name"]: entry["value"] if "value" in entry else FROM_THE_POD[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        for entry in container["env"]
    }
    return load_settings(None, {}, environ)


def role(objects, name):
    [container] = [container for container in containers(objects) if container["name"] == name]
    return container


@pytest.mark.parametrize("name", VALUES)
def test_helm_finds_nothing_wrong(helm, name):
    assert helm.lint(VALUES[name]) == ""


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_fits_its_schema(rendered, name, version):
    objects = [found for found in rendered(name) if found["kind"] not in OF_THE_OPERATOR]

    for found in objects:
        kubernetes_validate.validate(found, version, strict=True)
    assert {found["kind"] for found in objects} >= {"Deployment", "DaemonSet", "Service", "ConfigMap"}


@pytest.mark.parametrize("name", VALUES)
def test_kvpool_takes_the_settings_that_containers_are_given(rendered, name):
    objects = rendered(name)
    metadata, node = (role(objects, name) for name in ("metadata", "node"))
    [service] = [s for s in of_kind(objects, "Service") if s["metadata"]["name"].endswith("-metadata")]

    meta = settings_of(metadata).meta
    assert meta.advertise_host == f"{service['metadata']['name']}.{NAMESPACE}.svc"
    dialled = settings_of(node).node
    assert dialled.meta == f"grpc://{meta.advertise_host}:{meta.grpc_port}"
    assert (dialled.node_id, dialled.advertise_host) == tuple(FROM_THE_POD.values())
    ports = {port["name"]: port["containerPort"] for port in node["ports"]}
    assert ports == {"data": dialled.data_port, "grpc": dialled.grpc_port, "http": dialled.http_port_used}
    assert [metadata["args"], node["args"]] == [["meta"], ["node"]]


def test_sizes_mean_the_same_to_kubernetes_and_kvpool(rendered):
    objects = rendered("tls and rdma")
    node = role(objects, "node")

    assert settings_of(node).node.size == 64 << 30
    assert node["resources"]["limits"]["memory"] == f"{65536 + 6553 + 1024}Mi"
    assert node["resources"]["limits"]["rdma/hca_shared_devices_a"] == 2


def test_tls_is_never_plaintext(rendered):
    for name in ("tls and rdma", "memory of the pod, a disk, the host's network"):
        for one in ("metadata", "node"):
            container = role(rendered(name), one)
            assert settings_of(container).tls.dir == Path("/etc/kvpool/certs")
            assert any(mount["mountPath"] == "/etc/kvpool/certs" for mount in container["volumeMounts"])


@pytest.mark.parametrize("name", VALUES)
def test_containers_may_do_no_more_than_they_must(rendered, name):
    objects = rendered(name)

    for container in containers(objects):
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"]
        assert not security["allowPrivilegeEscalation"]
        assert security["capabilities"]["drop"] == ["ALL"]
        if container["name"] != "prepare":
            assert set(security["capabilities"].get("add", [])) <= {"IPC_LOCK"}
            assert security.get("runAsUser") is None
    for pod in pods(objects):
        assert pod["spec"]["securityContext"]["runAsNonRoot"]
        assert not pod["spec"]["automountServiceAccountToken"]


@pytest.mark.parametrize("name", VALUES)
def test_what_selects_pods_finds_them(rendered, name):
    objects = rendered(name)
    labels = [pod["metadata"]["labels"] for pod in pods(objects)]
    selectors = [found["spec"]["selector"] for found in of_kind(objects, "Service")]
    selectors += [found["spec"]["selector"]["matchLabels"] for found in of_kind(objects, "PodDisruptionBudget")]
    selectors += [found["spec"]["podSelector"]["matchLabels"] for found in of_kind(objects, "NetworkPolicy")]

    for selector in selectors:
        assert sum(selector.items() <= of_pod.items() for of_pod in labels) == 1
    services = [found["metadata"]["labels"] for found in of_kind(objects, "Service")]
    for monitor in of_kind(objects, "ServiceMonitor"):
        chosen = monitor["spec"]["selector"]["matchLabels"]
        assert sum(chosen.items() <= of_service.items() for of_service in services) == 1


def test_pods_get_longer_to_stop_than_transfers_may_take(rendered):
    for name in VALUES:
        [nodes] = of_kind(rendered(name), "DaemonSet")
        drain_s = settings_of(role(rendered(name), "node")).node.drain_timeout_s
        assert nodes["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > drain_s


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("plain", []),
        ("everything watched", ["--tenant", "acme"]),
        ("tls and rdma", ["--tls-dir", "/etc/kvpool/certs"] + [f"--transport={t}" for t in ("shm", "ucx", "tcp")]),
    ],
)
def test_engines_get_what_the_command_prints(rendered, capsys, name, flags):
    [config] = [c for c in of_kind(rendered(name), "ConfigMap") if c["metadata"]["name"].endswith("-vllm")]
    uri = settings_of(role(rendered(name), "node")).node.meta

    assert main(["vllm-config", "--pool", uri, *flags]) == 0

    assert json.loads(capsys.readouterr().out) == json.loads(config["data"]["KV_TRANSFER_CONFIG"])


def test_rules_and_dashboard_are_those_of_the_repository(rendered):
    objects = rendered("everything watched")
    [rule] = of_kind(objects, "PrometheusRule")
    [dashboard] = [c for c in of_kind(objects, "ConfigMap") if "grafana_dashboard" in c["metadata"]["labels"]]

    folder = CHART.parents[1]
    assert rule["spec"] == yaml.safe_load((folder / "prometheus" / "alerts.yml").read_text(encoding="utf-8"))
    shipped = json.loads((folder / "grafana" / "dashboards" / "kvpool.json").read_text(encoding="utf-8"))
    assert json.loads(dashboard["data"]["kvpool.json"]) == shipped
    jobs = {m["spec"]["endpoints"][0]["relabelings"][0]["replacement"] for m in of_kind(objects, "ServiceMonitor")}
    assert jobs == {"kvpool-metadata", "kvpool-node"}


@pytest.mark.parametrize("said", REFUSED)
def test_values_that_cannot_be_are_refused_in_words(helm, said):
    done = helm.template(REFUSED[said])

    assert done.returncode != 0
    assert said in done.stderr
