"""The registry: registered models, their versions, stages and deployments."""
