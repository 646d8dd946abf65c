"""Jobs of the control plane: command jobs, resume, credentials and the sandbox."""
