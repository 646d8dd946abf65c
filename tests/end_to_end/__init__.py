"""The whole chain, through the real daemon, sensors, engine and API, on a model that trains in seconds."""
