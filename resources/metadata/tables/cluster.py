"""Tables of cluster jobs, their attempts, pod tokens, and GPU usage."""

from sqlalchemy import JSON, BigInteger, Boolean, Column, Index, Integer, String, Table, Text

from resources.metadata.tables.base import schema

cluster_jobs = Table(
    "cluster_jobs",
    schema,
    Column("job_id", String(256), primary_key=True),
    Column("program", String(20), primary_key=True, doc="recipes.contracts.job.Program"),
    Column("namespace", String(63), nullable=False),
    Column("name", String(63), nullable=False, doc="of the job's objects, without the generation"),
    Column("generation", Integer, nullable=False, doc="grows when the objects are created with other nodes"),
    Column("document", JSON, nullable=False, doc="recipes.contracts.job.Job as it was submitted"),
    Column("wanted", String(20), nullable=False, doc="run | cancel | nothing (the end was reported)"),
    Column("phase", String(20), nullable=False, doc="resources.compute.base.Phase"),
    Column("detail", Text, nullable=False, doc="one line for people: what it waits for, or why it ended"),
    Column("reason", String(40), doc="recipes.contracts.exit_reason.ExitReason of the newest attempt that has ended"),
    Column("attempt", Integer, nullable=False, doc="of the newest start; 0 before the first"),
    Column("queue_position", Integer, doc="1 is next; none once it is admitted"),
    Column("admitted_at", BigInteger, doc="when it last stopped waiting for capacity"),
    Column("created_at", BigInteger, nullable=False),
    Column("updated_at", BigInteger, nullable=False),
    Index("cluster_jobs_by_phase", "phase", "created_at"),
)

job_attempts = Table(
    "job_attempts",
    schema,
    Column("job_id", String(256), primary_key=True),
    Column("program", String(20), primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False, doc="from 1"),
    Column("generation", Integer, nullable=False),
    Column("claimed_by", String(64), nullable=False, doc="uid of the gang's first pod: a claim is idempotent by it"),
    Column("nodes", JSON, nullable=False, doc="node name by node rank"),
    Column("gpus", JSON, nullable=False, doc="UUIDs as NVML reports them, by node rank; empty without GPUs"),
    Column("started_at", BigInteger, nullable=False),
    Column("ended_at", BigInteger),
    Column("reason", String(40), doc="recipes.contracts.exit_reason.ExitReason"),
    Column("message", Text, nullable=False),
    Column("counted", Boolean, nullable=False, doc="whether it counts against the job's limit of restarts"),
    Column("saved_at", BigInteger, doc="when its newest checkpoint was complete in the object store"),
    Index("job_attempts_by_pod", "job_id", "program", "claimed_by", unique=True),
)

program_tokens = Table(
    "program_tokens",
    schema,
    Column("sha256", String(64), primary_key=True, doc="of the token, which only the program's pods know"),
    Column("job_id", String(256), nullable=False),
    Column("program", String(20), nullable=False),
    Column("expires_at", BigInteger, nullable=False),
    Index("program_tokens_by_job", "job_id", "program"),
)

gpu_usage = Table(
    "gpu_usage",
    schema,
    Column("attempt", String(64), primary_key=True, doc="on a cluster job_attempts.claimed_by; random on this machine"),
    Column("job_id", String(256), nullable=False),
    Column("program", String(20), nullable=False),
    Column("owner_id", String(256), nullable=False, doc="of the submitted job that the program works for, and of its run"),
    Column("gpus", Integer, nullable=False, doc="on all nodes"),
    Column("gpu_type", String(100), nullable=False),
    Column("started_at", BigInteger, nullable=False),
    Column("metered_until", BigInteger, nullable=False, doc="never decreases: GPU hours are a counter"),
    Column("is_open", Boolean, nullable=False, doc="the attempt still holds its GPUs"),
    Index("gpu_usage_by_job", "job_id", "program", "is_open"),
    Index("gpu_usage_by_owner", "owner_id"),
)
