"""The local inference engine: a gateway that serves registered models over OpenAI's API, and its client.

`gateway` is the long-lived process; each model answers in a `backend` process of its own (llama.cpp through xllamacpp).
The rest of the product uses `client` and the types in `types`, and never starts a backend itself.
"""
