"""Dependencies of endpoints: the objects of the application, and the caller.

All are `async` though none waits: FastAPI runs plain functions in a thread each, which costs more than their work.
"""

from typing import Annotated

from fastapi import Depends, Request

from api.artifacts.locations import ArtifactLocations
from api.artifacts.run_artifacts import RunArtifacts
from api.artifacts.verified_files import VerifiedFiles
from api.auth.local_peer import is_own_user
from api.auth.permissions import Caller
from recipes.storage.artifact_store import Store
from recipes.storage.signed_urls import SignedTransfers
from resources.compute.base import Compute
from resources.metadata.database import Database
from resources.metadata.tracking.tracking import Tracking
from resources.object_store.program_scope import ProgramScopes
from resources.settings.settings import Settings


async def settings(request: Request) -> Settings:
    found: Settings = request.app.state.settings
    return found


async def database(request: Request) -> Database:
    found: Database = request.app.state.database
    return found


async def store(request: Request) -> Store:
    found: Store = request.app.state.store
    return found


async def compute(request: Request) -> Compute:
    found: Compute = request.app.state.compute
    return found


async def tracking(request: Request) -> Tracking:
    found: Tracking = request.app.state.tracking
    return found


async def run_artifacts(request: Request) -> RunArtifacts:
    found: RunArtifacts = request.app.state.run_artifacts
    return found


async def artifact_locations(request: Request) -> ArtifactLocations:
    found: ArtifactLocations = request.app.state.artifact_locations
    return found


async def signed_transfers(request: Request) -> SignedTransfers:
    found: SignedTransfers = request.app.state.signed_transfers
    return found


async def program_scopes(request: Request) -> ProgramScopes:
    found: ProgramScopes = request.app.state.program_scopes
    return found


async def verified_files(request: Request) -> VerifiedFiles:
    found: VerifiedFiles = request.app.state.verified_files
    return found


async def caller(request: Request) -> Caller:
    # Set by access control, also without sign-in. Without access control the call fails.
    found: Caller = request.state.caller
    return found


async def from_own_user(request: Request) -> bool:
    return is_own_user(request.scope)


SettingsDep = Annotated[Settings, Depends(settings)]
DatabaseDep = Annotated[Database, Depends(database)]
StoreDep = Annotated[Store, Depends(store)]
ComputeDep = Annotated[Compute, Depends(compute)]
TrackingDep = Annotated[Tracking, Depends(tracking)]
VerifiedFilesDep = Annotated[VerifiedFiles, Depends(verified_files)]
RunArtifactsDep = Annotated[RunArtifacts, Depends(run_artifacts)]
ArtifactLocationsDep = Annotated[ArtifactLocations, Depends(artifact_locations)]
ProgramScopesDep = Annotated[ProgramScopes, Depends(program_scopes)]
SignedTransfersDep = Annotated[SignedTransfers, Depends(signed_transfers)]
CallerDep = Annotated[Caller, Depends(caller)]
FromOwnUserDep = Annotated[bool, Depends(from_own_user)]
