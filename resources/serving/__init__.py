"""Local inference engine: a gateway for registered models with OpenAI's API, and its client.

`gateway` is the long-lived process; each model answers in a process of its own (`llama_server`, llama.cpp through
xllamacpp), started by `backend_process`. The rest of the product uses `client` and never starts a backend itself.
"""
