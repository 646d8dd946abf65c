"""The asset graph: from YAML definitions, through components, to assets and checks.

One module per kind of asset. What decides is pure (`gate`, `jobs`); what touches the world goes through `ControlPlane`.
"""
