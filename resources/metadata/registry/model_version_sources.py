"""Check a model version's source: which URIs are allowed and what they refer to.

A source is checked before a version is created. The reference only checks its form and registers `s3://b/x` unseen; here

- `mlflow-artifacts:/EXPERIMENT/RUN/artifacts/PATH` (or below the experiment's `artifact_location`) must hold files, in the
  run named by `run_id`; the same path of a logged model must belong to the one named by `model_id`. A run's root is accepted
  from the start: scripts, and MLflow's own tests, register it before they log the model into it;
- a path below the files of the named run or logged model is accepted if its experiment stores them outside of this server's
  store (`artifacts.locations`): only clients access it, this server never reads or serves it;
- `s3://hanzo-ml/...` and `s3://hanzo-models/...` must hold files in this server's store, not below another organization's
  run or model;
- `models:/NAME/VERSION` (or @ALIAS, /STAGE, /latest) must be an existing version, `models:/m-ID` the logged model named by
  `model_id`. A version made from another is stored as `models:/NAME/NUMBER`, with its run and its model. A quarantined
  version is refused;
- `runs:/RUN/PATH` must hold files, `run_id` must name RUN, and the run must be known to this server; the files are its own,
  or those of the logged model of that name that it created (`find_logged_model`). The output of the run's job is registered
  by its job, with its evaluation and its provenance. **A run unknown to this server is accepted**: MLflow allows registry
  and tracking to be two servers, so it may belong to another server. It is a name, not an address: nothing is ever read or
  served for it, and MLflow's own tests and scripts register such names; refusing them would break clients without
  protecting anything;
- everything else is refused: local paths and file: (this server's or the client's disk), http(s) and other hosts (a reader
  could be made to fetch them), `..`, `#`, `?`, `%`, backslashes and empty parts (CVE-2023-2356, 2023-6977, 2024-1483,
  2024-3848, 2025-11201, 2026-2614);
- a prompt has no files: only MLflow's two placeholders are accepted.
"""

import re
from dataclasses import dataclass

from sqlalchemy import Connection, select

from recipes.storage import uris
from recipes.storage.artifact_store import Store
from resources.errors import HanzoError, invalid
from resources.metadata.artifacts.locations import find_files_owner, is_proxied
from resources.metadata.field_rules import checked_text, printable
from resources.metadata.registry.model_names import (
    LATEST_ALIAS,
    ModelKey,
    folder_organization,
    is_prompt,
    model_not_found,
    version_not_found,
)
from resources.metadata.registry.model_versions import ModelVersion, find_version
from resources.metadata.registry.source_uris import (
    LOGGED_MODEL_PATTERN,
    find_logged_model,
    has_files,
    parse_source,
    source_error,
    unquote_fully,
)
from resources.metadata.registry.stage_rules import check_usable
from resources.metadata.tables import experiments, logged_models, runs
from resources.metadata.tables import model_aliases as aliases
from resources.metadata.tables import model_versions as versions
from resources.metadata.tables import registered_models as models

PROMPT_PLACEHOLDERS = ("dummy-source", "prompt-template")
MAX_SOURCE = 2000


@dataclass(frozen=True)
class CheckedSource:
    """A valid source, with the run and the logged model that it belongs to."""

    source: str
    run_id: str | None
    model_id: str | None


def check_source(
    connection: Connection,
    store: Store,
    source: str,
    organization: str,
    *,
    run_id: str = "",
    model_id: str = "",
    as_mlflow: bool = True,
) -> CheckedSource:
    """Check a client's source and resolve the run or model that it belongs to.

    `as_mlflow` also accepts what this server cannot inspect: runs of another tracking server, and the root of a run that
    has no files yet.

    Raises:
        HanzoError: 400 if it is malformed, refused, absent, or not of the run or model that the request names; 409 if it
            is a quarantined version.
    """
    if len(source) > MAX_SOURCE:
        raise invalid(f"'source' exceeds the maximum length of {MAX_SOURCE} characters")
    checked_text(source, "source")
    if is_client_storage(connection, source, organization, run_id, model_id):
        return CheckedSource(source, run_id or None, model_id or None)
    scheme, parts = parse_source(source)
    if scheme == "models" and not LOGGED_MODEL_PATTERN.fullmatch("/".join(parts)):
        original = resolve_reference(connection, source, parts, organization)
        if is_prompt(original.tags):
            raise source_error(source, "Prompt versions cannot be used as model version sources.")
        check_usable(original)
        if run_id not in ("", original.run_id or "") or model_id not in ("", original.model_id or ""):
            raise source_error(source, "The run_id and model_id request parameters must match the referenced model version.")
        return CheckedSource(f"models:/{original.name}/{original.version}", original.run_id, original.model_id)
    if model_id:
        root = logged_model_root(connection, model_id, organization)
        if root is None or not is_within_model(scheme, parts, source, model_id, root.artifact_uri):
            raise wrong_owner_error(source, "model_id")
        return CheckedSource(source, run_id or root.source_run_id or None, model_id)
    if scheme == "models":
        raise wrong_owner_error(source, "model_id")
    if scheme == "s3":
        check_stored(connection, store, source, parts, organization)
        return CheckedSource(source, run_id or None, None)
    return check_run_source(connection, store, source, scheme, parts, organization, run_id, as_mlflow)


def resolve_reference(connection: Connection, source: str, parts: list[str], organization: str) -> ModelVersion:
    """Return the version that `models:/NAME/VERSION`, `/STAGE`, `/latest` or `@ALIAS` refers to now."""
    name, at, alias = parts[0].rpartition("@") if len(parts) == 1 else (parts[0], "", "")
    if len(parts) != (1 if at else 2) or not name:
        raise wrong_owner_error(source, "model_id")
    model = ModelKey(organization, name)
    if connection.execute(select(models.c.name).where(model.row_filter(models))).first() is None:
        raise model_not_found(name)
    own_versions = model.row_filter(versions)
    if at:
        pointed = select(aliases.c.version).where(model.row_filter(aliases), aliases.c.alias == alias)
        found = find_version(connection, own_versions, versions.c.version.in_(pointed))
        if found is None:
            raise invalid(f"Registered model alias {printable(alias)} not found.")
        return found
    wanted = parts[1]
    if re.fullmatch(r"\d{1,9}", wanted, re.ASCII):
        found = find_version(connection, own_versions, versions.c.version == int(wanted))
        if found is None:
            raise version_not_found(name, int(wanted))
        return found
    stage = [] if wanted.lower() == LATEST_ALIAS else [versions.c.stage == wanted.lower()]
    found = find_version(connection, own_versions, *stage)
    if found is None:
        raise source_error(source, f"Model '{printable(name)}' has no version there.")
    return found


@dataclass(frozen=True)
class LoggedModelRoot:
    artifact_uri: str
    source_run_id: str | None


def logged_model_root(connection: Connection, model_id: str, organization: str) -> LoggedModelRoot | None:
    query = (
        select(logged_models.c.artifact_uri, logged_models.c.source_run_id)
        .join(experiments, experiments.c.id == logged_models.c.experiment_id)
        .where(
            logged_models.c.id == checked_text(model_id, "model_id"),
            logged_models.c.lifecycle_stage == "active",
            experiments.c.organization == organization,
        )
    )
    row = connection.execute(query).first()
    return LoggedModelRoot(row.artifact_uri, row.source_run_id) if row else None


def is_client_storage(connection: Connection, source: str, organization: str, run_id: str, model_id: str) -> bool:
    """Return whether a source is the named owner's, outside of this server's store."""
    if ".." in unquote_fully(source).split("/"):
        return False
    if model_id:
        root = logged_model_root(connection, model_id, organization)
        place = root.artifact_uri if root else ""
    else:
        query = select(runs.c.artifact_uri).where(runs.c.id == run_id, runs.c.organization == organization)
        place = connection.execute(query).scalar() or ""
    return bool(place) and not is_proxied(place) and (source == place or source.startswith(f"{place}/"))


def is_within_model(scheme: str, parts: list[str], source: str, model_id: str, root: str) -> bool:
    """Return whether a source is a logged model, by id or by path."""
    if scheme == "models":
        return parts == [model_id]
    return source == root or source.startswith(f"{root}/")


def check_run_source(
    connection: Connection,
    store: Store,
    source: str,
    scheme: str,
    parts: list[str],
    organization: str,
    run_id: str,
    as_mlflow: bool,
) -> CheckedSource:
    """Check a source below a run.

    It must be the run that the request names, and the run, or a model of it, must have files there.
    """
    if scheme == "runs":
        named, path = parts[0], parts[1:]
    else:
        owner = find_files_owner(connection, "/".join(parts))
        if owner is None or owner.is_model:
            raise wrong_owner_error(source, "run_id")
        named, path = owner.id, owner.path.split("/") if owner.path else []
    if not run_id or named != run_id:
        raise wrong_owner_error(source, "run_id")
    run = connection.execute(select(runs.c.artifact_uri, runs.c.organization).where(runs.c.id == named)).first()
    if run is None and scheme == "runs" and as_mlflow:
        return CheckedSource(source, named, None)
    if run is None or run.organization != organization:
        raise wrong_owner_error(source, "run_id")
    if as_mlflow and not path:
        return CheckedSource(source, named, None)
    if not is_proxied(run.artifact_uri) or has_files(store, uris.run_artifacts(named, *path)):
        return CheckedSource(source, named, None)
    model = find_logged_model(connection, store, named, path) if scheme == "runs" else None
    if model is None and is_job_output(store, named, path):
        raise source_error(
            source,
            f"The run's job created it: register it with `hanzo-ml model register --name NAME --run {named}`.",
        )
    if model is None:
        raise missing_source_error(source)
    return CheckedSource(source, named, model)


def is_job_output(store: Store, run_id: str, path: list[str]) -> bool:
    """Return whether a path among a run's files was published by its job."""
    if path[:1] == ["artifacts"]:  # the folder of uploaded files
        return False
    published = uris.run_checkpoints(run_id) if path[:1] == ["checkpoint"] else "/".join([uris.run_folder(run_id), *path])
    return has_files(store, published)


def check_stored(connection: Connection, store: Store, source: str, parts: list[str], organization: str) -> None:
    """Raise unless the organization may read files at the source."""
    owner_organization = None
    if parts[:2] == [uris.PRODUCT_BUCKET, "runs"] and len(parts) > 2:
        owner_organization = connection.execute(select(runs.c.organization).where(runs.c.id == parts[2])).scalar()
    elif parts[0] == uris.MODELS_BUCKET:
        owner_organization = folder_organization(parts[1:])
    if owner_organization not in (None, organization) or not has_files(store, source.rstrip("/")):
        raise missing_source_error(source)


def missing_source_error(source: str) -> HanzoError:
    return source_error(source, "There is nothing at that place in this server's store: upload it before it is registered.")


def wrong_owner_error(source: str, parameter: str) -> HanzoError:
    return source_error(source, f"The {parameter} request parameter must identify the resource that contains the source.")
