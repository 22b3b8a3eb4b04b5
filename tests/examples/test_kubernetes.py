"""Do the manifests give their pods what `allranks run` needs, and do they fit the schemas that are on PyPI?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from allranks.model.identity import world_from_env

MANIFESTS = Path(__file__).parents[2] / "examples" / "kubernetes"
# What the controller adds to the pod with index 2; the rest must stand in the manifest.
INJECTED = {
    "trainjob": {"PET_NNODES": "4", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "2"}
    | {"PET_MASTER_ADDR": "gpt-node-0-0.gpt", "PET_MASTER_PORT": "29400", "JOB_COMPLETION_INDEX": "2"},
    "pytorchjob": {"RANK": "2", "WORLD_SIZE": "32", "MASTER_ADDR": "gpt-master-0", "MASTER_PORT": "23456"}
    | {"PET_NNODES": "4", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "2"},
    "jobset": {"JOB_COMPLETION_INDEX": "2", "HOSTNAME": "gpt-worker-0-2"},
    "indexed-job": {"JOB_COMPLETION_INDEX": "2", "HOSTNAME": "gpt-2"},
    "leaderworkerset": {"LWS_WORKER_INDEX": "2", "LWS_GROUP_SIZE": "4", "LWS_LEADER_ADDRESS": "gpt-0.gpt.default"},
    "volcano": {"VC_TASK_INDEX": "2", "VC_WORKER_NUM": "4"}
    | {"VC_WORKER_HOSTS": ",".join(f"gpt-worker-{i}.gpt" for i in range(4))},
}


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((MANIFESTS / f"{name}.yaml").read_text()))


def containers(tree: Any) -> Iterator[dict[str, Any]]:
    """Everything with a command and variables."""
    if isinstance(tree, dict):
        if "command" in tree:
            yield tree
        for part in tree.values():
            yield from containers(part)
    elif isinstance(tree, list):
        for part in tree:
            yield from containers(part)


def pod_templates(tree: Any) -> Iterator[dict[str, Any]]:
    if isinstance(tree, dict):
        for name, part in tree.items():
            if name in ("template", "workerTemplate") and "containers" in part.get("spec", {}):
                yield part
            yield from pod_templates(part)
    elif isinstance(tree, list):
        for part in tree:
            yield from pod_templates(part)


def test_there_is_a_manifest_of_each_kind() -> None:
    assert {path.stem for path in MANIFESTS.glob("*.yaml")} == {*INJECTED, "key"}


@pytest.mark.parametrize("name", INJECTED)
def test_a_pod_of_the_manifest_knows_its_place(name: str) -> None:
    found = [each for document in documents(name) for each in containers(document)]
    assert found
    for container in found:
        assert container["command"] == ["allranks", "run", "train.py"]
        own = {each["name"]: each.get("value", "from a Secret") for each in container["env"]}
        world = world_from_env(INJECTED[name] | own | {"KUBERNETES_SERVICE_HOST": "10.96.0.1"})
        assert (world.node_index, world.num_nodes) == (2, 4)
        assert world.master is not None
        assert world.master[0].startswith("gpt-")
        assert "ALLRANKS_SECRET" in own


@pytest.mark.by_hand
@pytest.mark.parametrize("name", [*INJECTED, "key"])
def test_the_manifests_fit_the_schemas(name: str) -> None:
    core = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for document in documents(name):
        group = document["apiVersion"].split("/")[0]
        if group in ("v1", "batch"):
            core.validate(document, "1.37", strict=True)
        for template in pod_templates(document):
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": template["spec"]}
            core.validate(pod, "1.37", strict=True)
        if group in ("trainer.kubeflow.org", "jobset.x-k8s.io"):
            models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
            kind = {"TrainJob": "TrainerV1alpha1TrainJob", "JobSet": "JobsetV1alpha2JobSet"}[document["kind"]]
            read = getattr(models, kind).from_dict(document)
            assert_kept(document, read.to_dict())
        if group == "kubeflow.org":
            training = pytest.importorskip("kubeflow.training", reason="pip install kubeflow-training")
            read = training.KubeflowOrgV1PyTorchJobSpec
            assert set(document["spec"]) <= set(read.attribute_map.values())
            for replicas in document["spec"]["pytorchReplicaSpecs"].values():
                assert set(replicas) <= set(training.KubeflowOrgV1ReplicaSpec.attribute_map.values())


def assert_kept(written: Any, read: Any) -> None:
    """Nothing of the manifest is unknown to the model: what it does not know, it leaves out."""
    if isinstance(written, dict):
        assert set(written) <= set(read), set(written) - set(read)
        for name, part in written.items():
            assert_kept(part, read[name])
    elif isinstance(written, list):
        assert len(written) == len(read)
        for one, other in zip(written, read, strict=True):
            assert_kept(one, other)
    else:
        assert written == getattr(read, "actual_instance", read)
