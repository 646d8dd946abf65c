"""The `hanzo-ml` command, and the same as `python -m hanzo_ml` where the environment is on no PATH."""

import sys

INTERRUPTED_EXIT_CODE = 130
"""What a shell says of a program that Ctrl-C ended."""


def main() -> None:
    """Run a command. Ctrl-C prints no traceback also in the second in which all commands are imported."""
    try:
        from hanzo_ml.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED_EXIT_CODE)


if __name__ == "__main__":
    main()
