"""Kubernetes API client with objects as plain dictionaries and errors by consequence."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kubernetes.client import ApiClient  # type: ignore[import-untyped]

Item = dict[str, Any]
"""JSON of a Kubernetes object."""

CONNECT_SECONDS, READ_SECONDS = 5.0, 30.0
MAX_CONNECTIONS = 32
"""Size of the connection pool: a watch of each kind, and requests."""
CHUNK_ITEMS = 500
"""Items per page of a list."""


@dataclass(frozen=True)
class Kind:
    """A kind of objects and its API path."""

    api_version: str
    name: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str | None = None, name: str | None = None) -> str:
        root = f"/apis/{self.api_version}" if "/" in self.api_version else f"/api/{self.api_version}"
        place = f"/namespaces/{namespace}" if namespace and self.namespaced else ""
        return f"{root}{place}/{self.plural}" + (f"/{name}" if name else "")


JOB_SET = Kind("jobset.x-k8s.io/v1alpha2", "JobSet", "jobsets")
WORKLOAD = Kind("kueue.x-k8s.io/v1beta2", "Workload", "workloads")
WORKLOAD_PRIORITY_CLASS = Kind(
    "kueue.x-k8s.io/v1beta2", "WorkloadPriorityClass", "workloadpriorityclasses", namespaced=False
)
JOB = Kind("batch/v1", "Job", "jobs")
POD = Kind("v1", "Pod", "pods")
NODE = Kind("v1", "Node", "nodes", namespaced=False)
CONFIG_MAP = Kind("v1", "ConfigMap", "configmaps")
SECRET = Kind("v1", "Secret", "secrets")
SERVICE = Kind("v1", "Service", "services")
EVENT = Kind("v1", "Event", "events")
COSCHEDULING_GROUP = Kind("scheduling.x-k8s.io/v1alpha1", "PodGroup", "podgroups")
VOLCANO_GROUP = Kind("scheduling.volcano.sh/v1beta1", "PodGroup", "podgroups")
NETWORK_POLICY = Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
ALL_KINDS = (
    JOB_SET,
    WORKLOAD,
    WORKLOAD_PRIORITY_CLASS,
    JOB,
    POD,
    NODE,
    CONFIG_MAP,
    SECRET,
    SERVICE,
    EVENT,
    COSCHEDULING_GROUP,
    VOLCANO_GROUP,
    NETWORK_POLICY,
)
KINDS = {(kind.api_version, kind.name): kind for kind in ALL_KINDS}


def find_kind(item: Mapping[str, Any]) -> Kind:
    """Return the kind of an object to create."""
    return KINDS[item["apiVersion"], item["kind"]]


class ClusterError(Exception):
    """A failed request; the message is the API server's, on one line."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class ClusterUnavailable(ClusterError):
    """The server did not answer, or is overloaded: retrying may succeed."""


class RequestDenied(ClusterError):
    """A permission, quota, namespace or resource definition is missing."""


class QuotaExceeded(RequestDenied):
    """The ResourceQuota of the namespace is used up until other objects are deleted."""


class InvalidObject(ClusterError):
    """The schema or an admission webhook rejects the object: retrying does not help."""


class AlreadyExists(ClusterError):
    """An object of that name exists, or its UID differs from the one to delete."""


class NotFound(ClusterError):
    """No object of that name exists."""


class ResourceVersionExpired(ClusterError):
    """410 Gone: the watch must restart from a new list."""


def classify_error(status: int, body: str) -> ClusterError:
    """Return the error of a response; `body` is a `Status` object or a proxy's text."""
    try:
        document = json.loads(body)
        message = str(document.get("message") or body)
    except (ValueError, AttributeError):
        message = body
    message = message or f"HTTP {status}"
    match status:
        case 404:
            return NotFound(message)
        case 409:
            return AlreadyExists(message)
        case 410:
            return ResourceVersionExpired(message)
        case 400 | 422:
            return InvalidObject(message)
        case 403 if "denied the request" in message:  # an admission webhook or policy, unless it sets another status
            return InvalidObject(message)
        case 403 if "exceeded quota" in message:
            return QuotaExceeded(message)
        case 403:
            return RequestDenied(message)
    return ClusterUnavailable(message)  # 401 too: a service account's token is rotated while we run


class Cluster:
    """An API server, opened by `open_cluster`.

    `api` handles addresses, certificates and tokens.
    """

    def __init__(self, api: "ApiClient") -> None:
        self._api = api

    @property
    def address(self) -> str:
        """Address of the API server."""
        return str(self._api.configuration.host)

    def create(self, item: Mapping[str, Any], *, dry_run: bool = False) -> Item:
        """Create an object.

        With `dry_run` the API server and its webhooks only validate it.

        Raises:
            AlreadyExists, InvalidObject, RequestDenied, ClusterUnavailable
        """
        kind = find_kind(item)
        query = {"dryRun": "All"} if dry_run else {}
        try:
            return self._request("POST", kind.path(item["metadata"].get("namespace")), query=query, body=item)
        except NotFound as problem:  # the namespace or the kind is missing
            raise RequestDenied(str(problem)) from None

    def apply(self, kind: Kind, item: Mapping[str, Any]) -> Item:
        """Create an object, or update our fields (server-side apply, idempotent).

        Raises like `create`.
        """
        metadata = item["metadata"]
        path = kind.path(metadata.get("namespace"), metadata["name"])
        try:
            return self._request(
                "PATCH", path, query={"fieldManager": FIELD_MANAGER, "force": "true"}, body=item, content_type=APPLY
            )
        except NotFound as problem:  # the namespace or the kind is missing
            raise RequestDenied(str(problem)) from None

    def read(self, kind: Kind, namespace: str | None, name: str) -> Item:
        return self._request("GET", kind.path(namespace, name))

    def list(self, kind: Kind, namespace: str | None = None, **selectors: str) -> tuple[list[Item], str]:
        """Return all objects of a kind and the resource version to watch from.

        `selectors` may be labelSelector and fieldSelector.
        """
        items: list[Item] = []
        page: Mapping[str, Any] = {"limit": CHUNK_ITEMS}
        while True:
            answer = self._request("GET", kind.path(namespace), query={**selectors, **page})
            items += answer["items"]
            if not (following := answer["metadata"].get("continue")):
                return items, read_version(answer)
            page = {"limit": CHUNK_ITEMS, "continue": following}

    def watch(
        self, kind: Kind, resource_version: str, seconds: int, silence_seconds: float, **selectors: str
    ) -> Iterator[tuple[str, Item]]:
        """Yield changes since a resource version as (type, object).

        The server ends the stream after `seconds`.

        Raises:
            ResourceVersionExpired: list again.
            ClusterUnavailable: the connection broke, or nothing was received for `silence_seconds`.
        """
        query = {
            **selectors,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": seconds,
        }
        with translate_errors():
            response = self._call("GET", kind.path(), query, None, silence_seconds)
            try:
                for line in read_lines(response):
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise classify_error(event["object"].get("code", 500), json.dumps(event["object"]))
                    yield event["type"], event["object"]
            finally:
                response.close()

    def delete(
        self, kind: Kind, namespace: str | None, name: str, *, uid: str | None = None, grace_seconds: int | None = None
    ) -> None:
        """Delete an object if it exists; its dependents follow in the background.

        With `uid` only that object is deleted: a delayed request must not delete its successor of the same name.
        """
        body: Item = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        with suppress(NotFound, *([AlreadyExists] if uid else [])):
            self._request("DELETE", kind.path(namespace, name), body=body)

    def fail_pod(self, namespace: str, name: str, uid: str) -> None:
        """Set the phase of an existing pod to Failed, in place of its lost kubelet.

        Kubernetes' own pod garbage collector does the same. Only then does the Job replace the pod and remove its finalizer.
        """
        body = {"metadata": {"uid": uid}, "status": {"phase": "Failed"}}
        with suppress(NotFound, AlreadyExists):  # another pod of that name is left alone
            self._request("PATCH", f"{POD.path(namespace, name)}/status", body=body)

    def request(self, method: str, path: str, body: Any = None) -> Item:
        """Send a request that concerns no object, such as for the server's version."""
        return self._request(method, path, body=body)

    def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None = None,
        body: Any = None,
        content_type: str | None = None,
    ) -> Item:
        with translate_errors():
            answer: Item = json.loads(self._call(method, path, query or {}, body, READ_SECONDS, content_type).data)
            return answer

    def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any],
        body: Any,
        read_seconds: float,
        content_type: str | None = None,
    ) -> Any:
        content_type = content_type or CONTENT_TYPES.get(method, "application/json")
        return self._api.call_api(
            path,
            method,
            query_params=list(query.items()),
            header_params={"Accept": "application/json", "Content-Type": content_type},
            body=body,
            auth_settings=["BearerToken"],
            _preload_content=False,
            _return_http_data_only=True,
            _request_timeout=(CONNECT_SECONDS, read_seconds),
        )


APPLY = "application/apply-patch+yaml"
FIELD_MANAGER = "hanzo-ml"
CONTENT_TYPES = {"PATCH": "application/merge-patch+json"}


@contextmanager
def translate_errors() -> Iterator[None]:
    """Translate errors of the client and its connection into `ClusterError`."""
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as error:
        raise classify_error(error.status or 0, as_text(error.body) or str(error.reason)) from None
    except (HTTPError, OSError, ValueError) as error:
        raise ClusterUnavailable(f"the API server does not answer: {error}") from None


def read_version(listing: Item) -> str:
    """Return the resource version of a list, to watch from.

    Raises:
        ClusterUnavailable: it is missing, as from a server that is starting, or a proxy.
    """
    version = listing["metadata"].get("resourceVersion")
    if not version:
        raise ClusterUnavailable("a list came without a resource version")
    return str(version)


def as_text(body: Any) -> str:
    return body.decode(errors="replace") if isinstance(body, bytes) else str(body or "")


def read_lines(response: Any) -> Iterator[bytes]:
    """Yield lines of a streamed response as they arrive, without a truncated last line."""
    rest = b""
    for chunk in response.stream(amt=None, decode_content=True):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line for line in lines if line.strip())


def open_cluster(kubeconfig: str | None = None) -> Cluster:
    """Open the cluster of a kubeconfig file, or the one in which this pod runs.

    Raises:
        ClusterError: there is no such file and this process is no pod; the message says what to set.
    """
    # Imported lazily: it takes a second, and only the controller needs it.
    from kubernetes import client, config  # type: ignore[import-untyped]

    configuration = client.Configuration()
    try:
        if kubeconfig is None:
            config.load_incluster_config(client_configuration=configuration)
        else:
            config.load_kube_config(kubeconfig, client_configuration=configuration)
    except config.ConfigException as problem:
        given = f"kubeconfig {kubeconfig} cannot be used: " if kubeconfig else ""
        words = str(problem).rstrip(".")
        raise ClusterError(f"{given}{words}: run as a pod, or set scheduler.kubeconfig to a file") from None
    configuration.connection_pool_maxsize = MAX_CONNECTIONS
    configuration.retries = False  # the controller has its own retry policy
    return Cluster(client.ApiClient(configuration))
