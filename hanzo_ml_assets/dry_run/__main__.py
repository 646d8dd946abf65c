"""`python -m hanzo_ml_assets.dry_run` reads the body of `POST /v1/jobs` from stdin: its source files may be long."""

import json
import os
import sys

from sqlalchemy.exc import SQLAlchemyError

from hanzo_ml_assets.dry_run import command, training
from recipes.contracts.job import BadConfiguration
from resources.errors import HanzoError


def main() -> None:
    """Print the objects, or exit with the one line that says why there are none."""
    # Else `git status`, asked for the run's record, would refresh the index of the checkout.
    os.environ["GIT_OPTIONAL_LOCKS"] = "0"
    document = json.load(sys.stdin)
    dry_run = command.dry_run if "command" in document else training.dry_run
    try:
        print(dry_run(document), end="")
    except (BadConfiguration, HanzoError) as problem:
        sys.exit(f"error: {problem}")
    except SQLAlchemyError as problem:
        sys.exit(f"error: the metadata database can't be read ({type(problem).__name__}): start it, or run `hanzo-ml up`")


if __name__ == "__main__":
    main()
