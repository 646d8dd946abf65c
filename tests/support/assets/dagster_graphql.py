"""Queries to Dagster's GraphQL API."""

from typing import Any

from tests.end_to_end.local_stack import LocalStack


def graphql(stack: LocalStack, query: str, **variables: Any) -> Any:
    body = {"query": query, "variables": variables}
    answer = stack.http.post(stack.url("HANZO_ML_DAGSTER_PORT") + "/graphql", json=body).json()
    assert "errors" not in answer, answer
    return answer["data"]
