"""The object store client: URIs, manifests, chunking, signed URLs, retry. Without torch."""
