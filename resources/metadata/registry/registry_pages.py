"""What `/v1/models` lists, a page at a time: an organization's models by name, and a model's versions, newest first."""

from typing import Any

from sqlalchemy import select

from resources.metadata.database import Database
from resources.metadata.filters.pagination import Keyset, SortKey
from resources.metadata.registry.model_key import ModelKey
from resources.metadata.registry.model_versions import NEWEST_FIRST, ModelVersion, read_versions
from resources.metadata.registry.registered_model_rows import model_row
from resources.metadata.tables import model_versions as versions
from resources.metadata.tables import registered_model_tags as model_tags
from resources.metadata.tables import registered_models as models

MAX_PAGE = 1000


def models_page(
    database: Database, organization: str, *, limit: int = MAX_PAGE, page_token: str | None = None
) -> tuple[list[dict[str, Any]], str | None]:
    """Models with their tags, and where the next page begins."""
    order = Keyset([SortKey(models.c.name, True, str)], ("models", organization))
    query = select(models).where(models.c.organization == organization)
    with database.read() as connection:
        rows = connection.execute(order.page(query, limit, page_token)).all()
        columns = tuple(models.c.keys())
        listed: list[dict[str, Any]] = [dict(zip(columns, row, strict=False)) for row in rows[:limit]]
        tags: dict[str, dict[str, str]] = {model["name"]: {} for model in listed}
        theirs = (model_tags.c.organization == organization, model_tags.c.name.in_(tags))
        for tag in connection.execute(select(model_tags).where(*theirs).order_by(model_tags.c.key)):
            tags[tag.name][tag.key] = tag.value
    return [model | {"tags": tags[model["name"]]} for model in listed], order.next_token(rows, limit)


def versions_page(
    database: Database, model: ModelKey, *, limit: int = MAX_PAGE, page_token: str | None = None
) -> tuple[list[ModelVersion], str | None]:
    """Versions of a model, and where the next page begins. Raises HanzoError when there is no such model."""
    order = Keyset([SortKey(versions.c.version, False, int)], ("versions", model.organization, model.name))
    query = select(versions).where(model.of(versions))
    if position := order.position(page_token):
        query = query.where(versions.c.version < position[0])
    with database.read() as connection:
        model_row(connection, model)
        found = read_versions(connection, query.order_by(NEWEST_FIRST).limit(limit + 1))
    return found[:limit], order.next_token([(version.version,) for version in found], limit)
