"""MLflow's web UI over our store (row F5), where the `mlflow` wheel is installed (extra `ui`). It reads and never writes.

`static_files` is the build inside the wheel, `graphql` the four queries that it makes (`graphql_execution` executes them),
`artifact_downloads` what its links download, `sign_in` the page that takes a token. `api.middleware.browser_security` keeps
a page from changing anything.
"""
