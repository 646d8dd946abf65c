"""The asset graph: from YAML definitions, through components, to assets and checks.

One module per kind of asset. Decisions are pure (`gate`); everything outside is reached through `ControlPlane`.
"""
