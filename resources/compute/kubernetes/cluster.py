"""Requests to the Kubernetes API, with objects as plain dictionaries, and its errors by what follows from them."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kubernetes.client import ApiClient  # type: ignore[import-untyped]

Item = dict[str, Any]
"""An object of the cluster as its JSON."""

CONNECT_SECONDS, READ_SECONDS = 5.0, 30.0
MAX_CONNECTIONS = 32
"""Kept open: a watch of each kind, and requests."""
CHUNK_ITEMS = 500
"""Items per page of a list."""


@dataclass(frozen=True)
class Kind:
    """A kind of objects and its place in the API."""

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
    """The kind of an object that is to be created."""
    return KINDS[item["apiVersion"], item["kind"]]


class ClusterError(Exception):
    """A request that the API server did not carry out. The message is its own, on one line."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class ClusterUnavailable(ClusterError):
    """It did not answer, or asks to come again later: the same request may succeed."""


class RequestDenied(ClusterError):
    """The installation does not allow it: a permission, a quota, a namespace or a resource definition is missing."""


class QuotaExceeded(RequestDenied):
    """The ResourceQuota of the namespace has no room, until other objects are deleted."""


class InvalidObject(ClusterError):
    """The object itself is refused, by its schema or by an admission webhook: no repetition helps."""


class AlreadyExists(ClusterError):
    """There is an object of that name, or another one than a deletion is for."""


class NotFound(ClusterError):
    """There is no object of that name."""


class ResourceVersionExpired(ClusterError):
    """410 Gone: a watch cannot continue from there, only from a new list."""


def classify_error(status: int, body: str) -> ClusterError:
    """The error of a response; `body` is a `Status` object, or whatever a proxy in between says."""
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
        case 403 if "denied the request" in message:  # an admission webhook or policy, unless it says another status
            return InvalidObject(message)
        case 403 if "exceeded quota" in message:
            return QuotaExceeded(message)
        case 403:
            return RequestDenied(message)
    return ClusterUnavailable(message)  # 401 too: a service account's token is replaced while we run


class Cluster:
    """One API server. Opened by `open_cluster`; `api` takes care of addresses, certificates and tokens."""

    def __init__(self, api: "ApiClient") -> None:
        self._api = api

    @property
    def address(self) -> str:
        """Of the API server."""
        return str(self._api.configuration.host)

    def create(self, item: Mapping[str, Any], *, dry_run: bool = False) -> Item:
        """Create an object. Raises AlreadyExists, InvalidObject, RequestDenied or ClusterUnavailable.

        With `dry_run` the API server and its webhooks only say whether they would accept it.
        """
        kind = find_kind(item)
        query = {"dryRun": "All"} if dry_run else {}
        try:
            return self._request("POST", kind.path(item["metadata"].get("namespace")), query=query, body=item)
        except NotFound as problem:  # of the namespace, or of the kind
            raise RequestDenied(str(problem)) from None

    def apply(self, kind: Kind, item: Mapping[str, Any]) -> Item:
        """Create an object, or change what is ours of it (server-side apply, idempotent). Raises as `create` does."""
        metadata = item["metadata"]
        path = kind.path(metadata.get("namespace"), metadata["name"])
        try:
            return self._request(
                "PATCH", path, query={"fieldManager": FIELD_MANAGER, "force": "true"}, body=item, content_type=APPLY
            )
        except NotFound as problem:  # of the namespace, or of the kind
            raise RequestDenied(str(problem)) from None

    def read(self, kind: Kind, namespace: str | None, name: str) -> Item:
        return self._request("GET", kind.path(namespace, name))

    def list(self, kind: Kind, namespace: str | None = None, **selectors: str) -> tuple[list[Item], str]:
        """All objects of a kind and the resource version to watch from. `selectors`: labelSelector, fieldSelector."""
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
        """Changes since a resource version, as (type, object), until the server ends the stream after `seconds`.

        Raises:
            ResourceVersionExpired: list again.
            ClusterUnavailable: the connection broke, or nothing came for `silence_seconds`.
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
        """Delete an object, if it exists; what it owns follows in the background.

        With `uid` another object of that name stays: a request that was delayed must not delete its successor.
        """
        body: Item = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        with suppress(NotFound, *([AlreadyExists] if uid else [])):
            self._request("DELETE", kind.path(namespace, name), body=body)

    def fail_pod(self, namespace: str, name: str, uid: str) -> None:
        """Give a pod that exists the phase Failed, as Kubernetes' own collector does where a kubelet never will.

        Only then its Job replaces it, and lets go of its finalizer.
        """
        body = {"metadata": {"uid": uid}, "status": {"phase": "Failed"}}
        with suppress(NotFound, AlreadyExists):  # another pod of that name is left alone
            self._request("PATCH", f"{POD.path(namespace, name)}/status", body=body)

    def request(self, method: str, path: str, body: Any = None) -> Item:
        """A request about no object, such as for the version of the API server."""
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
    """Turn errors of the client, and of its connection, into ours."""
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as error:
        raise classify_error(error.status or 0, as_text(error.body) or str(error.reason)) from None
    except (HTTPError, OSError, ValueError) as error:
        raise ClusterUnavailable(f"the API server does not answer: {error}") from None


def read_version(listing: Item) -> str:
    """Where to watch from. Raises ClusterUnavailable: a server that is just starting, or a proxy, left it out."""
    version = listing["metadata"].get("resourceVersion")
    if not version:
        raise ClusterUnavailable("a list came without a resource version")
    return str(version)


def as_text(body: Any) -> str:
    return body.decode(errors="replace") if isinstance(body, bytes) else str(body or "")


def read_lines(response: Any) -> Iterator[bytes]:
    """Lines of a streamed response as they arrive. A last line that was cut off is left out."""
    rest = b""
    for chunk in response.stream(amt=None, decode_content=True):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line for line in lines if line.strip())


def open_cluster(kubeconfig: str | None = None) -> Cluster:
    """The cluster of a kubeconfig file, or the one that this process runs in as a pod.

    Raises:
        ClusterError: there is no such file, and this is no pod; the message says what to set.
    """
    # Takes a second, which only the controller pays.
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
    configuration.retries = False  # the controller repeats what failed, at its own pace
    return Cluster(client.ApiClient(configuration))
