"""What an endpoint may ask for: the objects that the application holds, and who is calling."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from api.run_artifacts import RunArtifacts
from recipes.store import Store
from resources.metadata.database import Database
from resources.metadata.experiments import DEFAULT_ORGANIZATION
from resources.metadata.tracking import Tracking
from resources.settings import Settings


@dataclass(frozen=True)
class Caller:
    """Who is calling. Loopback has no sign-in: everybody there is the same user of the one organization."""

    user_id: str
    organization: str
    is_admin: bool


def settings(request: Request) -> Settings:
    found: Settings = request.app.state.settings
    return found


def database(request: Request) -> Database:
    found: Database = request.app.state.database
    return found


def store(request: Request) -> Store:
    found: Store = request.app.state.store
    return found


def tracking(request: Request) -> Tracking:
    found: Tracking = request.app.state.tracking
    return found


def run_artifacts(request: Request) -> RunArtifacts:
    found: RunArtifacts = request.app.state.run_artifacts
    return found


def caller() -> Caller:
    # Without bearer tokens there is nobody to tell apart: `api.server` refuses any address but loopback.
    return Caller(user_id="local", organization=DEFAULT_ORGANIZATION, is_admin=True)


SettingsOf = Annotated[Settings, Depends(settings)]
DatabaseOf = Annotated[Database, Depends(database)]
StoreOf = Annotated[Store, Depends(store)]
TrackingOf = Annotated[Tracking, Depends(tracking)]
RunArtifactsOf = Annotated[RunArtifacts, Depends(run_artifacts)]
CallerOf = Annotated[Caller, Depends(caller)]
