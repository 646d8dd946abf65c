"""Storage of the control plane: an S3 server that enforces signatures, and PostgreSQL.

Both are in the cluster's namespace.
"""

from __future__ import annotations

import secrets
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import psycopg
from botocore.config import Config

from tests.cluster import network, processes
from tests.cluster.build import Cache
from tests.support import postgres_server

S3_PORT, POSTGRES_PORT = 7070, 5432
BUCKETS = ("hanzo-ml-datasets", "hanzo-ml-checkpoints", "hanzo-models", "hanzo-ml")
STARTS_WITHIN = 60.0


@dataclass(frozen=True)
class S3:
    """versitygw: objects are files of a folder, which survives restarts."""

    folder: Path
    namespace: str
    cache: Cache
    access_key: str = "the-access-key"
    secret_key: str = "the-secret-key"

    @property
    def url(self) -> str:
        return f"http://{network.GATEWAY}:{S3_PORT}"

    @property
    def variables(self) -> dict[str, str]:
        """The environment of a program that uses the server."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_ENDPOINT_URL": self.url,
            "AWS_REGION": "us-east-1",
        }

    def start(self) -> None:
        objects = self.folder / "objects"
        objects.mkdir(exist_ok=True)
        keys = {"ROOT_ACCESS_KEY": self.access_key, "ROOT_SECRET_KEY": self.secret_key}
        address = f"{network.GATEWAY}:{S3_PORT}"
        server = [str(self.cache.program("versitygw")), "--port", address, "posix", str(objects)]
        command = [*network.inside(self.namespace), *server]
        processes.start("s3", command, self.folder, variables=keys)

    def create_buckets(self) -> None:
        """Wait until the server responds, and create the product's buckets."""
        with network.entered(self.namespace):
            log = self.folder / "s3.log"
            processes.wait_until(self._answers, STARTS_WITHIN, lambda: f"S3 does not answer:\n{processes.tail(log)}")
            client = self.client()
            existing = {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}
            for bucket in sorted(set(BUCKETS) - existing):
                client.create_bucket(Bucket=bucket)

    def client(self) -> Any:
        """Return a client for callers in the cluster's namespace."""
        return boto3.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name="us-east-1",
            config=Config(signature_version="s3v4", retries={"total_max_attempts": 1}),
        )

    def _answers(self) -> bool:
        try:
            self.client().list_buckets()
        except Exception:
            return False
        return True


@dataclass(frozen=True)
class Postgres:
    """A server with one user and a password.

    Pods and the control plane's programs reach it over TCP.
    """

    folder: Path
    namespace: str
    user: str = "hanzo"

    @property
    def password(self) -> str:
        return (self.folder / "postgres.password").read_text()

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://{self.user}:{self.password}@{network.GATEWAY}:{POSTGRES_PORT}/{database}"

    def start(self) -> None:
        """Start the server, on a new data folder if there is none."""
        binaries, owner = postgres_server.binaries(), postgres_server.unprivileged_user()
        assert owner is not None, "only root enters the namespace"
        if not self._data.exists():
            self._initialize(binaries, owner)
        settings = {
            "listen_addresses": f"{network.GATEWAY},127.0.0.1",
            "port": POSTGRES_PORT,
            "unix_socket_directories": self._data.parent,
            "max_connections": 200,
            "fsync": "off",
        }
        server = [
            str(binaries / "postgres"),
            "-D",
            str(self._data),
            *(f"--{name}={value}" for name, value in settings.items()),
        ]
        # It refuses to run as root, which is needed to enter the namespace.
        unprivileged = ["setpriv", f"--reuid={owner}", f"--regid={owner}", "--init-groups"]
        command = [*network.inside(self.namespace), *unprivileged, *server]
        processes.start("postgres", command, self.folder)

    def _initialize(self, binaries: Path, owner: str) -> None:
        password = self.folder / "postgres.password"
        password.write_text(secrets.token_hex(16))
        self._data.parent.mkdir()
        for path in (password, self._data.parent):
            shutil.chown(path, owner)
        options = {"pgdata": self._data, "username": self.user, "auth": "scram-sha-256", "pwfile": password, "locale": "C"}
        arguments = [f"--{name}={value}" for name, value in options.items()]
        subprocess.run(
            [binaries / "initdb", *arguments, "--encoding=UTF8", "--no-sync"],
            user=owner,
            cwd=self._data.parent,
            check=True,
            capture_output=True,
        )
        with (self._data / "pg_hba.conf").open("a") as rules:
            rules.write("host all all 10.0.0.0/8 scram-sha-256\n")

    def wait_until_ready(self) -> None:
        with network.entered(self.namespace):
            log = self.folder / "postgres.log"
            processes.wait_until(self._answers, STARTS_WITHIN, lambda: f"PostgreSQL does not answer:\n{processes.tail(log)}")

    def create_database(self, name: str) -> str:
        """Create an empty database; return its address for callers in the cluster's namespace."""
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"'.encode())
        return self.url(name)

    def drop_database(self, name: str) -> None:
        """Delete a database, with the connections to it."""
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)'.encode())

    @property
    def _data(self) -> Path:
        return self.folder / "postgres" / "data"

    def _answers(self) -> bool:
        try:
            psycopg.connect(self.url()).close()
        except psycopg.OperationalError:
            return False
        return True
