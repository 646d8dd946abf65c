"""`hanzo-ml job submit --dry-run`: a job's Kubernetes objects, without submitting, writing or running anything."""
