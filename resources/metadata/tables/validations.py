"""What was found of dataset versions, and whether they passed their checks."""

from sqlalchemy import JSON, BigInteger, Column, ForeignKey, String, Table, Text

from resources.metadata.tables.base import schema

dataset_validations = Table(
    "dataset_validations",
    schema,
    Column("dataset_id", ForeignKey("dataset_versions.id", ondelete="CASCADE"), primary_key=True),
    Column("statistics", JSON, nullable=False, doc="recipes.storage.manifest.Artifact of the version's statistics"),
    Column("facts", JSON, nullable=False, doc="recipes.contracts.validation_results.ValidationFacts"),
    Column("leaks", JSON, doc="recipes.contracts.validation_results.Leaks, once the version is split"),
    Column("verdicts", JSON, nullable=False, doc="check -> resources.datasets.check_verdicts.Verdict"),
    Column("blocked", Text, nullable=False, doc="why nothing may be split or trained; empty where it may"),
    Column("checked_at", BigInteger, nullable=False),
    Column("reference", String(300), nullable=False, doc="what it was compared with, as NAME@VERSION; empty for nothing"),
)
