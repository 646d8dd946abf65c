"""`python -m hanzo_ml`: the same as `hanzo-ml`, where the environment is on no PATH."""

from hanzo_ml.cli import main

main()
