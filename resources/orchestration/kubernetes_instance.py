"""The Dagster instance on a cluster: overrides of dagster.yaml.

Run workers are pods, their output goes to the object store, and Kueue is the only queue. Dagster's own limits on runs and
pools are disabled, except for runs launched in the UI, whose pods exist while their jobs wait.
"""

import hashlib
from typing import Any

from sqlalchemy.engine import make_url

from recipes.contracts.job import BadConfiguration
from resources.compute.kubernetes.pod_manifest import USER_ID
from resources.orchestration.postgres_schema import is_postgresql
from resources.settings.settings import Settings

KUBERNETES = "kubernetes"
"""Name of the compute backend that needs this Dagster instance."""
STATE = "/var/lib/hanzo-ml"
CONFIG = "/etc/hanzo-ml"
LAUNCHED_TAG = {"key": "dagster/from_ui", "value": "true"}
"""Tag by which Dagster's web server marks runs launched in its UI."""
LOG_PREFIX = "dagster"
NOT_READY_SECONDS = 5
"""How long a run pod stays on an unresponsive node; then another pod attaches to its job, which is unaffected."""
GRACE_SECONDS = 15
"""A terminating run worker only writes a few rows."""
JOB_TTL_SECONDS = 3600
"""How long the Job of an ended run is kept, with its log."""
START_SECONDS = 24 * 3600
"""Dagster fails runs that take longer to start, even if their pod only waits for an image."""
INSTALLATION_LABEL = "ml.hanzo.ai/installation"
"""Label of run workers, which distinguishes installations in a shared namespace."""
SECRET_VARIABLES = {
    "HANZO_ML_DATABASE_URL": "database-url",
    "AWS_ACCESS_KEY_ID": "storage-access-key",
    "AWS_SECRET_ACCESS_KEY": "storage-secret-key",
}
"""Environment variables of the control plane, and the keys of the Secret `dagster.run_pods.secret` that set them."""
NODE_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


def kubernetes_instance(settings: Settings) -> dict[str, Any]:
    """Return the top-level keys that override dagster.yaml.

    Raises:
        BadConfiguration: metadata or objects are stored on this machine, where pods cannot reach them.
    """
    if not is_postgresql(settings):
        raise BadConfiguration(
            "scheduler.backend kubernetes needs a database that pods share: set database.url to PostgreSQL"
        )
    if settings.storage.endpoint is None:
        raise BadConfiguration("scheduler.backend kubernetes needs an object store that pods share: set storage.endpoint")
    return {
        "run_launcher": {
            "module": "resources.orchestration.kubernetes_launcher",
            "class": "KubernetesRunLauncher",
            "config": launcher_config(settings),
        },
        "compute_logs": {
            "module": "resources.orchestration.compute_logs",
            "class": "ObjectStoreLogManager",
            "config": compute_log_config(settings, settings.storage.endpoint),
        },
        "concurrency": {
            "runs": {
                "max_concurrent_runs": -1,
                "tag_concurrency_limits": [{**LAUNCHED_TAG, "limit": settings.dagster.run_pods.max_launched}],
            },
            "pools": {"granularity": "run"},
        },
        "run_monitoring": {
            "enabled": True,
            "poll_interval_seconds": 10,
            "start_timeout_seconds": START_SECONDS,
            "cancel_timeout_seconds": 120,
            "max_resume_run_attempts": 0,
            "free_slots_after_run_end_seconds": 10,
        },
    }


def installation_id(settings: Settings) -> str:
    """Return a short id of the database of this instance; independent of its password."""
    url = make_url(settings.database_url)
    return hashlib.sha256(f"{url.host}:{url.port}/{url.database}".encode()).hexdigest()[:12]


def launcher_config(settings: Settings) -> dict[str, Any]:
    """Return the configuration of dagster-k8s's launcher for `dagster.run_pods`."""
    pods, scheduler = settings.dagster.run_pods, settings.scheduler
    environment = {
        "HANZO_ML_HOME": STATE,
        "DAGSTER_HOME": f"{STATE}/dagster",
        "HOME": STATE,
        # glibc keeps an arena per thread, and run workers have a few mostly idle ones.
        "MALLOC_ARENA_MAX": "2",
        **pods.env,
    }
    claims = {volume.claim: f"claim-{number}" for number, volume in enumerate(scheduler.volumes)}
    volumes = [
        {"name": "state", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
        *([{"name": "config", "configMap": {"name": pods.config_map}}] if pods.config_map else []),
        *({"name": name, "persistentVolumeClaim": {"claimName": claim}} for claim, name in claims.items()),
    ]
    mounts = [
        {"name": "state", "mountPath": STATE},
        {"name": "tmp", "mountPath": "/tmp"},
        *([{"name": "config", "mountPath": CONFIG, "readOnly": True}] if pods.config_map else []),
        *(
            {"name": claims[volume.claim], "mountPath": volume.path, "readOnly": volume.read_only}
            | ({"subPath": volume.sub_path} if volume.sub_path else {})
            for volume in scheduler.volumes
        ),
    ]
    return {
        "labels": {INSTALLATION_LABEL: installation_id(settings)},
        "job_namespace": pods.namespace,
        "job_image": pods.image or scheduler.default_image,
        "image_pull_policy": "IfNotPresent",
        "image_pull_secrets": [{"name": name} for name in scheduler.image_pull_secrets],
        "service_account_name": pods.service_account,
        # Required by dagster-k8s but unused: the instance is passed in the arguments of the run worker.
        "instance_config_map": "dagster-instance",
        "dagster_home": f"{STATE}/dagster",
        "load_incluster_config": scheduler.kubeconfig is None,
        "kubeconfig_file": scheduler.kubeconfig,
        "env_secrets": list(pods.secrets),
        "env_vars": [f"{name}={value}" for name, value in environment.items()],
        "volumes": volumes,
        "volume_mounts": mounts,
        "resources": {"requests": {"cpu": "50m", "memory": pods.memory}, "limits": {"memory": pods.memory}},
        "security_context": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "run_k8s_config": {
            "container_config": {"env": secret_variables(pods.secret) if pods.secret else []},
            "pod_spec_config": {
                "automountServiceAccountToken": False,
                "enableServiceLinks": False,  # otherwise Services could set variables that start with HANZO_ML_
                "terminationGracePeriodSeconds": GRACE_SECONDS,
                "securityContext": {
                    "runAsNonRoot": True,
                    "runAsUser": USER_ID,
                    "runAsGroup": USER_ID,
                    "fsGroup": USER_ID,
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "tolerations": [
                    {
                        "key": taint,
                        "operator": "Exists",
                        "effect": "NoExecute",
                        "tolerationSeconds": NOT_READY_SECONDS,
                    }
                    for taint in NODE_TAINTS
                ],
            },
            "job_spec_config": {"ttlSecondsAfterFinished": JOB_TTL_SECONDS},
        },
        # Run tags must not change the pods of the control plane.
        "only_allow_user_defined_k8s_config_fields": {},
        "only_allow_user_defined_env_vars": [],
    }


def secret_variables(secret: str) -> list[dict[str, Any]]:
    """Return container variables by Secret reference; optional, e.g. with workload identity."""
    return [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key, "optional": True}}}
        for name, key in SECRET_VARIABLES.items()
    ]


def compute_log_config(settings: Settings, endpoint: str) -> dict[str, Any]:
    """Return the configuration of dagster-aws's log manager; credentials come from the environment."""
    storage = settings.storage
    encryption = {"ServerSideEncryption": storage.encryption} if storage.encryption != "none" else {}
    key = {"SSEKMSKeyId": storage.kms_key} if storage.kms_key else {}
    return {
        "bucket": storage.buckets.checkpoints,
        "prefix": LOG_PREFIX,
        "endpoint_url": endpoint,
        "use_ssl": endpoint.startswith("https:"),
        "local_dir": "/tmp/dagster-logs",
        "skip_empty_files": True,
        "upload_interval": 30,
        "upload_extra_args": {**encryption, **key},
    }
