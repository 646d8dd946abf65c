"""`python -m recipes.command JOB_FILE`."""

from recipes.command.program import command
from recipes.runner import main

if __name__ == "__main__":
    main(command)
