"""Kept for `python -m resources.daemon`: see `resources.orchestration.daemon`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("resources.orchestration.daemon", run_name="__main__", alter_sys=True)
