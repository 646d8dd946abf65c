"""The models that a run made, over MLflow's API: as logged models, and as older clients wrote them into a tag."""

import json
from typing import Any

from fastapi import APIRouter, Response

from api.dependencies import TrackingOf
from api.schemas.mlflow.messages import answer
from api.schemas.mlflow.requests import Message, OfRun, Required
from api.strict_json import StrictRoute
from resources.errors import invalid
from resources.metadata.tracking_rules import MAX_INT64

MANDATORY = frozenset({"artifact_path", "flavors", "utc_time_created", "run_id"})
KEPT = ("run_id", "utc_time_created", "artifact_path", "model_uuid")

router = APIRouter(prefix="/mlflow/runs", tags=["mlflow"], route_class=StrictRoute)


class ModelOutput(Message):
    model_id: Required
    step: int = 0


class LogOutputs(OfRun):
    models: tuple[ModelOutput, ...]


class LogModel(OfRun):
    model_json: Required


@router.post("/outputs")
def log_outputs(body: LogOutputs, tracking: TrackingOf) -> Response:
    for model in body.models:
        if not -MAX_INT64 - 1 <= model.step <= MAX_INT64:
            raise invalid("Invalid value for parameter 'step' supplied: it must be a 64-bit integer")
    tracking.logged_models.log_outputs(body.run_id, {model.model_id: model.step for model in body.models})
    return answer()


@router.post("/log-model")
def log_model(body: LogModel, tracking: TrackingOf) -> Response:
    tracking.model_history.append(body.run_id, history_entry(body.model_json))
    return answer()


def history_entry(model_json: str) -> dict[str, Any]:
    """What the history says of a model: `Model.get_tags_dict` of MLflow 3.17, so flavors without their configuration."""
    try:
        model = json.loads(model_json)
    except (ValueError, RecursionError):
        raise invalid("Malformed model info. model_json is not a valid JSON.") from None
    if not isinstance(model, dict) or not isinstance(model.get("flavors", {}), dict):
        raise invalid("Malformed model info. model_json must be an object, and so must be its flavors.")
    missing = sorted(MANDATORY - model.keys())
    if missing:
        raise invalid(f"Model json is missing mandatory fields: {', '.join(missing)}")
    flavors = {name: without_config(flavor) for name, flavor in model["flavors"].items()}
    return {**{name: model[name] for name in KEPT if name in model}, "flavors": flavors}


def without_config(flavor: Any) -> Any:
    return {name: value for name, value in flavor.items() if name != "config"} if isinstance(flavor, dict) else flavor
