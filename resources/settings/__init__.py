"""Settings: the sections of config.yaml and their environment variables."""
