"""Modules that a run loads of the code location, and those that it does not."""

import subprocess
import sys
from pathlib import Path

from hanzo_ml_assets.definitions import definitions

ROOT = Path(__file__).parents[2]
AS_A_RUN_DOES = """
import sys
from dagster._core.definitions.reconstruct import ReconstructableRepository

repository = ReconstructableRepository.for_module("hanzo_ml_assets.definitions", "definitions")
keys = repository.get_definition().asset_graph.get_all_asset_keys()
print("dagster_aws" in sys.modules, sorted(key.to_user_string() for key in keys))
"""


def test_run_process_loads_all_assets_without_importing_component_description_libraries() -> None:
    run = subprocess.run([sys.executable, "-c", AS_A_RUN_DOES], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    keys = definitions().get_repository_def().asset_graph.get_all_asset_keys()
    assert {"datasets/sandbox/version", "models/sandbox/deployment"} <= {key.to_user_string() for key in keys}
    assert run.stdout.splitlines()[-1] == f"False {sorted(key.to_user_string() for key in keys)}"
