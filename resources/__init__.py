"""What everything else talks to, each with an embedded default and a production implementation.

Plain Python without Dagster, except `compute` and `orchestration`, and never torch: the control plane loads no model.
"""
