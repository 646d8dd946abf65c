"""The OpenAPI document: what FastAPI finds out by itself of requests, and what is told here of answers."""
