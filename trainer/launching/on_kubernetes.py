"""A training run as a manifest for Kubernetes: a JobSet, or a TrainJob of Kubeflow Trainer; nothing is submitted.

One pod per node runs torchrun, which starts a rank per GPU. What is unusual: torchrun turns every exit code into 1, so
any failure restarts the whole set, up to `max_restarts`; a pod that Kubernetes itself evicts restarts it without limit.
A restarted set continues from the newest checkpoint, which must lie on a volume or in object storage.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mdata.errors import UsageError
from trainer.launching.job import RunJob

Kind = Literal["jobset", "trainjob"]
_PORT = 29500
_LONGEST_NAME = 45  # names of pods add to it, and have 63 characters at most


@dataclass(frozen=True, kw_only=True, slots=True)
class KubernetesOptions:
    """How a run is placed.

    Args:
        name: of the job; characters not allowed by Kubernetes are replaced.
        namespace: None: that of kubectl.
        image: has mtrain and torchrun on its PATH.
        claims: CLAIM:PATH, a claim of a persistent volume and where it is mounted.
        env: variables of each rank.
        gpus: of each node; None: none. cpus: of each rank; None: no request.
        grace_s: from an eviction's SIGTERM to its SIGKILL.
        max_restarts: of the whole set.
    """

    name: str
    namespace: str | None
    image: str
    claims: Sequence[str]
    env: Mapping[str, str]
    gpus: int | None
    cpus: int | None
    grace_s: int
    max_restarts: int


def manifest(job: RunJob, words: Sequence[str], options: KubernetesOptions, *, kind: Kind) -> dict[str, Any]:
    """The manifest, as JSON types.

    Args:
        words: of `mtrain train`; relative paths start at `job.cwd` in the container.

    Raises:
        UsageError: the name or a claim has another form.
    """
    name = re.sub(r"[^a-z0-9]+", "-", options.name.lower()).strip("-")
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name) or len(name) > _LONGEST_NAME:
        expected = f"at most {_LONGEST_NAME} letters, digits and dashes; the first is a letter"
        raise UsageError(f"{options.name!r} is no valid Kubernetes job name", expected=expected, fix="--name NAME")
    namespace = {"namespace": options.namespace} if options.namespace else {}
    head = {"name": name, **namespace}
    spec = _job_set(job, words, options, name) if kind == "jobset" else _train_job(job, words, options)
    version = "jobset.x-k8s.io/v1alpha2" if kind == "jobset" else "trainer.kubeflow.org/v1alpha1"
    return {"apiVersion": version, "kind": {"jobset": "JobSet", "trainjob": "TrainJob"}[kind], "metadata": head} | spec


def _job_set(job: RunJob, words: Sequence[str], options: KubernetesOptions, name: str) -> dict[str, Any]:
    nodes = job.nodes[1]
    torchrun = [
        f"--nnodes={nodes}",
        f"--nproc-per-node={job.ranks_per_node}",
        "--node-rank=$(NODE_RANK)",
        f"--master-addr={name}-node-0-0.{name}",
        f"--master-port={_PORT}",
    ]
    index = {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}
    volumes, mounts = _volumes(options.claims)
    container = {
        "name": "mtrain",
        "image": options.image,
        "workingDir": job.cwd,
        "command": ["torchrun", "--no-python", *torchrun, "mtrain", "train", *words],
        "env": [{"name": "NODE_RANK", "valueFrom": {"fieldRef": index}}, *_env(options.env)],
        **_resources(job, options, "resources"),
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}, *mounts],
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": options.grace_s,
        "containers": [container],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}, *volumes],
    }
    evicted = {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    template = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [evicted]},
        "template": {"spec": pod},
    }
    restarts = {
        "maxRestarts": options.max_restarts,
        "rules": [
            {
                "name": "evicted",
                "action": "RestartJobSetAndIgnoreMaxRestarts",
                "onJobFailureReasons": ["PodFailurePolicy"],
            }
        ],
    }
    replicated = {"name": "node", "replicas": 1, "template": {"spec": template}}
    network = {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    return {"spec": {"network": network, "failurePolicy": restarts, "replicatedJobs": [replicated]}}


def _train_job(job: RunJob, words: Sequence[str], options: KubernetesOptions) -> dict[str, Any]:
    """Kubeflow's runtime gives torchrun the nodes and the address by PET_* variables."""
    volumes, mounts = _volumes(options.claims)
    trainer = {
        "image": options.image,
        "command": ["torchrun", "--no-python", "mtrain", "train", *words],
        "env": _env(options.env),
        "numNodes": job.nodes[1],
        "numProcPerNode": job.ranks_per_node,
        **_resources(job, options, "resourcesPerNode"),
    }
    spec: dict[str, Any] = {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer}
    if volumes:
        pod = {"volumes": volumes, "containers": [{"name": "node", "volumeMounts": mounts}]}
        patched = {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]}
        patch = {"manager": "mtrain", "trainingRuntimeSpec": {"template": {"spec": patched}}}
        spec["runtimePatches"] = [patch]
    return {"spec": spec}


def _env(variables: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"name": name, "value": value} for name, value in variables.items()]


def _resources(job: RunJob, options: KubernetesOptions, key: str) -> dict[str, Any]:
    cpus = {"cpu": options.cpus * job.ranks_per_node} if options.cpus else {}
    gpus = {"nvidia.com/gpu": options.gpus} if options.gpus else {}
    return {key: {"requests": cpus | gpus, "limits": gpus}} if cpus or gpus else {}


def _volumes(claims: Sequence[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    volumes, mounts = [], []
    for number, text in enumerate(claims, 1):
        claim, _, path = text.partition(":")
        if not claim or not path.startswith("/"):
            raise UsageError(f"--container-mounts {text}", expected="CLAIM:PATH, such as data:/data")
        volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": f"volume-{number}", "mountPath": path})
    return volumes, mounts


def yaml_text(value: Mapping[str, Any]) -> str:
    """A manifest as YAML: block form, with strings quoted as in JSON, which YAML reads the same way."""
    return "\n".join(_yaml(value)) + "\n"


def _yaml(value: Any) -> Iterator[str]:
    """The lines of a mapping or list that is not empty."""
    pairs = value.items() if isinstance(value, Mapping) else ((None, item) for item in value)
    for key, item in pairs:
        first = "-" if key is None else f"{key}:"
        if not isinstance(item, Mapping | list) or not item:
            yield f"{first} {json.dumps(item)}"
        elif key is None:
            head, *rest = _yaml(item)
            yield f"- {head}"
            yield from (f"  {line}" for line in rest)
        else:
            yield first
            yield from (f"  {line}" for line in _yaml(item))
