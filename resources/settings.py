"""Settings: the specification's `config.yaml` sections, `${VAR}` expansion and `HANZO_ML_{SECTION}_{KEY}` overrides.

The only place that reads the environment; `resources.configuration` makes the document. Precedence, lowest first:
embedded defaults, the configuration file (`HANZO_ML_CONFIG`, else `$HANZO_ML_HOME/config.yaml`, else
`/etc/hanzo-ml/config.yaml`), environment variables (specification rows R1-R5).
"""

import ipaddress
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from recipes.schema import BadConfiguration, Duration, StoreAddress
from resources.configuration import (
    NOT_SETTINGS,
    PREFIX,
    configuration_file,
    first_problem,
    masked_address,
    override,
    read_configuration,
)


def is_loopback(host: str) -> bool:
    """Whether a host can be reached from this machine only. A name but `localhost` may resolve to anything."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def may_be_empty(cls, value: Any) -> Any:
        """A section whose keys are all commented out is null in YAML."""
        return {} if value is None else value


class Server(Section):
    host: str = "127.0.0.1"
    port: int = Field(8057, ge=1, le=65535)
    workers: int = Field(1, ge=1, description="processes of the API; several need PostgreSQL, because SQLite has one writer")
    allowed_hosts: tuple[str, ...] = Field(
        ("ml.hanzo.svc", "hanzo-ml", "hanzo-ml.hanzo.svc"),
        description="names under which clients reach the API, beside localhost and host",
    )
    max_body_bytes: int = Field(16 << 20, ge=1, description="of a request that is no upload of a file")


class Dagster(Section):
    host: str = "127.0.0.1"
    port: int = Field(3000, ge=1, le=65535)
    code_server_port: int = Field(3030, ge=1, le=65535)

    @field_validator("host")
    @classmethod
    def is_this_machine(cls, value: str) -> str:
        """Whoever reaches Dagster may launch anything: it has no sign-in of its own (row W5)."""
        if not is_loopback(value):
            raise ValueError("Dagster has no sign-in: keep it on 127.0.0.1 and come by `ssh -L` or `kubectl port-forward`")
        return value


class Engine(Section):
    host: str = "127.0.0.1"
    port: int = Field(8043, ge=1, le=65535)


class DatabaseSection(Section):
    url: SecretStr | None = Field(None, description="SQLAlchemy URL; SQLite in the state folder when unset")

    @field_validator("url")
    @classmethod
    def is_a_url(cls, value: SecretStr | None) -> SecretStr | None:
        if value is None:
            return None
        try:
            url = make_url(value.get_secret_value())
            known = url.get_dialect().name in ("sqlite", "postgresql")
        except (ArgumentError, ValueError):
            known = False
        if not known:
            raise ValueError("no SQLAlchemy URL of SQLite or PostgreSQL, such as postgresql://USER:PASSWORD@HOST/DATABASE")
        # SQLAlchemy ends a password at its first '@' and would take the rest for the host, which is shown.
        if url.host and "@" in f"{url.host}{url.database}":
            raise ValueError("write a '@' in the user or password as %40")
        return value


class Buckets(Section):
    datasets: str = "hanzo-ml-datasets"
    checkpoints: str = "hanzo-ml-checkpoints"
    models: str = "hanzo-models"


class Storage(Section):
    endpoint: str | None = Field(None, description="S3 endpoint; a folder in the state folder when unset")
    public_endpoint: str | None = Field(
        None, description="the same S3 server as clients reach it: large files go there in parts; through the API when unset"
    )
    access_key: SecretStr | None = Field(None, description="with secret_key; the AWS variables hold where both are unset")
    secret_key: SecretStr | None = None
    encryption: Literal["AES256", "aws:kms", "none"] = Field("AES256", description="of objects at rest, by the S3 server")
    kms_key: str | None = Field(None, description="id of the KMS key, for encryption aws:kms; the server's own when unset")
    buckets: Buckets = Buckets()
    import_from: tuple[str, ...] = Field(
        (), description="s3:// and file:// addresses below which anybody may have this server fetch a dataset; none at first"
    )

    @field_validator("import_from")
    @classmethod
    def are_addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for address in value:
            if not re.fullmatch(r"(s3://[^/]+|file:///[^/]).*", address):
                raise ValueError(f"{address!r} is no address such as s3://BUCKET/FOLDER or file:///FOLDER")
        return value

    @model_validator(mode="after")
    def belongs_together(self) -> Self:
        if self.endpoint and (self.access_key is None) != (self.secret_key is None):
            raise ValueError("access_key and secret_key belong together: set both or none")
        if self.kms_key and self.encryption != "aws:kms":
            raise ValueError("kms_key needs encryption aws:kms")
        return self

    @property
    def variables(self) -> dict[str, str]:
        """The keys as AWS variables: the one form in which processes, pods and the S3 library all take them."""
        if self.access_key is None or self.secret_key is None:
            return {}
        return {
            "AWS_ACCESS_KEY_ID": self.access_key.get_secret_value(),
            "AWS_SECRET_ACCESS_KEY": self.secret_key.get_secret_value(),
        }


class Stream(Section):
    brokers: str | None = Field(None, description="Kafka brokers; events stay in the database when unset")
    topic_prefix: str = "hanzo.ml"


class Auth(Section):
    """Sign-in with the IAM's tokens (rows W1-W6). Which claims say what is not in the specification: it is set here."""

    iam_url: str = Field("https://hanzo.id", description="issuer of the tokens; its keys are at /.well-known/jwks.json")
    verify_tokens: bool = False
    audience: str = Field("hanzo-ml", min_length=1, description="what the claim aud of a token must name")
    user_claim: str = Field("sub", description="claim with the user's id")
    organization_claim: str = Field("organization", description="claim with the one organization of the user")
    roles_claim: str = Field("roles", description="claim with a list of ml-admin, ml-researcher, ml-viewer")
    leeway_seconds: int = Field(30, ge=0, le=300, description="how far the clocks of IAM and API may lie apart")
    keys_refresh_seconds: int = Field(300, ge=0, description="age at which the IAM's keys are fetched again")
    keys_retry_seconds: int = Field(10, ge=0, description="pause between two fetches, also for keys that are not known")
    keys_limit_seconds: int = Field(3600, ge=1, description="how long keys hold while the IAM does not answer")

    @field_validator("iam_url")
    @classmethod
    def cannot_be_forged(cls, value: str) -> str:
        """Over plain HTTP, whoever sits on the wire could hand out keys of his own."""
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


class PriorityClasses(Section):
    """Kueue's WorkloadPriorityClass for each priority of a job (checklist Z10: production is the highest)."""

    low: str = "interactive"
    medium: str = "batch"
    high: str = "production"


class Scheduler(Section):
    namespace: str = "hanzo-ml"
    default_image: str = "hanzoai/ml-pytorch:2.3-cuda12.4"
    gpu_types: tuple[str, ...] = ("nvidia-a100-80gb", "nvidia-a100-40gb", "nvidia-h100-80gb")
    max_concurrent_jobs: int = Field(32, ge=1)
    checkpoint_bucket: str = "hanzo-ml-checkpoints"
    gang_backend: Literal["kueue", "indexed_job"] = Field(
        "kueue", description="a JobSet behind Kueue, or an Indexed Job where the cluster has neither (checklist Z9)"
    )
    queue: str = Field("hanzo-ml", description="Kueue's LocalQueue in the namespace")
    priority_classes: PriorityClasses = PriorityClasses()
    gpu_type_label: str = Field("ml.hanzo.ai/gpu-type", description="label of nodes whose value is one of gpu_types")
    job_secret: str = Field("hanzo-ml-job", description="Secret with the object store's AWS variables, for every pod")
    tracking_uri: str | None = Field(None, description="the API as a pod reaches it; server.host and port when unset")


class Prices(Section):
    """The price book (row Z26). The defaults are the specification's two to three dollars for an A100, and list prices."""

    gpu_hour: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(
        {"nvidia-a100-40gb": 2.0, "nvidia-a100-80gb": 3.0, "nvidia-h100-80gb": 4.0, "nvidia-h200-141gb": 5.0},
        description="dollars an hour of one GPU, by its type; a list of your own replaces this one",
    )


class Alerts(Section):
    """When a running job is told of as one in trouble (rows I4, Y5, Z29)."""

    stalled_after: Duration = Field("15m", description="no metric for so long")
    checkpoint_slack: float = Field(1.5, ge=1, description="no checkpoint for so many of its policy's intervals")


class Hpo(Section):
    max_concurrent_trials: int = Field(8, ge=1)
    default_strategy: Literal["grid", "random", "bayesian", "pbt", "successive_halving"] = "bayesian"


class Metrics(Section):
    """Prometheus (rows V2-V6), on a port of its own beside the API."""

    enabled: bool = True
    port: int = Field(9090, ge=1, le=65535)
    path: str = Field("/metrics", pattern=r"^/[\w./-]*$")


class Logging(Section):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["json", "text"] = "json"


class Settings(Section):
    """Every setting of the product. `home` is the state folder of embedded mode."""

    home: Path
    server: Server = Server()
    dagster: Dagster = Dagster()
    engine: Engine = Engine()
    database: DatabaseSection = DatabaseSection()
    storage: Storage = Storage()
    stream: Stream = Stream()
    auth: Auth = Auth()
    scheduler: Scheduler = Scheduler()
    prices: Prices = Prices()
    alerts: Alerts = Alerts()
    hpo: Hpo = Hpo()
    metrics: Metrics = Metrics()
    logging: Logging = Logging()

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read the effective settings.

        Raises:
            BadConfiguration: an unknown key, a bad value or an undefined `${VAR}`; the message names it.
        """
        environ = os.environ if environ is None else environ
        home = Path(environ.get("HANZO_ML_HOME", ".hanzo-ml")).resolve()
        path = configuration_file(home, environ)
        document = read_configuration(path, environ) if path else {}
        source = str(path) if path else "settings"
        if "home" in document:
            raise BadConfiguration(f"{source}: unknown key 'home': set the variable HANZO_ML_HOME instead")
        for name, value in sorted(environ.items()):
            if name.startswith(PREFIX) and name.removeprefix(PREFIX) not in NOT_SETTINGS:
                override(document, SECTIONS, name, value)
        try:
            return cls.model_validate({**document, "home": home})
        except ValidationError as error:
            raise BadConfiguration(f"{source}: {first_problem(error)}") from None

    @property
    def database_url(self) -> str:
        return self.database.url.get_secret_value() if self.database.url else f"sqlite:///{self.home / 'hanzo-ml.db'}"

    @property
    def store(self) -> StoreAddress:
        root = self.storage.endpoint or (self.home / "objects").as_uri()
        return StoreAddress(
            root=root,
            buckets=self.storage.buckets.model_dump(),
            encryption=self.storage.encryption,
            kms_key=self.storage.kms_key,
        )

    @property
    def tracking_uri(self) -> str:
        return f"http://{self.server.host}:{self.server.port}"

    @property
    def engine_url(self) -> str:
        return f"http://{self.engine.host}:{self.engine.port}"

    @property
    def dagster_url(self) -> str:
        return f"http://{self.dagster.host}:{self.dagster.port}"

    @property
    def dagster_home(self) -> Path:
        return self.home / "dagster"

    @property
    def run_workers(self) -> Path:
        """Folder of the processes that execute Dagster runs."""
        return self.home / "run-workers"

    def masked(self) -> dict[str, Any]:
        """The effective settings, with secrets as asterisks (those inside addresses too)."""
        shown = self.model_dump(mode="json")
        url = make_url(self.database_url).render_as_string(hide_password=True)
        # Drivers take a password as a parameter too, under names that only they know: no parameter shows its value.
        shown["database"]["url"] = re.sub(r"([?&][^=&]*=)[^&]*", r"\1***", url)
        for section, key in (("storage", "endpoint"), ("stream", "brokers"), ("auth", "iam_url")):
            if shown[section][key]:
                shown[section][key] = masked_address(shown[section][key])
        return shown


SECTIONS = {
    name: field.annotation
    for name, field in Settings.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}


def show() -> None:
    """Print the effective settings as YAML, with secrets masked (`hanzo-ml config show`)."""
    try:
        settings = Settings.load()
    except BadConfiguration as error:
        sys.exit(f"error: {error}")
    print(yaml.safe_dump(settings.masked(), sort_keys=False), end="")


if __name__ == "__main__":
    show()
