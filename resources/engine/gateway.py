"""Kept for `python -m resources.engine.gateway`: see `resources.serving.gateway`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("resources.serving.gateway", run_name="__main__", alter_sys=True)
