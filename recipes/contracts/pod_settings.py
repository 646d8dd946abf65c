"""Settings of a job's pods on a cluster: the section `pod:` of a job file."""

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from recipes.contracts.frozen_model import FrozenModel

# Backends without pods ignore them. Settings for all backends (resources, distribution, limits, environment) are in the job
# itself, and settings for all jobs of a cluster in `scheduler`.

VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
OBJECT_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
"""A DNS-1123 subdomain, the format of names of Secrets and claims."""
LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?", re.ASCII)
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?", re.ASCII)
OWN_FOLDERS = ("/work", "/tmp", "/job", "/dev", "/proc", "/sys")
"""Paths that are mounted in every pod already, or belong to the kernel."""


def reject_null(text: str) -> str:
    """Return the text.

    Raise ValueError if it contains NUL, which cannot be passed to a process.
    """
    if "\0" in text:
        raise ValueError("it contains a null character, which cannot be passed to a process")
    return text


Text = Annotated[str, AfterValidator(reject_null)]


def check_variables(value: dict[str, str]) -> dict[str, str]:
    for name in value:
        if not VARIABLE_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a variable name: use letters, digits and '_'")
    return value


Environment = Annotated[dict[str, Text], AfterValidator(check_variables)]


def check_object_name(name: str) -> str:
    if not OBJECT_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a name of a Kubernetes object: use lower-case letters, digits, '-' and '.'")
    return name


ObjectName = Annotated[str, AfterValidator(check_object_name)]


class Toleration(FrozenModel):
    """A toleration with Kubernetes' own keys."""

    key: str | None = Field(None, description="key of the taint; every taint when unset, with operator Exists")
    operator: Literal["Equal", "Exists"] = Field("Equal", description="how key and value are compared with the taint")
    value: str | None = Field(None, description="value of the taint, for operator Equal")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        None, description="effect of the taint; every effect when unset"
    )

    @model_validator(mode="after")
    def check_combination(self) -> Self:
        if self.key is None and self.operator != "Exists":
            raise ValueError("a toleration without a key accepts every taint: write `operator: Exists`, or give a key")
        if self.key is not None and not LABEL_KEY.fullmatch(self.key):
            raise ValueError(f"{self.key!r} is not a key of a taint, such as example.com/spot")
        if self.operator == "Exists" and self.value is not None:
            raise ValueError("operator Exists takes no value: remove `value`, or use operator Equal")
        if not LABEL_VALUE.fullmatch(self.value or ""):
            raise ValueError(f"{self.value!r} is not a value of a taint: use letters, digits, '-', '_' and '.'")
        return self


class VolumeClaim(FrozenModel):
    """A PersistentVolumeClaim in the job namespace, mounted into every pod of a job."""

    claim: ObjectName = Field(description="name of the PersistentVolumeClaim")
    path: str = Field(description="absolute mount path")
    sub_path: str | None = Field(None, description="folder in the volume; the whole volume when unset")
    read_only: bool = Field(True, description="mount it read-only")

    @field_validator("path")
    @classmethod
    def check_path(cls, value: str) -> str:
        parts = value.split("/")
        if len(parts) < 2 or parts[0] or any(part in ("", ".", "..") for part in parts[1:]) or ":" in value:
            raise ValueError(f"{value!r} is not an absolute path, such as /data, without '..' and ':'")
        if taken := next((folder for folder in OWN_FOLDERS if f"{value}/".startswith(f"{folder}/")), None):
            raise ValueError(f"{value!r} is in {taken}, which pods use already: choose another path")
        return value

    @field_validator("sub_path")
    @classmethod
    def check_sub_path(cls, value: str | None) -> str | None:
        if value is not None and any(part in ("", ".", "..") for part in value.split("/")):
            raise ValueError(f"{value!r} is not a folder of the volume: write it relative, without '..'")
        return value


class PodSettings(FrozenModel):
    """What a job's pods need from their cluster: Secrets, volumes, and eligible nodes."""

    secrets: tuple[ObjectName, ...] = Field((), description="Secrets whose keys become environment variables")
    image_pull_secrets: tuple[ObjectName, ...] = Field((), description="Secrets for pulling the image")
    node_selector: dict[str, str] = Field({}, description="labels that a node must have")
    tolerations: tuple[Toleration, ...] = ()
    volumes: tuple[VolumeClaim, ...] = ()
    # Omitted if false, so that documents of jobs from before this key stay the same.
    keep_failed: bool = Field(
        False,
        exclude_if=lambda value: not value,
        description="keep the ended pods of a failed job for scheduler.keep_failed_for",
    )

    @field_validator("node_selector")
    @classmethod
    def check_labels(cls, value: dict[str, str]) -> dict[str, str]:
        for key, label in value.items():
            if not LABEL_KEY.fullmatch(key) or not LABEL_VALUE.fullmatch(label):
                raise ValueError(f"{key!r}: {label!r} is not a label of a node, such as topology.kubernetes.io/zone: zone-a")
        return value

    @field_validator("volumes")
    @classmethod
    def check_distinct_paths(cls, value: tuple[VolumeClaim, ...]) -> tuple[VolumeClaim, ...]:
        paths = [volume.path for volume in value]
        if twice := next((path for path in paths if paths.count(path) > 1), None):
            raise ValueError(f"two volumes have the path {twice!r}: give each its own")
        return value
