"""The shared definition for datasets and models that have no definition of their own."""

SANDBOX = "sandbox"
"""Name of its Dagster group, and of its assets and model in job configurations."""


def registered_name(definition: str, job_name: str) -> str:
    """Return a model's registry name: its definition's, or the job's own in the sandbox."""
    return job_name if definition == SANDBOX else definition
