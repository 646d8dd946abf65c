"""Create dataset versions from raw files of any format; all sources end in `version_creation`."""
