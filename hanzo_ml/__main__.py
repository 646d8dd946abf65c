"""The `hanzo-ml` command, also as `python -m hanzo_ml` without a PATH entry."""

import sys

INTERRUPTED_EXIT_CODE = 130
"""Exit code of a program that Ctrl-C ended, as shells define it."""


def main() -> None:
    """Run a command. Ctrl-C prints no traceback, not even while commands are being imported."""
    try:
        from hanzo_ml.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED_EXIT_CODE)


if __name__ == "__main__":
    main()
