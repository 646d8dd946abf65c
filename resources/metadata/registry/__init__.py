"""The registry: registered models, their versions and stages, and which of them is served."""
