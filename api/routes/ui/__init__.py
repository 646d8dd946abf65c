"""MLflow's web UI over our store, if the `mlflow` wheel is installed (extra `ui`).

It is read-only. `static_files` serves the build inside the wheel, `graphql` its four queries (executed by
`graphql_execution`), `artifact_downloads` its downloads, `sign_in` the sign-in page. `api.middleware.browser_security`
prevents writes from pages.
"""
