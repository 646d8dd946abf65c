"""Pure decisions that several sensors share: retries, runs of jobs, definitions, quotas."""
