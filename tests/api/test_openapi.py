"""The server responds as its OpenAPI document says, or refuses the request.

Covers valid and invalid requests. `conformance` checks the responses of every test with an application.
"""

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from fastapi.testclient import TestClient
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import HealthCheck, Phase, given, settings
from mlflow.protos import databricks_pb2, mlflow_artifacts_pb2, model_registry_pb2, service_pb2
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from api.openapi import SCHEMA_NAMES
from tests.api.conformance import documented, named_schemas, operations_of
from tests.support.postgres_server import PostgresServer
from tests.support.server_process import ServerProcess

LEAKS = ("Traceback", "sqlalchemy", "sqlite", "psycopg", "SELECT ", "INSERT ", "/site-packages/")
NOT_OFFERED = 501
"""What the reference has only on some stores (multipart, presigned URLs) is declared, and gets this status."""
DECLARED = [status_code_conformance, content_type_conformance, response_schema_conformance]
SERVICES = (
    service_pb2.MlflowService,
    model_registry_pb2.ModelRegistryService,
    mlflow_artifacts_pb2.MlflowArtifactsService,
)


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    extra = {}
    if request.param == "postgresql":
        postgres: PostgresServer = request.getfixturevalue("postgres")
        extra = {"HANZO_ML_DATABASE_URL": postgres.url(postgres.create())}
    with ServerProcess(tmp_path_factory.mktemp("openapi"), extra) as process:
        yield process


@pytest.mark.slow
@pytest.mark.parametrize(
    ("server", "mode", "examples"),
    [
        ("sqlite", GenerationMode.POSITIVE, 4),
        ("postgresql", GenerationMode.NEGATIVE, 4),
        *(
            pytest.param(database, mode, 12, marks=pytest.mark.long)
            for database in ("sqlite", "postgresql")
            for mode in GenerationMode
        ),
    ],
    indirect=["server"],
)
def test_every_response_is_declared_and_no_request_causes_a_server_error(
    server: ServerProcess, mode: GenerationMode, examples: int
) -> None:
    described = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    # The page mirror has the same routes; following a log does not end.
    operations = [found.ok() for found in described.exclude(path_regex=r"^/ajax-api|/logs$").get_all_operations()]
    assert len(operations) > 100
    if mode.is_negative:  # any text fits into a path: without another parameter no request is invalid
        operations = [found for found in operations if list(found.query) or list(found.body)]
        assert len(operations) > 80
    for operation in operations:
        try_out(operation, mode, examples)


def try_out(operation: schemathesis.APIOperation, mode: GenerationMode, examples: int) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(mode))
    def check(case: schemathesis.Case) -> None:
        answer = case.call(timeout=30)
        sent = case.as_curl_command()
        assert answer.status_code < 500 or answer.status_code == NOT_OFFERED, (sent, answer.text)
        case.validate_response(answer, checks=DECLARED)
        if answer.status_code >= 400:
            error = answer.json()
            assert set(error) == {"error_code", "message"}, sent
            assert "\n" not in error["message"], sent
            assert not [leak for leak in LEAKS if leak in error["message"] and leak not in sent], (sent, error)

    check()


@pytest.fixture(scope="module")
def document(application_on_sqlite: Any) -> dict[str, Any]:
    client: TestClient = application_on_sqlite.client
    found: dict[str, Any] = client.get("/openapi.json").json()
    return found


def test_published_operation_and_schema_names_are_unchanged(document: dict[str, Any]) -> None:
    """Clients were generated from `published_names.json`: its names stay, also where the code renames things."""
    published = json.loads((Path(__file__).parent / "published_names.json").read_text())
    assert sorted(operation["operationId"] for operation in operations_of(document)) == published["operations"]
    assert sorted(document["components"]["schemas"]) == published["schemas"]


def test_public_schema_names_refer_to_existing_types() -> None:
    for name in SCHEMA_NAMES:
        module, _, attribute = name.rpartition(".")
        assert hasattr(import_module(module), attribute), name


def test_request_and_response_schemas_are_distinct_and_free_of_module_names(document: dict[str, Any]) -> None:
    operations = operations_of(document)
    requested = named_schemas(document, [operation.get("requestBody") for operation in operations])
    answered = named_schemas(document, [operation["responses"] for operation in operations])
    assert answered & requested == set(), "two types have one name"
    assert not [name for name in answered if "." in name or "_" in name], "two types have one name"
    assert answered | requested == set(document["components"]["schemas"])


def test_every_mlflow_response_has_a_schema(document: dict[str, Any]) -> None:
    undocumented = [
        (method, path)
        for path, operations in document["paths"].items()
        if path.startswith(("/api/2.0", "/api/3.0", "/ajax-api"))
        for method, operation in operations.items()
        for status, response in operation["responses"].items()
        for kind, content in response.get("content", {}).items()
        if status == "200" and kind == "application/json" and not content["schema"]
    ]
    assert undocumented == []


OWN = ("/v1/", "/alive", "/ready", "/health", "/version")
NOT_JSON = {
    "GET /health",
    "GET /version",
    "GET /v1/dataset-files",
    "GET /v1/datasets/{dataset_id}/preview",
    "GET /v1/datasets/{dataset_id}/report",
    "GET /v1/engine/files/{sha256}",
    "GET /v1/jobs/{job_id}/logs",
    "GET /v1/jobs/{job_id}/programs/{program}/objects/content",
    "POST /v1/traces",  # reports to MLflow's clients that there are no traces
}


def test_every_v1_response_has_a_schema(application_on_sqlite: Any, document: dict[str, Any]) -> None:
    """Checks the routes themselves: one that the document omits has no schema either."""
    routes = {(route.method, documented(route.template)) for route in application_on_sqlite.client.app.state.routes.all}
    undocumented = {f"{method} {path}" for method, path in routes if method != "HEAD" and path.startswith(OWN)}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            answers = [response["content"] for status, response in operation["responses"].items() if status.startswith("2")]
            if all(content.get("application/json", {}).get("schema") for content in answers):
                undocumented.discard(f"{method.upper()} {path}")
    assert undocumented == NOT_JSON


JSON_TYPES = {
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_INT32: "integer",
    FieldDescriptor.TYPE_INT64: "integer",
    FieldDescriptor.TYPE_DOUBLE: "number",
    FieldDescriptor.TYPE_BOOL: "boolean",
}


def test_message_schemas_match_mlflows_protobuf_definitions(document: dict[str, Any]) -> None:
    """By MLflow's own definitions: no other fields, each with their type."""
    seen = 0
    for service in SERVICES:
        for method in service.DESCRIPTOR.methods:
            for endpoint in method.GetOptions().Extensions[databricks_pb2.rpc].endpoints:
                path = endpoint.path.replace("<path:artifact_path>", "{artifact_path}")
                operation = document["paths"].get(f"/api/{endpoint.since.major}.0{path}", {}).get(endpoint.method.lower())
                schema = operation and operation["responses"].get("200", {}).get("content", {}).get(
                    "application/json", {}
                ).get("schema")
                if schema:
                    answer = next(found for found in method.input_type.nested_types if found.name == "Response")
                    check_message(document, schema, answer, f"{endpoint.method} {endpoint.path}")
                    seen += 1
    assert seen > 60


def check_message(document: dict[str, Any], schema: dict[str, Any], descriptor: Descriptor, where: str) -> None:
    definition = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    assert definition["additionalProperties"] is False, where
    for name, form in definition["properties"].items():
        field, at = descriptor.fields_by_name.get(name), f"{where}.{name}"
        assert field is not None, f"{at}: MLflow has no such field"
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        assert (form.get("type") == "array") is (field.is_repeated and not is_map), at
        one = form.get("items", form)
        if is_map:
            assert one["type"] == "object", at
        elif field.message_type is not None:
            check_message(document, one, field.message_type, at)
        elif field.enum_type is not None:
            assert set(one["enum"]) <= {value.name for value in field.enum_type.values}, at
        else:
            kinds = {kind.get("type", "string") for kind in one.get("anyOf", [one])}
            kind = JSON_TYPES[field.type]
            assert kind in kinds and kinds <= {kind, "string"}, at  # JSON has no NaN
