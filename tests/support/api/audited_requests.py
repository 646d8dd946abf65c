"""A request of a user, as the audit log records it."""

from fastapi import FastAPI
from fastapi.testclient import TestClient


def asking(app: FastAPI) -> TestClient:
    return TestClient(app, base_url="http://127.0.0.1", client=("127.0.0.1", 50000), raise_server_exceptions=False)
