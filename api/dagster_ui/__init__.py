"""Dagster's UI behind this server's sign-in: Dagster itself knows neither users nor organizations.

`access` decides who may open it, `policy` which GraphQL operations a role may send, as parsed by `graphql_requests`;
`http_proxy` and `websocket_proxy` forward what is allowed. Dagster receives the checked request, serialized again, and never
the client's own bytes or credentials. The routes are in `api.routes.ui.dagster`.
"""
