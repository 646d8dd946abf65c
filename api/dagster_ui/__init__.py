"""Dagster's UI behind this server's sign-in: Dagster itself knows neither users nor organizations.

`access` decides who reaches it, `policy` which GraphQL operations a role may send, from what `graphql_requests` reads;
`http_proxy` and `websocket_proxy` forward what was allowed. Dagster receives what was decided on, serialized again, and
never the bytes or credentials that the client sent. The routes are in `api.routes.ui.dagster`.
"""
