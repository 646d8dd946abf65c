"""The standing definition for self-serve work: datasets and models that have no definition of their own."""

SANDBOX = "sandbox"
"""Name of its Dagster group, its assets and its model in job configurations."""


def registered_name(definition: str, job_name: str) -> str:
    """The name under which the registry has a job's model: its definition's, or the job's own in the sandbox."""
    return job_name if definition == SANDBOX else definition
