"""Import address that existing manifests start: `python -m resources.engine.gateway`; see `resources.serving`."""
