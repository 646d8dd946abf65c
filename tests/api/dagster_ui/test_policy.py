"""Which GraphQL requests each role may send to Dagster, decided from the request alone."""

from typing import Any

import pytest
from dagster_graphql.schema import create_schema

from api.auth.permissions import Caller
from api.dagster_ui.graphql_requests import MAX_DOCUMENT_CHARACTERS, read_request
from api.dagster_ui.policy import MUTATIONS, DagsterRun, refusal, run_refusal
from resources.errors import HanzoError

VIEWER, RESEARCHER, ADMIN = (
    Caller(user_id=role, organization="acme", roles=frozenset({f"ml-{role}"})) for role in ("viewer", "researcher", "admin")
)
JOB = {"repositoryName": "__repository__", "repositoryLocationName": "hanzo_ml_assets", "jobName": "__ASSET_JOB"}
LAUNCH = "mutation Launch($params: ExecutionParams!) { launchRun(executionParams: $params) { __typename } }"


def answer(caller: Caller, query: str, allows_mutations: bool = True, **more: Any) -> str | None:
    return refusal(caller, read_request({"query": query, **more}), allows_mutations=allows_mutations)


def launch(*assets: str, **params: Any) -> dict[str, Any]:
    """Return the variables of a launch of these assets."""
    selection = [{"path": asset.split("/")} for asset in assets]
    return {"params": {"selector": JOB | {"assetSelection": selection}, **params}}


@pytest.mark.parametrize(
    "query",
    [
        "{ version }",
        "query A { version } query B { version }",
        "query { __schema { types { name } } }",
        "subscription { pipelineRunLogs(runId: 1) { __typename } }",
        "query ($id: ID!) { runOrError(runId: $id) { ...F } } fragment F on Run { id }",
    ],
)
def test_every_role_may_read(query: str) -> None:
    assert [answer(caller, query) for caller in (VIEWER, RESEARCHER, ADMIN)] == [None] * 3


@pytest.mark.parametrize(
    "query",
    [
        'mutation { terminateRun(runId: "1") { __typename } }',
        'mutation { innocent: terminateRun(runId: "1") { __typename } }',
        'mutation { ...F } fragment F on Mutation { terminateRun(runId: "1") { __typename } }',
        'mutation { ...F } fragment F on Mutation { ...G } fragment G on Mutation { x: terminateRun(runId: "1") ...F }',
        'mutation { ... on Mutation { terminateRun(runId: "1") { __typename } } }',
        'mutation M { __typename terminateRun(runId: "1") @skip(if: true) { __typename } }',
    ],
)
def test_mutation_is_found_behind_aliases_and_fragments(query: str) -> None:
    assert "does not include jobs:cancel" in str(answer(VIEWER, query))
    assert answer(RESEARCHER, query) is None and answer(ADMIN, query) is None
    [mutation] = read_request({"query": query}).mutations
    assert (mutation.name, mutation.arguments) == ("terminateRun", {"runId": "1"})


@pytest.mark.parametrize("name", ["read", "write", None])
def test_mutation_among_other_operations_is_refused_whichever_is_selected(name: str | None) -> None:
    query = 'query read { version } mutation write { terminateRun(runId: "1") { __typename } }'
    for caller in (VIEWER, RESEARCHER, ADMIN):
        assert "its own document" in str(answer(caller, query, operationName=name))


def test_mutation_is_refused_where_only_reads_are_expected() -> None:
    assert "by POST" in str(answer(ADMIN, "mutation { reloadWorkspace { __typename } }", allows_mutations=False))
    assert answer(VIEWER, "{ version }", allows_mutations=False) is None


def test_roles_for_each_mutation_of_the_installed_dagster() -> None:
    mutations = set(create_schema().graphql_schema.mutation_type.fields)
    assert MUTATIONS.keys() <= mutations, "a mutation that Dagster no longer has"
    for name in mutations | {"inventedByTheNextRelease"}:
        query = f"mutation {{ {name} }}"
        assert answer(VIEWER, query), name
        assert (answer(RESEARCHER, query) is None) == (name in MUTATIONS), name
        assert answer(ADMIN, query) is None, name


def test_every_mutation_of_a_request_needs_a_permission() -> None:
    query = 'mutation { a: terminateRun(runId: "1") { __typename } b: deleteRun(runId: "1") { __typename } }'
    assert "does not include deleteRun" in str(answer(RESEARCHER, query))


def test_researcher_launches_selected_assets_but_does_not_promote() -> None:
    assert answer(RESEARCHER, LAUNCH, variables=launch("models/a/checkpoint")) is None
    assert "jobs:submit" in str(answer(VIEWER, LAUNCH, variables=launch("models/a/checkpoint")))
    promoted = launch("models/a/checkpoint", "models/a/promotion")
    assert "models:promote, which materializing models/a/promotion needs" in str(
        answer(RESEARCHER, LAUNCH, variables=promoted)
    )
    assert answer(ADMIN, LAUNCH, variables=promoted) is None


def test_launch_without_asset_selection_is_refused_because_it_would_promote() -> None:
    for variables in (launch(), {"params": {"selector": JOB}}, {"params": {"selector": JOB | {"assetSelection": None}}}):
        assert "Select the assets" in str(answer(RESEARCHER, LAUNCH, variables=variables))
    checks = launch() | {}
    checks["params"]["selector"]["assetCheckSelection"] = [{"assetKey": {"path": ["a"]}, "name": "quality"}]
    assert answer(RESEARCHER, LAUNCH, variables=checks) is None


@pytest.mark.parametrize(
    "backfill",
    [
        {"assetSelection": [{"path": ["models", "a", "promotion"]}], "partitionNames": ["1"]},
        {"partitionsByAssets": [{"assetKey": {"path": ["models", "a", "promotion"]}}]},
        {"assetSelection": {"path": ["models", "a", "promotion"]}},
        {"selector": {"partitionSetName": "all"}, "partitionNames": ["1"]},
        {"selector": {"partitionSetName": "all"}, "assetSelection": [{"path": ["models", "a", "checkpoint"]}]},
        {"assetSelection": [{"path": "promotion"}]},
    ],
)
def test_backfill_that_promotes_is_refused_to_researcher(backfill: dict[str, Any]) -> None:
    query = "mutation M($b: LaunchBackfillParams!) { launchPartitionBackfill(backfillParams: $b) { __typename } }"
    assert answer(RESEARCHER, query, variables={"b": backfill})
    harmless = {"assetSelection": [{"path": ["models", "a", "checkpoint"]}], "partitionNames": ["1"]}
    assert answer(RESEARCHER, query, variables={"b": harmless}) is None


def test_promotion_is_detected_in_literals_defaults_and_json_strings() -> None:
    literal = 'mutation { launchRun(executionParams: {selector: {assetSelection: [{path: ["a", "promotion"]}]}}) { id } }'
    default = (
        'mutation ($p: ExecutionParams = {selector: {assetSelection: [{path: ["a", "promotion"]}]}})'
        " { launchRun(executionParams: $p) { id } }"
    )
    variables = '{"params": {"selector": {"assetSelection": [{"path": ["a", "promotion"]}]}}}'
    assert "models:promote" in str(answer(RESEARCHER, literal))
    assert "models:promote" in str(answer(RESEARCHER, default))
    assert "models:promote" in str(answer(RESEARCHER, LAUNCH, variables=variables))


def test_researcher_cannot_set_pod_config_or_another_organization_by_run_tags() -> None:
    for tag, allowed in (
        ({"key": "dagster-k8s/config", "value": "{}"}, False),
        ({"key": "hanzo_ml/organization", "value": "rival"}, False),
        ({"key": "hanzo_ml/organization", "value": "acme"}, True),
        ({"key": "dagster/partition", "value": "1"}, True),
    ):
        variables = launch("models/a/checkpoint", executionMetadata={"tags": [tag]})
        assert (answer(RESEARCHER, LAUNCH, variables=variables) is None) == allowed, tag
        assert answer(ADMIN, LAUNCH, variables=variables) is None


def test_researcher_ends_own_runs_and_those_of_the_ui() -> None:
    request = read_request({"query": 'mutation { terminateRuns(runIds: ["own", "ui", "unknown"]) { __typename } }'})
    runs = {
        "own": DagsterRun((), ("job 1",)),
        "ui": DagsterRun((), ("job 2", "dataset")),
        "other": DagsterRun((), ("job 3",)),
    }
    users = {"job 1": "researcher", "job 2": "dagster", "job 3": "somebody else"}
    assert run_refusal(RESEARCHER, request, runs, users) is None
    other = read_request({"query": 'mutation { terminateRun(runId: "other") { __typename } }'})
    assert "another user's" in str(run_refusal(RESEARCHER, other, runs, users))
    assert run_refusal(ADMIN, other, runs, users) is None


def test_reexecution_of_a_promoting_run_needs_promote_permission() -> None:
    query = "mutation M($r: ReexecutionParams) { launchRunReexecution(reexecutionParams: $r) { __typename } }"
    request = read_request({"query": query, "variables": {"r": {"parentRunId": "1", "strategy": "ALL_STEPS"}}})
    assert refusal(RESEARCHER, request) is None
    assert "models:promote" in str(run_refusal(RESEARCHER, request, {"1": DagsterRun(("models/a/promotion",), ())}, {}))
    assert run_refusal(RESEARCHER, request, {"1": DagsterRun(("models/a/checkpoint",), ())}, {}) is None


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([{"query": "{ version }"}], "one GraphQL request at a time"),
        ("text", "must be a JSON object"),
        ({}, "stored queries are not supported"),
        ({"extensions": {"persistedQuery": {"sha256Hash": "0"}}}, "stored queries are not supported"),
        ({"query": {"a": 1}}, "stored queries are not supported"),
        ({"query": "{ version }", "operationName": 1}, "operationName"),
        ({"query": "{ version }", "variables": [1]}, "variables"),
        ({"query": "{ version }", "variables": "{"}, "variables"),
        ({"query": "mutation {"}, "cannot be parsed"),
        ({"query": "fragment F on Mutation { deleteRun }"}, "no operation"),
        ({"query": "{ " + "a " * 30_000 + "}"}, "cannot be parsed"),
        ({"query": "{a" * 20_000}, "cannot be parsed"),
        ({"query": "#" * (MAX_DOCUMENT_CHARACTERS + 1)}, "too long"),
    ],
)
def test_unreadable_request_is_refused(document: Any, words: str) -> None:
    with pytest.raises(HanzoError, match=words):
        read_request(document)


def test_only_parsed_graphql_fields_are_forwarded_to_dagster() -> None:
    given = {"query": "{ version }", "variables": '{"a": 1}', "operationName": None, "extensions": {"x": 1}, "id": 5}
    assert read_request(given).content == {"query": "{ version }", "variables": {"a": 1}, "operationName": None}
