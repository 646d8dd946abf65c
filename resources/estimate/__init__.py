"""What a job will need before it is launched: memory, tokens, hours, dollars (row D2). No service of its own, no Dagster."""
