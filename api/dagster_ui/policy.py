"""Decide which GraphQL operations of Dagster a caller may send. Pure: no I/O.

Queries and subscriptions are reads. A mutation requires the permission of the same call under `/v1`; a mutation that is not
in the table, as a new release of Dagster may add, requires ml-admin.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from api.auth.permissions import OWN_ONLY, Caller, Permission
from api.dagster_ui.graphql_requests import GraphQLRequest, Mutation, values_by_key

LAUNCH, CANCEL = Permission.JOBS_SUBMIT, Permission.JOBS_CANCEL
MUTATIONS: Mapping[str, Permission] = {
    "launchRun": LAUNCH,
    "launchPipelineExecution": LAUNCH,
    "launchMultipleRuns": LAUNCH,
    "launchRunReexecution": LAUNCH,
    "launchPipelineReexecution": LAUNCH,
    "launchPartitionBackfill": LAUNCH,
    "addDynamicPartition": LAUNCH,
    "terminateRun": CANCEL,
    "terminateRuns": CANCEL,
    "terminatePipelineExecution": CANCEL,
    "cancelPartitionBackfill": CANCEL,
}
TERMINATIONS = frozenset({"terminateRun", "terminateRuns", "terminatePipelineExecution"})
LAUNCH_ARGUMENTS = ("executionParams", "executionParamsList", "backfillParams")
PROMOTION_ASSET = "promotion"
"""Last part of the keys of assets that put a version into production; launching one counts as promotion."""
JOB_TAGS = ("dagster/partition", "hanzo_ml/preparation")
"""Run tags with the id of the job that a Dagster run works for."""
POD_TAG_PREFIX = "dagster-k8s/"
"""Run tags that change the pod of a run in the namespace of the control plane. Its launcher refuses them too."""
ORGANIZATION_TAG = "hanzo_ml/organization"
"""Run tag with the organization whose dataset a run works on."""
UI_USER = "dagster"
"""The user recorded for jobs launched in Dagster's UI."""


@dataclass(frozen=True)
class DagsterRun:
    """What Dagster knows about a run that a mutation names."""

    assets: tuple[str, ...]
    job_ids: tuple[str, ...]


def refusal(caller: Caller, request: GraphQLRequest, *, allows_mutations: bool = True) -> str | None:
    """Return why the caller may not send a request; None if allowed.

    Considers only the request; `run_refusal` considers the runs that it names.

    Args:
        allows_mutations: false for requests by GET and over a websocket.
    """
    if not request.has_mutation:
        return None
    if not allows_mutations:
        return "A mutation changes something: send it by POST"
    if len(request.operations) > 1:
        return "Send a mutation in its own document, so that the audit log names what was done"
    return next(filter(None, (mutation_refusal(caller, mutation) for mutation in request.mutations)), None)


def mutation_refusal(caller: Caller, mutation: Mutation) -> str | None:
    if caller.is_admin:
        return None
    role = f"Your role ({', '.join(sorted(caller.roles))})"
    permission = MUTATIONS.get(mutation.name)
    if permission is None:
        return f"{role} does not include {mutation.name} in Dagster: ask an ml-admin"
    if not caller.may(permission) and not cancels_own_only(caller, permission):
        return f"{role} does not include {permission}, which {mutation.name} in Dagster needs"
    for key, value in run_tags(mutation):
        if key.startswith(POD_TAG_PREFIX):
            return f"{role} may not set the run tag {key}: it changes pods of the control plane"
        if key == ORGANIZATION_TAG and value != caller.organization:
            return f"The run tag {key} must name your own organization"
    for selection in asset_selections(mutation):
        if selection is None:
            return "Select the assets to materialize: without a selection all are, including the promotion to production"
        if problem := selection_refusal(caller, selection):
            return problem
    return None


def run_refusal(
    caller: Caller, request: GraphQLRequest, runs: Mapping[str, DagsterRun], users: Mapping[str, str]
) -> str | None:
    """Return why the caller may not end or repeat Dagster runs; None if allowed.

    Args:
        users: the user of each job, by the job's id.
    """
    if caller.is_admin:
        return None
    for run_id in repeated_runs(request):
        if run_id in runs and (problem := selection_refusal(caller, runs[run_id].assets)):
            return problem
    for run_id in terminated_runs(request):
        for job_id in runs[run_id].job_ids if run_id in runs else ():
            if users.get(job_id, caller.user_id) not in (caller.user_id, UI_USER):
                return f"job '{job_id}' is another user's: an ml-admin may cancel it"
    return None


def selection_refusal(caller: Caller, selection: Iterable[str]) -> str | None:
    promoted = next((key for key in selection if key.split("/")[-1] == PROMOTION_ASSET), None)
    if promoted is None or caller.may(Permission.MODELS_PROMOTE):
        return None
    roles = ", ".join(sorted(caller.roles))
    return f"Your role ({roles}) does not include {Permission.MODELS_PROMOTE}, which materializing {promoted} needs"


def cancels_own_only(caller: Caller, permission: Permission) -> bool:
    """Return whether the caller may cancel their own jobs only."""
    own = OWN_ONLY.get(permission)
    return own is not None and not caller.may(permission) and caller.may(own)


def run_tags(mutation: Mutation) -> Iterator[tuple[str, str]]:
    """Yield the run tags that a mutation sets, anywhere in its arguments."""
    for found in values_by_key(mutation.arguments, ("tags", "extraTags")):
        for tag in found if isinstance(found, list) else [found]:
            if isinstance(tag, dict):
                yield str(tag.get("key", "")), str(tag.get("value", ""))


def asset_selections(mutation: Mutation) -> Iterator[list[str] | None]:
    """Yield the asset keys of each launch; None for a launch without a selection."""
    for name in LAUNCH_ARGUMENTS:
        launches = mutation.arguments.get(name)
        for launch in launches if isinstance(launches, list) else [launches]:
            if isinstance(launch, dict):
                # A backfill with a selector targets a whole job, and Dagster may ignore its asset selection.
                is_job_backfill = name == "backfillParams" and launch.get("selector") is not None
                yield None if is_job_backfill else selected_assets(launch)


def selected_assets(launch: Mapping[str, Any]) -> list[str] | None:
    selector = launch.get("selector")
    selector = selector if isinstance(selector, dict) else {}
    assets = [*as_list(selector.get("assetSelection")), *as_list(launch.get("assetSelection"))]
    assets += [each.get("assetKey") for each in as_list(launch.get("partitionsByAssets")) if isinstance(each, dict)]
    if not assets and not (selector.get("assetSelection") == [] and as_list(selector.get("assetCheckSelection"))):
        return None
    return ["/".join(map(str, as_list(asset.get("path")))) for asset in assets if isinstance(asset, dict)]


def as_list(value: Any) -> list[Any]:
    """Return a GraphQL list input as a list; it may be a single item."""
    return value if isinstance(value, list) else [] if value is None else [value]


def terminated_runs(request: GraphQLRequest) -> list[str]:
    """Return ids of the Dagster runs that a request ends."""
    arguments = [mutation.arguments for mutation in request.mutations if mutation.name in TERMINATIONS]
    return [str(run_id) for value in values_by_key(arguments, ("runId", "runIds")) for run_id in as_list(value)]


def repeated_runs(request: GraphQLRequest) -> list[str]:
    """Return ids of the Dagster runs that a request repeats."""
    arguments = [mutation.arguments for mutation in request.mutations if MUTATIONS.get(mutation.name) is LAUNCH]
    return [str(value) for value in values_by_key(arguments, ("parentRunId",)) if value]
