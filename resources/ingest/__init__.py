"""Raw files of any format -> a dataset version. Asset, API and command line all end in `create.create_version`."""
