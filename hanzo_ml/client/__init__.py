"""The client library that training scripts import; it loads neither mlflow nor httpx until a run starts."""
