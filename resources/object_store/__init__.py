"""The control plane's use of the object store: chunk claims, chunk upload, program access, health."""
