"""Manifests for Kubernetes, against a schema written from the published fields, and their YAML."""

from __future__ import annotations

import json

import jsonschema
import pytest
import yaml

from mdata.errors import UsageError
from tests.helpers.house_rules import ROOT
from tests.trainer.launching.jobs import a_job
from trainer.launching.on_kubernetes import KubernetesOptions, manifest, yaml_text

SCHEMAS = json.loads((ROOT / "tests/golden/kubernetes.json").read_text())


def options(**more):
    known = {
        "name": "first",
        "namespace": None,
        "image": "registry/mtrain:1",
        "claims": ["data:/data"],
        "env": {"NCCL_DEBUG": "WARN", "A": "b=c"},
        "gpus": 8,
        "cpus": 4,
        "grace_s": 120,
        "max_restarts": 5,
    }
    return KubernetesOptions(**{**known, **more})


def made(tmp_path, kind="jobset", job=None, **more):
    job = a_job(tmp_path, nodes=(3, 3), ranks_per_node=8, **(job or {}))
    facts = manifest(job, ["run.toml", "mesh.tp=8"], options(**more), kind=kind)
    text = yaml_text(facts)
    assert yaml.safe_load(text) == facts
    jsonschema.validate(facts, {**SCHEMAS["manifests"][facts["kind"]], "$defs": SCHEMAS["$defs"]})
    return facts


def test_a_job_set_runs_torchrun_in_a_pod_of_each_node(tmp_path):
    facts = made(tmp_path, namespace="lm")
    assert facts["metadata"] == {"name": "first", "namespace": "lm"}
    (replicated,) = facts["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (3, 3, "Indexed")
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == [
        "torchrun", "--no-python", "--nnodes=3", "--nproc-per-node=8", "--node-rank=$(NODE_RANK)",
        "--master-addr=first-node-0-0.first", "--master-port=29500", "mtrain", "train", "run.toml", "mesh.tp=8",
    ]  # fmt: skip
    assert container["workingDir"] == str(tmp_path) and container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert container["resources"]["requests"] == {"cpu": 32, "nvidia.com/gpu": 8}
    assert {"name": "A", "value": "b=c"} in container["env"] and container["env"][0]["name"] == "NODE_RANK"
    assert {"name": "volume-1", "persistentVolumeClaim": {"claimName": "data"}} in pod["volumes"]
    assert pod["terminationGracePeriodSeconds"] == 120 and facts["spec"]["failurePolicy"]["maxRestarts"] == 5


def test_a_job_set_without_gpus_volumes_or_variables(tmp_path):
    facts = made(tmp_path, gpus=None, cpus=None, claims=[], env={})
    (container,) = facts["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    assert "resources" not in container and [mount["name"] for mount in container["volumeMounts"]] == ["shm"]


def test_a_train_job_leaves_nodes_and_addresses_to_the_runtime(tmp_path):
    facts = made(tmp_path, kind="trainjob")
    trainer = facts["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (3, 8)
    assert trainer["command"] == ["torchrun", "--no-python", "mtrain", "train", "run.toml", "mesh.tp=8"]
    assert "runtimePatches" in facts["spec"]
    assert "runtimePatches" not in made(tmp_path, kind="trainjob", claims=[], env={})["spec"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"name": "7"}, "is no valid Kubernetes job name"),
        ({"name": "x" * 46}, "at most 45 letters"),
        ({"claims": ["data"]}, "--container-mounts data"),
        ({"claims": ["data:data"]}, "expected: CLAIM:PATH"),
    ],
)
def test_what_kubernetes_would_refuse_is_refused(tmp_path, more, message):
    with pytest.raises(UsageError, match=message):
        made(tmp_path, **more)


def test_a_name_is_made_one_of_kubernetes(tmp_path):
    assert made(tmp_path, name="GPT_small.2")["metadata"]["name"] == "gpt-small-2"


@pytest.mark.parametrize("path", [["replicatedJobs"], ["spec", "replicas"], ["spec", "failurePolicy", "maxRestart"]])
def test_the_schema_refuses_fields_that_there_are_not(tmp_path, path):
    facts = made(tmp_path)
    place = facts
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = 1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(facts, {**SCHEMAS["manifests"]["JobSet"], "$defs": SCHEMAS["$defs"]})


def test_yaml_has_values_that_need_quotes():
    facts = {"a": ["yes", "1", "x: y", "", "-"], "b": [{"c": [{"d": {}, "e": []}, {"f": None}]}], "g": [[1, 2], [3]]}
    assert yaml.safe_load(yaml_text(facts)) == facts
