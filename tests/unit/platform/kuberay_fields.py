"""The fields of KubeRay's v1 API and of Kubernetes that a manifest of ours may have, as strict models.

From ray-operator/apis/ray/v1/{rayjob,raycluster}_types.go of KubeRay and Kubernetes' core/v1. A field that is not
here is refused, so one is added only after a look into the API.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

DnsName = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
JobName = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=47)]
Quantity = Annotated[str, Field(pattern=r"^[1-9]\d*(Gi|Mi)?$")]


class Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class EnvironmentVariable(Fields):
    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
    value: str


class SecretReference(Fields):
    name: DnsName
    optional: bool


class EnvironmentSource(Fields):
    secretRef: SecretReference  # noqa: N815 - Kubernetes' names


class Resources(Fields):
    limits: dict[Literal["cpu", "memory", "nvidia.com/gpu"], Quantity]
    requests: dict[Literal["cpu", "memory", "nvidia.com/gpu"], Quantity]


class VolumeMount(Fields):
    name: DnsName
    mountPath: Annotated[str, Field(pattern=r"^/")]  # noqa: N815


class Container(Fields):
    name: DnsName
    image: str
    env: list[EnvironmentVariable]
    envFrom: list[EnvironmentSource]  # noqa: N815
    resources: Resources
    volumeMounts: list[VolumeMount]  # noqa: N815


class Claim(Fields):
    claimName: DnsName  # noqa: N815


class EmptyDir(Fields):
    medium: Literal["", "Memory"]
    sizeLimit: Quantity  # noqa: N815


class Volume(Fields):
    name: DnsName
    persistentVolumeClaim: Claim | None = None  # noqa: N815
    emptyDir: EmptyDir | None = None  # noqa: N815


class Toleration(Fields):
    key: str
    operator: Literal["Exists", "Equal"]
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"]


class PodSecurityContext(Fields):
    fsGroup: int  # noqa: N815


class PodSpec(Fields):
    containers: Annotated[list[Container], Field(min_length=1)]
    securityContext: PodSecurityContext  # noqa: N815
    volumes: list[Volume]
    nodeSelector: dict[str, str] = {}  # noqa: N815
    tolerations: list[Toleration] = []


class PodTemplate(Fields):
    spec: PodSpec


class HeadGroup(Fields):
    rayStartParams: dict[str, str]  # noqa: N815
    template: PodTemplate


class WorkerGroup(Fields):
    groupName: DnsName  # noqa: N815
    replicas: Annotated[int, Field(ge=1)]
    minReplicas: int  # noqa: N815
    maxReplicas: int  # noqa: N815
    rayStartParams: dict[str, str]  # noqa: N815
    template: PodTemplate


class RayClusterSpec(Fields):
    rayVersion: Annotated[str, Field(pattern=r"^\d+\.\d+\.\d+$")]  # noqa: N815
    headGroupSpec: HeadGroup  # noqa: N815
    workerGroupSpecs: list[WorkerGroup] = []  # noqa: N815


class RayJobSpec(Fields):
    submissionMode: Literal["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]  # noqa: N815
    entrypoint: str
    backoffLimit: int  # noqa: N815
    shutdownAfterJobFinishes: bool  # noqa: N815
    rayClusterSpec: RayClusterSpec  # noqa: N815


class Metadata(Fields):
    name: JobName
    namespace: DnsName


class RayJob(Fields):
    apiVersion: Literal["ray.io/v1"]  # noqa: N815
    kind: Literal["RayJob"]
    metadata: Metadata
    spec: RayJobSpec
