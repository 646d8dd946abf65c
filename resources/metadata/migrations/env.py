"""Alembic runs this to migrate the connection that `Database.migrate` hands over."""

from alembic import context

from resources.metadata.tables import schema

context.configure(connection=context.config.attributes["connection"], target_metadata=schema, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
