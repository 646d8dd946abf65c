"""The metadata database: the only thing that the API and the asset graph share.

One module per record: `tracking`, `registry`, `datasets`, `jobs`, `deployments`, and the `outbox` in which each of them
writes its event, in the same transaction as the change. Weights and other heavy bytes never enter it.
"""
