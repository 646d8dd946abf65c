"""What everything else talks to, each with an embedded default and a production implementation.

Plain Python without Dagster, except `resources.compute`, and never torch: the control plane loads no model.
"""
