"""`hanzo-ml job submit --dry-run`: print a job's Kubernetes objects without submitting anything."""
