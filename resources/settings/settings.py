"""Settings: `config.yaml`, `${VAR}` expansion and `HANZO_ML_{SECTION}_{KEY}` overrides.

The only place that reads the environment; `resources.settings.document` makes the document. Precedence, lowest first:
embedded defaults, the configuration file (`HANZO_ML_CONFIG`, else `$HANZO_ML_HOME/config.yaml`, else
`/etc/hanzo-ml/config.yaml`), environment variables.
"""

import os
import re
import sys
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import ValidationError, model_validator
from sqlalchemy.engine import URL, make_url

from recipes.contracts.job import BadConfiguration, StoreAddress
from resources.settings.document import (
    RESERVED_VARIABLES,
    VARIABLE_PREFIX,
    apply_override,
    describe_validation_error,
    ensure_section,
    find_configuration,
    mask_address,
    read_configuration,
)
from resources.settings.scheduler import Scheduler
from resources.settings.sections import (
    DAGSTER_PREFIX,
    Alerts,
    Auth,
    Dagster,
    DatabaseSection,
    Engine,
    Hpo,
    Logging,
    Metrics,
    Prices,
    Section,
    Server,
    Storage,
    Stream,
    is_loopback,
)

VISIBLE_DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
"""Restricts the stack to some GPUs, as for any CUDA program."""
END_OF_DEVICES = "-1"
"""Invalid GPU in that variable: CUDA ignores the list from there on, so that a single one selects no GPU."""

POSTGRESQL_PORT = 5432


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
        path = find_configuration(home, environ)
        document = read_configuration(path, environ) if path else {}
        source = str(path) if path else "settings"
        if "home" in document:
            raise BadConfiguration(f"{source}: unknown key 'home': set the variable HANZO_ML_HOME instead")
        variables: dict[tuple[str, ...], str] = {}
        for name, value in sorted(environ.items()):
            if name.startswith(VARIABLE_PREFIX) and name.removeprefix(VARIABLE_PREFIX) not in RESERVED_VARIABLES:
                variables[apply_override(document, SECTIONS, name, value)] = name
        if VISIBLE_DEVICES_VARIABLE in environ:
            visible = takewhile(lambda name: name.strip() != END_OF_DEVICES, environ[VISIBLE_DEVICES_VARIABLE].split(","))
            ensure_section(document, "scheduler").setdefault("devices", list(visible))
        try:
            return cls.model_validate({**document, "home": home})
        except ValidationError as error:
            where = error.errors(include_input=False)[0]["loc"]
            variable = next((name for place, name in variables.items() if where[: len(place)] == place), None)
            raise BadConfiguration(f"{variable or source}: {describe_validation_error(error, cls)}") from None

    @model_validator(mode="before")
    @classmethod
    def unite_checkpoint_buckets(cls, document: Any) -> Any:
        """Apply the bucket of checkpoints, which two sections can name, to both."""
        if not isinstance(document, dict):
            return document
        scheduler, storage = document.get("scheduler"), document.get("storage")
        buckets = storage.get("buckets") if isinstance(storage, dict) else None
        here = scheduler.get("checkpoint_bucket") if isinstance(scheduler, dict) else None
        there = buckets.get("checkpoints") if isinstance(buckets, dict) else None
        if here and there and here != there:
            raise ValueError(
                f"scheduler.checkpoint_bucket is {here!r} and storage.buckets.checkpoints {there!r}: "
                "they name the same bucket, set one of them"
            )
        united = here or there
        if not isinstance(united, str):
            return document
        return {
            **document,
            "scheduler": {**(scheduler or {}), "checkpoint_bucket": united},
            "storage": {**(storage or {}), "buckets": {**(buckets or {}), "checkpoints": united}},
        }

    @model_validator(mode="after")
    def refuse_open_dagster(self) -> Self:
        """Reject a Dagster host other than loopback, because Dagster has no sign-in.

        On a cluster, NetworkPolicies allow only the API to reach its port.
        """
        for key, host in (("host", self.dagster.host), ("code_server_host", self.dagster.code_server_host)):
            if not is_loopback(host) and self.scheduler.backend != "kubernetes":
                raise ValueError(
                    f"dagster.{key} is {host}, but Dagster has no sign-in: keep it on 127.0.0.1 and connect by `ssh -L`"
                )
        return self

    @model_validator(mode="after")
    def refuse_own_database(self) -> Self:
        """Reject this server's own database, which holds the data of all organizations."""
        for name, database in self.storage.databases.items():
            if self.is_own_database(make_url(database.url.get_secret_value())):
                raise ValueError(f"storage.databases.{name}.url is this server's own database: name another")
        return self

    def is_own_database(self, url: URL) -> bool:
        if url.drivername == "sqlite":
            path = Path(str(url.database)).resolve()
            return path.is_relative_to(self.home) or path == Path(str(make_url(self.database_url).database)).resolve()
        return database_location(url) == database_location(make_url(self.database_url))

    @property
    def database_url(self) -> str:
        if self.database.url:
            return self.database.url.get_secret_value()
        # SQLAlchemy decodes the path of a URL, and ends it at a question mark.
        path = str(self.home / "hanzo-ml.db").replace("%", "%25").replace("?", "%3F")
        return f"sqlite:///{path}"

    @property
    def store(self) -> StoreAddress:
        root = self.storage.endpoint or (self.home / "objects").as_uri()
        return StoreAddress(
            root=root,
            buckets=self.storage.buckets.model_dump(),
            encryption=self.storage.encryption,
            kms_key=self.storage.kms_key,
            checksum=self.storage.checksum,
        )

    @property
    def tracking_uri(self) -> str:
        return f"http://{self.server.host}:{self.server.port}"

    @property
    def engine_url(self) -> str:
        return (self.engine.url or f"http://{self.engine.host}:{self.engine.port}").rstrip("/")

    @property
    def engine_cache(self) -> Path:
        return self.engine.cache or self.home / "engine"

    @property
    def dagster_url(self) -> str:
        """Address of Dagster's web server on this machine, with its path prefix."""
        return f"http://{self.dagster.host}:{self.dagster.port}{DAGSTER_PREFIX if self.dagster.url else ''}"

    @property
    def dagster_home(self) -> Path:
        return self.home / "dagster"

    @property
    def run_workers(self) -> Path:
        """Folder of the processes that execute Dagster runs."""
        return self.home / "run-workers"

    def masked(self) -> dict[str, Any]:
        """Return the effective settings with secrets masked, including those in addresses."""
        shown = self.model_dump(mode="json")
        url = make_url(self.database_url).render_as_string(hide_password=True)
        # Drivers accept a password as a query parameter too, under unknown names: mask the values of all parameters.
        shown["database"]["url"] = re.sub(r"([?&][^=&]*=)[^&]*", r"\1***", url)
        for section, key in (("storage", "endpoint"), ("stream", "brokers"), ("auth", "iam_url")):
            if shown[section][key]:
                shown[section][key] = mask_address(shown[section][key])
        return shown


def database_location(url: URL) -> tuple[str, str, str | None]:
    """Return host, port and name of a PostgreSQL database, also from query parameters."""
    return str(url.host or url.query.get("host", "")), str(url.port or url.query.get("port", POSTGRESQL_PORT)), url.database


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
