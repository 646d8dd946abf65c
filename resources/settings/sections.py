"""The sections of `config.yaml` except `scheduler`, with names and defaults.

What they are together, and where their values come from, is in `resources.settings.settings`.
"""

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from recipes.contracts.quantities import Duration


def is_loopback(host: str) -> bool:
    """Return whether a host can be reached from this machine only.

    Names other than `localhost` may resolve to anything.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def accept_null(cls, value: Any) -> Any:
        """Accept null, which is the YAML of a section whose keys are all commented out."""
        return {} if value is None else value


class Server(Section):
    """The API."""

    host: str = Field("127.0.0.1", description="address to listen on; other than loopback needs auth.verify_tokens")
    port: int = Field(8057, ge=1, le=65535, description="port of the API")
    workers: int = Field(1, ge=1, description="processes of the API; several need PostgreSQL, because SQLite has one writer")
    allowed_hosts: tuple[str, ...] = Field(
        ("ml.hanzo.svc", "hanzo-ml", "hanzo-ml.hanzo.svc"),
        description="host names that requests may use, in addition to localhost and `host`",
    )
    max_body_bytes: int = Field(32 << 20, ge=1, description="maximum size of a request body, except uploads of files")
    drain: Duration = Field("0s", description="how long the API still accepts requests after SIGTERM")


class RunPods(Section):
    """Pods of Dagster runs on a cluster, which supervise jobs and record their results."""

    namespace: str = Field("hanzo", description="namespace of run pods, that of the control plane")
    image: str | None = Field(None, description="image with Hanzo ML; scheduler.default_image when unset")
    service_account: str = Field("hanzo-ml-run", description="service account of run pods; it needs no permission")
    config_map: str | None = Field("hanzo-ml", description="ConfigMap that holds config.yaml")
    secret: str | None = Field(
        "hanzo-ml-secrets", description="Secret with the keys database-url, storage-access-key and storage-secret-key"
    )
    secrets: tuple[str, ...] = Field((), description="further Secrets, whose keys become environment variables")
    env: dict[str, str] = Field({}, description="further environment variables, such as PYTHONPATH")
    memory: str = Field("250M", description="memory limit; a run pod loads neither PyTorch nor data")
    max_launched: int = Field(
        20,
        ge=1,
        description="runs launched in the Dagster UI at a time, which wait for admission in their pods",
    )


DAGSTER_PREFIX = "/dagster"
"""Path below which Dagster's web server serves its UI if the API is in front of it."""


class Dagster(Section):
    """Dagster's own processes, and its UI."""

    # Checked in `Settings`, because it depends on the backend.
    host: str = Field(
        "127.0.0.1",
        description="address that its web server listens on; other than loopback only with scheduler.backend kubernetes",
    )
    port: int = Field(3000, ge=1, le=65535, description="port of the web server")
    url: str | None = Field(
        None,
        description="Dagster's web server as the API reaches it, started with --path-prefix /dagster: the API then serves "
        "its UI at /dagster behind its own sign-in; when unset, /dagster leads to host and port on this machine",
    )
    admin_organization: str = Field(
        "default",
        min_length=1,
        description="with several organizations: the one whose ml-admins may open Dagster's UI, which shows the data of all",
    )
    code_server_host: str = Field("127.0.0.1", description="host of the code server, as Dagster's processes reach it")
    code_server_port: int = Field(3030, ge=1, le=65535, description="port of the code server")
    run_pods: RunPods = RunPods()

    @field_validator("url")
    @classmethod
    def check_url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            url = urlsplit(value)
            known = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
        except ValueError:
            known = False
        if not known or url.path.strip("/") or url.query or url.fragment or url.username:
            raise ValueError("no address such as http://dagster-webserver:3000, without a path")
        return value.rstrip("/")


class Engine(Section):
    """The inference engine.

    On one machine deployments are pushed to it; on a cluster its replicas pull them from the API.
    """

    host: str = Field("127.0.0.1", description="address that it listens on; another than loopback needs mode pull")
    port: int = Field(8043, ge=1, le=65535, description="port of the engine")
    mode: Literal["push", "pull"] = Field("push", description="pull on a cluster, where the engine is a Deployment")
    url: str | None = Field(None, description="where clients reach it; http://{host}:{port} when unset")
    api_url: str | None = Field(
        None, description="where replicas that pull reach the API; scheduler.tracking_uri or the server's own when unset"
    )
    token: SecretStr | None = Field(
        None, description="shared by API and replicas that pull, at least 32 characters: good for /v1/engine alone"
    )
    cache: Path | None = Field(None, description="folder of downloaded files; engine in the state folder when unset")
    drain: Duration = Field("10s", description="how long a replica that was asked to stop still accepts requests")

    @field_validator("token")
    @classmethod
    def check_length(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not 32 <= len(value.get_secret_value()) <= 500:
            raise ValueError("use 32 to 500 characters, such as those of `openssl rand -hex 32`")
        return value

    @model_validator(mode="after")
    def require_loopback(self) -> Self:
        """Require loopback: the engine has no sign-in, so any client could use it."""
        if self.mode == "push" and not is_loopback(self.host):
            raise ValueError("the engine has no sign-in: keep host on 127.0.0.1, or set mode to pull on a cluster")
        return self


CONNECT_SECONDS = 10


class DatabaseSection(Section):
    """The metadata database."""

    url: SecretStr | None = Field(
        None, description="SQLAlchemy URL; PostgreSQL also holds Dagster's history; SQLite in the state folder when unset"
    )
    connect_seconds: int = Field(CONNECT_SECONDS, ge=2, le=300, description="timeout of a connection to PostgreSQL")

    @field_validator("url")
    @classmethod
    def check_url(cls, value: SecretStr | None) -> SecretStr | None:
        if value is None:
            return None
        try:
            url = make_url(value.get_secret_value())
            known = url.get_dialect().name in ("sqlite", "postgresql")
        except (ArgumentError, ValueError):
            known = False
        if not known:
            raise ValueError("no SQLAlchemy URL of SQLite or PostgreSQL, such as postgresql://USER:PASSWORD@HOST/DATABASE")
        # SQLAlchemy ends a password at its first '@' and would parse the rest as the host, which is printed.
        if url.host and "@" in f"{url.host}{url.database}":
            raise ValueError("write a '@' in the user or password as %40")
        return value


class Buckets(Section):
    datasets: str = Field("hanzo-ml-datasets", description="bucket of dataset versions and splits")
    checkpoints: str = Field("hanzo-ml-checkpoints", description="bucket of checkpoints")
    models: str = Field("hanzo-models", description="bucket of model versions and their exports")


class QueryDatabase(Section):
    """A database that datasets are queried from, as the user in its address."""

    url: SecretStr = Field(
        description="sqlite:////FOLDER/FILE or postgresql://USER:PASSWORD@HOST/DATABASE; give its user read access only"
    )
    organizations: tuple[str, ...] = Field((), description="organizations that may query it over HTTP; none by default")
    seconds: int = Field(3600, ge=1, description="timeout of a query")

    @field_validator("url")
    @classmethod
    def check_full_address(cls, value: SecretStr) -> SecretStr:
        """Require an absolute path: the querying processes have other working directories."""
        url = value.get_secret_value()
        try:
            is_whole = bool(urlsplit(url).path.strip("/") and make_url(url).database)
        except (ArgumentError, ValueError):
            is_whole = False
        if not is_whole or not re.fullmatch(r"sqlite:////[^?#]+|postgres(ql)?://\S+", url):
            raise ValueError("no address such as sqlite:////FOLDER/FILE or postgresql://USER:PASSWORD@HOST/DATABASE")
        return value


class Storage(Section):
    """The object store, and sources of datasets."""

    endpoint: str | None = Field(None, description="S3 endpoint; a folder in the state folder when unset")
    public_endpoint: str | None = Field(
        None,
        description="the same S3 server as clients reach it, for direct uploads of large files in parts; through the API "
        "when unset",
    )
    access_key: SecretStr | None = Field(
        None, description="S3 access key; set secret_key too. The variables AWS_* are used when both are unset"
    )
    secret_key: SecretStr | None = Field(None, description="S3 secret key")
    encryption: Literal["AES256", "aws:kms", "none"] = Field(
        "AES256", description="encryption of objects at rest, by the S3 server"
    )
    kms_key: str | None = Field(None, description="id of the KMS key, for encryption aws:kms; the server's own when unset")
    checksum: Literal["SHA256", "none"] = Field(
        "SHA256", description="checksum sent with every upload; `none` for an S3 server that does not support them"
    )
    buckets: Buckets = Buckets()
    import_from: tuple[str, ...] = Field(
        (),
        description="addresses from which the server may fetch datasets: s3:// and file:// with everything below them, "
        "kafka://BROKER or kafka://BROKER/TOPIC; none by default",
    )
    databases: dict[str, QueryDatabase] = Field(
        {}, description="databases that definitions and requests may query by name (`sql` and `database`)"
    )

    @field_validator("databases")
    @classmethod
    def check_names(cls, value: dict[str, QueryDatabase]) -> dict[str, QueryDatabase]:
        if bad := next((name for name in value if not re.fullmatch(r"[\w.-]{1,100}", name)), None):
            raise ValueError(f"{bad!r} is no name of a database: use letters, digits, '_', '-' and '.'")
        return value

    @field_validator("import_from")
    @classmethod
    def check_addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for address in value:
            if not re.fullmatch(r"(s3://[^/]+|file:///[^/]).*|kafka://[\w.:,-]+(/[\w.-]*)?", address):
                raise ValueError(
                    f"{address!r} is no address such as s3://BUCKET/FOLDER, file:///FOLDER or kafka://BROKER:9092"
                )
        return value

    @model_validator(mode="after")
    def check_combination(self) -> Self:
        if self.endpoint and (self.access_key is None) != (self.secret_key is None):
            raise ValueError("access_key and secret_key belong together: set both or none")
        if self.kms_key and self.encryption != "aws:kms":
            raise ValueError("kms_key needs encryption aws:kms")
        return self

    @property
    def variables(self) -> dict[str, str]:
        """Keys as AWS variables, which processes, pods and the S3 library read."""
        if self.access_key is None or self.secret_key is None:
            return {}
        return {
            "AWS_ACCESS_KEY_ID": self.access_key.get_secret_value(),
            "AWS_SECRET_ACCESS_KEY": self.secret_key.get_secret_value(),
        }


class Stream(Section):
    """Kafka."""

    brokers: str | None = Field(None, description="Kafka brokers; events stay in the database when unset")
    topic_prefix: str = Field(
        "hanzo.ml",
        pattern=r"^[A-Za-z0-9._-]{1,200}$",
        description="prefix of the topics `.jobs`, `.models`, `.datasets` and `.audit`",
    )
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = Field(
        "PLAINTEXT", description="protocol of all brokers, also of those in storage.import_from"
    )
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = Field(
        "SCRAM-SHA-512", description="SASL mechanism, for security_protocol SASL_PLAINTEXT and SASL_SSL"
    )
    sasl_username: str | None = Field(None, description="SASL user, for security_protocol SASL_PLAINTEXT and SASL_SSL")
    sasl_password: SecretStr | None = Field(None, description="SASL password")
    ca_file: str | None = Field(None, description="CA certificates of the brokers; the system's when unset")

    @field_validator("brokers")
    @classmethod
    def check_addresses(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[^\s,:/]+(:\d{1,5})?(,[^\s,:/]+(:\d{1,5})?)*", value):
            raise ValueError(f"{value!r} is no list of addresses such as kafka-0:9092,kafka-1:9092")
        return value

    @model_validator(mode="after")
    def check_protocol(self) -> Self:
        """Reject settings that the protocol would ignore."""
        signs_in = self.security_protocol.startswith("SASL_")
        if (self.sasl_username is not None, self.sasl_password is not None) != (signs_in, signs_in):
            raise ValueError(
                "security_protocol SASL_SSL or SASL_PLAINTEXT needs sasl_username and sasl_password, no other does"
            )
        if self.ca_file and not self.security_protocol.endswith("SSL"):
            raise ValueError("ca_file needs security_protocol SSL or SASL_SSL")
        return self

    @property
    def security(self) -> dict[str, str]:
        """Security options of librdkafka."""
        found: dict[str, str] = {"security.protocol": self.security_protocol}
        if self.sasl_username is not None and self.sasl_password is not None:
            found |= {"sasl.mechanism": self.sasl_mechanism, "sasl.username": self.sasl_username}
            found["sasl.password"] = self.sasl_password.get_secret_value()
        return found | ({"ssl.ca.location": self.ca_file} if self.ca_file else {})


class Auth(Section):
    """Sign-in with the tokens of an identity provider (IAM)."""

    iam_url: str = Field("https://hanzo.id", description="issuer of the tokens; its keys are at /.well-known/jwks.json")
    verify_tokens: bool = Field(False, description="require a bearer token for every call")
    audience: str = Field("hanzo-ml", min_length=1, description="what the claim aud of a token must name")
    user_claim: str = Field("sub", description="claim with the user's id")
    organization_claim: str = Field("organization", description="claim with the one organization of the user")
    roles_claim: str = Field("roles", description="claim with a list of ml-admin, ml-researcher, ml-viewer")
    leeway_seconds: int = Field(30, ge=0, le=300, description="allowed difference between the clocks of IAM and API")
    keys_refresh_seconds: int = Field(300, ge=0, description="age at which the IAM's keys are fetched again")
    keys_retry_seconds: int = Field(10, ge=0, description="minimum time between two fetches, also for an unknown key")
    keys_limit_seconds: int = Field(3600, ge=1, description="how long keys are used while the IAM does not answer")

    @field_validator("iam_url")
    @classmethod
    def require_secure_url(cls, value: str) -> str:
        """Over plain HTTP, an attacker on the network could supply keys."""
        try:
            url = urlsplit(value)
            known = bool(url.hostname) and not url.query and not url.fragment and not url.username and url.port != 0
        except ValueError:
            known = False
        if not known or not (url.scheme == "https" or (url.scheme == "http" and is_loopback(url.hostname or ""))):
            raise ValueError("no https:// address (http:// is allowed on this machine only)")
        return value

    @property
    def issuer(self) -> str:
        return self.iam_url.rstrip("/")


class Prices(Section):
    """Prices that estimates use."""

    gpu_hour: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(
        {"nvidia-a100-40gb": 2.0, "nvidia-a100-80gb": 3.0, "nvidia-h100-80gb": 4.0, "nvidia-h200-141gb": 5.0},
        description="dollars per hour of one GPU, by type; replaces the whole default mapping",
    )


class Alerts(Section):
    """When a running job is reported as stalled."""

    stalled_after: Duration = Field("15m", description="time without a metric until the event `job.stalled`")
    checkpoint_slack: float = Field(
        1.5, ge=1, description="checkpoint intervals without a checkpoint until the event `job.checkpoint_stale`"
    )


class Hpo(Section):
    """Defaults of sweeps."""

    max_concurrent_trials: int = Field(8, ge=1, description="trials of a sweep at a time; a sweep may set fewer")
    default_strategy: Literal["grid", "random", "bayesian", "pbt", "successive_halving"] = Field(
        "bayesian", description="strategy of a sweep that sets none"
    )


class Metrics(Section):
    """The page that Prometheus reads, on a port of its own."""

    enabled: bool = Field(True, description="serve metrics")
    port: int = Field(9090, ge=1, le=65535, description="port of the page")
    path: str = Field("/metrics", pattern=r"^/[\w./-]*$", description="path of the page")


class Logging(Section):
    """Logs of the server processes."""

    level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe level that is logged")
    format: Literal["json", "text"] = Field("json", description="one JSON document per line, or text")
