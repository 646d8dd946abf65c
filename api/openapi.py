"""The OpenAPI document: FastAPI describes requests, the declarations of routes describe responses.

It is completed on the first request for it, so that it delays no start. The response type is the endpoint's return type: a
TypedDict of `api.schemas`, or a dataclass or Pydantic model of `resources`.
"""

import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from pydantic import TypeAdapter
from pydantic.json_schema import CoreModeRef, CoreRef, DefsRef, GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from api.json_bodies import TypedResponse
from api.routing import Declaration, find_declaration

JSON = "application/json"
REFERENCE = "#/components/schemas/"
SCHEMA_NAMES = {
    "recipes.planning.memory_budget.MemoryBudget": "MemoryParts",
    "recipes.contracts.job.Hardware": "TrialResources",
    "recipes.planning.throughput.Range": "Bounds",
    "recipes.contracts.validation_results.Drift": "DatasetDrift",
    "recipes.contracts.validation_results.Violation": "BrokenRule",
    "recipes.contracts.validation_results.Violations": "BrokenRules",
    "resources.datasets.diff.Diff": "DatasetDiff",
    "resources.datasets.diff.VersionStatistics": "DiffedVersion",
    "resources.estimate.job_estimate.DatasetTokens": "TokenCount",
    "resources.hpo.sweep_config.EarlyStopping": "SweepEarlyStopping",
    "resources.hpo.sweep_config.Halving": "SweepHalving",
    "resources.hpo.sweep_config.Objective": "SweepObjective",
    "resources.hpo.sweep_config.Population": "SweepPopulation",
    "resources.hpo.sweep_config.SweepConfig": "SweepConfiguration",
    "resources.hpo.search_space.Choice": "SearchedChoice",
    "resources.hpo.search_space.LogUniform": "SearchedLogUniform",
    "resources.hpo.search_space.Uniform": "SearchedUniform",
    "resources.lineage.dataset_lineage.LinkedArtifact": "LineageNode",
    "resources.lineage.record_search.Matches": "RecordMatches",
    "resources.lineage.trace.Trace": "RecordTrace",
    "resources.lineage.training_data.DataUse": "UsedDataset",
    "resources.lineage.training_data.LoggedDataset": "NamedDataset",
    "resources.replay.comparison.Difference": "EnvironmentDifference",
    "resources.replay.comparison.Unrepeated": "UnrepeatedIncident",
    "resources.replay.verdict.Verdict": "ReplayVerdict",
    "resources.datasets.check_verdicts.Verdict": "CheckVerdict",
}
"""Public names of types that are named differently in the code: generated clients use them, so they survive renaming."""
REQUEST_SCHEMA_NAMES = {
    "Bounds": "ColumnBounds",  # of a numeric column: the bounds of an estimate were published as Bounds first
    "api__routes__mlflow__logged_models__Pair": "api__mlflow__logged_models__Pair",
    "api__routes__mlflow__run_logging__Pair": "api__mlflow__metrics__Pair",
}
"""FastAPI's names of request types -> their public names."""


class DescribedApplication(FastAPI):
    """An application whose OpenAPI document includes the types and media types of responses."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            complete_document(self, super().openapi())
        return self.openapi_schema or {}


def complete_document(app: FastAPI, document: dict[str, Any]) -> None:
    """Add the responses of every route to FastAPI's document, in place."""
    rename_request_schemas(document)
    described = list(described_routes(app, document))
    types = [kind for _, kinds, _ in described for kind in kinds]
    schemas, components = build_schemas([*types, *(declared.also.type for _, _, declared in described if declared.also)])
    document["components"]["schemas"] |= components
    for responses, kinds, declared in described:
        describe_responses(responses, kinds, declared, schemas)


def described_routes(
    app: FastAPI, document: dict[str, Any]
) -> Iterator[tuple[dict[str, Any], tuple[Any, ...], Declaration]]:
    """Yield the responses, JSON types and declaration of each route in the document."""
    for context in iter_route_contexts(app.routes):
        declared = find_declaration(app, context)
        operations = document["paths"].get(without_convertors(str(context.path)), {})
        for method in context.methods or ():
            if declared is not None and method.lower() in operations:
                responses = operations[method.lower()]["responses"]
                yield responses, response_types(context.original_route, declared), declared


def without_convertors(template: str) -> str:
    """Convert `/{path:path}` to `/{path}`, as in the document."""
    return re.sub(r"\{(\w+):\w+\}", r"{\1}", template)


def response_types(route: Any, declared: Declaration) -> tuple[Any, ...]:
    """Return the JSON types that an endpoint is annotated to return."""
    if declared.response is not None:
        return tuple(map(import_type, declared.response.split(" | ")))
    returned = get_type_hints(route.endpoint).get("return")
    for each in get_args(returned) if is_union(returned) else (returned,):
        if get_origin(each) is TypedResponse:
            [kind] = get_args(each)
            return get_args(kind) if is_union(kind) else (kind,)
    return ()


def is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, UnionType)


def import_type(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def describe_responses(
    responses: dict[str, Any], kinds: tuple[Any, ...], declared: Declaration, schemas: dict[Any, dict[str, Any]]
) -> None:
    """Complete the responses of one route."""
    for status in ("4XX", "5XX"):  # JSON, for any media type of the route
        [described] = responses[status]["content"].values()
        responses[status]["content"] = {JSON: described}
    success = next((status for status in responses if status.startswith("2")), "200")
    if kinds:
        forms = [schemas[kind] for kind in kinds]
        responses[success]["content"] = {JSON: {"schema": forms[0] if len(forms) == 1 else {"anyOf": forms}}}
    if (also := declared.also) is not None:
        content = {JSON: {"schema": schemas[also.type]}}
        responses[str(also.status)] = {"description": also.description, "content": content}
    if declared.produces is not None:
        responses[success]["content"] = {declared.produces: {}}
    if declared.ranges:
        responses["206"] = {"description": "the requested range", "content": {declared.produces: {}}}
        responses["416"] = {"description": "the requested range is outside of the content"}


def build_schemas(types: list[Any]) -> tuple[dict[Any, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Build the schema of each type, and the components that these refer to, by name."""
    inputs = [(kind, "serialization", TypeAdapter(kind)) for kind in dict.fromkeys(types)]
    schemas, components = TypeAdapter.json_schemas(
        inputs,  # type: ignore[arg-type]  # a Literal of a list's element
        ref_template=f"{REFERENCE}{{model}}",
        schema_generator=ResponseSchemas,
    )
    found = components.get("$defs", {})
    values = {REFERENCE + name: schema for name, schema in found.items() if schema.get("type") != "object"}
    replace_references(found, values)
    return (
        {kind: schema for (kind, _), schema in schemas.items()},
        {name: schema for name, schema in found.items() if REFERENCE + name not in values},
    )


def rename_request_schemas(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for name, public in REQUEST_SCHEMA_NAMES.items():
        schemas[public] = schemas.pop(name)
    names = {REFERENCE + name: {"$ref": REFERENCE + public} for name, public in REQUEST_SCHEMA_NAMES.items()}
    replace_references(document, names)


def replace_references(part: Any, schemas: Mapping[str, Any]) -> None:
    """Replace references by schemas, in place."""
    if isinstance(part, dict):
        if (schema := schemas.get(part.get("$ref", ""))) is not None:
            del part["$ref"]
            part.update({name: value for name, value in schema.items() if name not in ("title", "description")})
        for each in part.values():
            replace_references(each, schemas)
    elif isinstance(part, list):
        for each in part:
            replace_references(each, schemas)


EMPTY: dict[Any, Any] = {"string": "", "integer": 0, "array": [], "object": {}}


class ResponseSchemas(GenerateJsonSchema):
    """Generates response schemas: every field is required, no others exist, none has a default."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._published: dict[str, str] = {}

    def get_defs_ref(self, core_mode_ref: CoreModeRef) -> DefsRef:
        qualified = core_mode_ref[0].partition(":")[0]
        name = SCHEMA_NAMES.get(qualified, qualified.rpartition(".")[2])
        if self._published.setdefault(name, qualified) != qualified:
            raise ValueError(f"{qualified} and {self._published[name]} are both published as {name}: see SCHEMA_NAMES")
        return super().get_defs_ref((CoreRef(f"{name}:0"), core_mode_ref[1]))

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def field_is_required(self, field: Any, total: bool) -> bool:
        return bool(field.get("required", total)) if field["type"] == "typed-dict-field" else True

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def typed_dict_schema(self, schema: core_schema.TypedDictSchema) -> JsonSchemaValue:
        return closed_object(super().typed_dict_schema(schema), schema.get("cls"))

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> JsonSchemaValue:
        return closed_object(super().dataclass_schema(schema), schema["cls"])

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        return closed_object(super().model_schema(schema), schema["cls"])

    def typed_dict_field_schema(self, schema: core_schema.TypedDictField) -> JsonSchemaValue:
        """Default an optional field to its empty value, as in protobuf's JSON."""
        found = super().typed_dict_field_schema(schema)
        kind = found.get("type")
        return found if schema.get("required", True) or kind not in EMPTY else {**found, "default": EMPTY[kind]}

    def literal_schema(self, schema: core_schema.LiteralSchema) -> JsonSchemaValue:
        return {"enum": schema["expected"]}

    def json_schema(self, schema: core_schema.JsonSchema) -> JsonSchemaValue:
        return {}

    def enum_schema(self, schema: core_schema.EnumSchema) -> JsonSchemaValue:
        return {"enum": [member.value for member in schema["members"]]}


def closed_object(schema: JsonSchemaValue, kind: type | None) -> JsonSchemaValue:
    """Close an object schema to additional fields, and title it with its public name."""
    if kind is None:
        return schema
    title = SCHEMA_NAMES.get(f"{kind.__module__}.{kind.__qualname__}", kind.__name__)
    return {**schema, "title": title, "additionalProperties": False}
