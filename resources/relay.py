"""Kept for `python -m resources.relay`: see `resources.outbox_relay`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("resources.outbox_relay", run_name="__main__", alter_sys=True)
