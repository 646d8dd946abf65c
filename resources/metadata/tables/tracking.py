"""Tables of experiments, runs, and what runs log. Metrics are keyed by series number."""

from sqlalchemy import BigInteger, Boolean, Column, Double, ForeignKey, Index, String, Table, Text, UniqueConstraint, func

from resources.metadata.tables.base import SEQUENCE, schema

experiments = Table(
    "experiments",
    schema,
    Column("id", SEQUENCE, primary_key=True, autoincrement=True),
    Column("name", String(500), nullable=False),
    Column("organization", String(250), nullable=False),
    Column("artifact_location", Text, nullable=False),
    Column("lifecycle_stage", String(20), nullable=False),
    Column("creation_time", BigInteger, nullable=False),
    Column("last_update_time", BigInteger, nullable=False),
    UniqueConstraint("organization", "name"),
    sqlite_autoincrement=True,
)

experiment_tags = Table(
    "experiment_tags",
    schema,
    Column("experiment_id", ForeignKey("experiments.id"), primary_key=True),
    Column("key", String(250), primary_key=True),
    Column("value", Text, nullable=False),
)

runs = Table(
    "runs",
    schema,
    Column("id", String(256), primary_key=True),
    Column("experiment_id", ForeignKey("experiments.id"), nullable=False),
    Column("name", String(500), nullable=False),
    Column("status", String(20), nullable=False, doc="queued | running | completed | failed | cancelled"),
    Column("start_time", BigInteger),
    Column("end_time", BigInteger),
    Column("user_id", String(250), nullable=False),
    Column("organization", String(250), nullable=False),
    Column("artifact_uri", Text, nullable=False),
    Column("lifecycle_stage", String(20), nullable=False),
    Column("revision", BigInteger, nullable=False, doc="incremented with everything that the run logs (`run_revisions`)"),
    Index("runs_by_experiment", "experiment_id", "start_time"),
    # Each write increments the revision: with free space in the page, PostgreSQL does that without touching the indexes.
    postgresql_with={"fillfactor": 80},
)

FOUND_BY = 64
"""Length of the prefix of params and tags that PostgreSQL indexes: an index entry holds at most 2,700 bytes."""

run_tags = Table(
    "run_tags",
    schema,
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("key", String(250), primary_key=True),
    Column("value", Text, nullable=False),
    sqlite_with_rowid=False,
)

params = Table(
    "params",
    schema,
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("key", String(250), primary_key=True),
    Column("value", Text, nullable=False),
    sqlite_with_rowid=False,
)

# Not on SQLite: without statistics it scans the runs of the experiment instead of using these indexes.
for _table in (run_tags, params):
    Index(f"{_table.name}_by_value", _table.c.key, func.left(_table.c.value, FOUND_BY)).ddl_if(dialect="postgresql")

latest_metrics = Table(
    "latest_metrics",
    schema,
    Column("id", SEQUENCE, primary_key=True, autoincrement=True, doc="names the series of this key in `metrics`"),
    Column("run_id", ForeignKey("runs.id"), nullable=False),
    Column("key", String(250), nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("timestamp", BigInteger, nullable=False),
    Column("value", Double, nullable=False),
    Column("is_nan", Boolean, nullable=False),
    UniqueConstraint("run_id", "key"),
)

metrics = Table(
    "metrics",
    schema,
    # A number instead of run and key, which would take 60 bytes twice: a point takes 28 bytes in SQLite instead of 154, and
    # is written three times as fast. A foreign key would cost a look-up per point; `write_group` writes both tables at
    # once.
    Column("series", SEQUENCE, primary_key=True, autoincrement=False, doc="latest_metrics.id"),
    Column("step", BigInteger, primary_key=True),
    Column("timestamp", BigInteger, primary_key=True),
    Column("value", Double, primary_key=True),
    Column("is_nan", Boolean, primary_key=True),
    sqlite_with_rowid=False,
)
