"""The specification's own API below /v1."""
