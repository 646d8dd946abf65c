"""Raw files of any format become a dataset version; every path ends in `version_creation`."""
