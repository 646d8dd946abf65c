"""A code location for Dagster's web server: a model and an asset that promotes it."""

import dagster as dg


@dg.asset(key=["models", "tiny", "checkpoint"], group_name="models_tiny")
def checkpoint(context: dg.AssetExecutionContext) -> None:
    context.log.info("trained by the researcher's click")


@dg.asset(key=["models", "tiny", "promotion"], deps=[checkpoint], group_name="models_tiny")
def promotion() -> None:
    """Never launched here: only the selection counts."""


defs = dg.Definitions(assets=[checkpoint, promotion], executor=dg.in_process_executor)
