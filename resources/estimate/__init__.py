"""Estimate what a job needs before it is launched: memory, tokens, hours, dollars."""
