"""Names and labels of a job's objects: the same at every look, so that a supervisor that comes back finds its job again."""

import hashlib
import re

from recipes.contracts.job import Job

JOB_APP = "hanzo-ml-job"
"""Value of the label `app` on every pod that runs a job; the NetworkPolicy in deploy/kubernetes selects by it."""

DOMAIN = "ml.hanzo.ai"
LONGEST = 41


def object_name(job: Job) -> str:
    """A DNS-1123 label that starts with a letter, one for each program and job id.

    Ids that the product makes stay readable; anything else (capitals, underscores, long names: a run id may be up to 256
    characters, row F9) becomes a short form and a hash. At most `LONGEST` characters, because a JobSet adds up to 22 in the
    names of its pods and a host name has 63.
    """
    program = job.program.replace("_", "-")
    if re.fullmatch(r"[0-9a-f]{32}", job.id) and len(whole := f"{program}-{job.id}") <= LONGEST:
        return whole
    readable = re.sub(r"[^a-z0-9]+", "-", job.id.lower().removeprefix(program)).strip("-")
    short = f"{program}-{readable}"[:30].rstrip("-")
    return f"{short}-{hashlib.sha256(f'{job.program}/{job.id}'.encode()).hexdigest()[:10]}"


def labels(job: Job) -> dict[str, str]:
    """What every object of a job carries."""
    return {"app": JOB_APP, f"{DOMAIN}/program": job.program.value, f"{DOMAIN}/job": object_name(job)}


def annotations(job: Job) -> dict[str, str]:
    """The id as it is, and what tells equal work from other work under the same id."""
    return {f"{DOMAIN}/job-id": job.id, f"{DOMAIN}/work-digest": job.work_digest}
