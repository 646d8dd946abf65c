"""`python -m hanzo_ml_assets.dry_run` reads a job and a note from stdin.

The job is the body of `POST /v1/jobs`, whose source files may be long. The note is printed in the output's header.
"""

import json
import os
import sys

from sqlalchemy.exc import SQLAlchemyError

from hanzo_ml_assets.dry_run import command, training
from recipes.contracts.job import BadConfiguration
from resources.errors import HanzoError


def main() -> None:
    """Print the objects, or exit with a one-line error."""
    # Otherwise `git status`, called for the run's record, would refresh the index of the checkout.
    os.environ["GIT_OPTIONAL_LOCKS"] = "0"
    asked = json.load(sys.stdin)
    dry_run = command.dry_run if "command" in asked["job"] else training.dry_run
    try:
        title, rest = dry_run(asked["job"]).split("\n", 1)
        print(title, f"# {asked['note']}", rest, sep="\n", end="")
    except (BadConfiguration, HanzoError) as problem:
        sys.exit(f"error: {problem}")
    except SQLAlchemyError as problem:
        sys.exit(f"error: the metadata database can't be read ({type(problem).__name__}): start it, or run `hanzo-ml up`")


if __name__ == "__main__":
    main()
