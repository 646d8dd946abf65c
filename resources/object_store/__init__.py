"""The object store as the control plane uses it: chunk claims, chunk upload, health."""
