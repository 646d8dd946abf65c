"""The `hanzo-ml` command line: one module per noun, all speaking HTTP to the API."""

import sys

import httpx
import typer
from rich.console import Console

from hanzo_ml import demo
from hanzo_ml.cli import cluster, dataset, dataset_checks, hpo, job, lineage, local, model, recipe, run
from hanzo_ml.cli.connection import Refused, tracking_uri
from hanzo_ml.cli.output import adapt_streams, sanitize_text
from hanzo_ml.client.transport import InvalidToken

EXIT_REFUSED = 1
HELP = "Take raw data to a model that serves traffic. COMMAND --help shows the options of a command."

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=HELP)
dataset.app.command("trace")(lineage.trace)
model.app.command("data")(lineage.data)
dataset.app.command("check")(dataset_checks.check)
dataset.app.command("report")(dataset_checks.report)
app.add_typer(dataset.app, name="dataset")
app.add_typer(job.app, name="job")
job.app.command("estimate")(job.estimate)
app.add_typer(hpo.app, name="hpo")
app.add_typer(model.app, name="model")
app.add_typer(recipe.app, name="recipe")
app.add_typer(run.experiment_app, name="experiment")
app.add_typer(run.app, name="run")
run.app.command("replay")(run.replay)
app.add_typer(cluster.app, name="cluster")
app.add_typer(cluster.tenant, name="tenant")
app.add_typer(local.config, name="config")
app.add_typer(local.server, name="server")
app.command("up")(local.up)
app.command("down")(local.down)
app.command("status")(local.status)
app.command("demo")(demo.demo)


def main() -> None:
    """Run a command. A refusal is one line on standard error, with exit code 1."""
    adapt_streams()
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        app()
    except (Refused, InvalidToken) as refusal:
        errors.print(sanitize_text(f"error: {refusal}"), markup=False)
        sys.exit(EXIT_REFUSED)
    except OSError as error:  # a file that cannot be read, or a full disk
        errors.print(f"error: {error.filename or 'this machine'}: {error.strerror or error}", markup=False)
        sys.exit(EXIT_REFUSED)
    except httpx.ConnectError:
        errors.print(
            f"error: no server answers at {tracking_uri()}: start it with `hanzo-ml up`, or set HANZO_ML_TRACKING_URI",
            markup=False,
        )
        sys.exit(EXIT_REFUSED)
    except httpx.HTTPError as error:
        errors.print(f"error: the connection to {tracking_uri()} broke ({type(error).__name__}): try again", markup=False)
        sys.exit(EXIT_REFUSED)
