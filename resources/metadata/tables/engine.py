"""Tables of an engine that pulls: the files of deployments, and what each replica reported."""

from sqlalchemy import JSON, BigInteger, Column, Integer, String, Table, Text

from resources.metadata.tables.base import schema

deployment_files = Table(
    "deployment_files",
    schema,
    Column("deployment_id", BigInteger, primary_key=True, autoincrement=False),
    Column("uri", Text, nullable=False, doc="of the object in the store"),
    Column("size_bytes", BigInteger, nullable=False),
    Column("smoke_prompts", JSON, nullable=False),
    Column("attempt", Integer, nullable=False, doc="grows when the deployment is tried again: older failures do not count"),
)

engine_replicas = Table(
    "engine_replicas",
    schema,
    Column("id", String(250), primary_key=True, doc="the replica's host and port; on a cluster its host is the pod's name"),
    Column("report", JSON, nullable=False, doc="resources.serving.replica_messages.ReplicaReport"),
    Column("reported_at", BigInteger, nullable=False),
)
