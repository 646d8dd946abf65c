"""The question that tests ask the demo's model."""

QUESTION = "Who keeps the lamp?"
