"""Object store client: URIs, manifests, chunking, signed URLs, retries. Free of torch."""
