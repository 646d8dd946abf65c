"""The whole chain with real daemon, sensors, engine and API, on a tiny model."""
