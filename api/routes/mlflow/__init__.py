"""MLflow's REST API, in MLflow's words. Every route here is served below /api/2.0 and below /ajax-api/2.0, and does what it
does on MLflow's server 3.17.2, but for what follows. All of it is meant.

Refused, with a sentence:
- a log-batch of more than 1,000,000 bytes as it is sent (`MAX_BATCH_BYTES`): MLflow documents that limit and lets longer
  ones through. 100 params of 6,000 characters that are not ASCII are longer, since its client escapes them;
- a bare NaN in JSON, of which MLflow's server makes 0.0 (`"NaN"` is right and kept), and a body that is no JSON;
- a version of files that are not there, but for the root of a run (row F11), and of a place that is not in this server's
  store, such as `s3://b/x`, but for what its experiment keeps elsewhere
  (`resources.metadata.registry.model_version_sources`);
- traces, webhooks, workspaces, the gateway and what else is not here: 501, or for workspaces 404 (`unsupported`);
- presigned URLs of files: clients with rights of their own go to their bucket, others through the proxy (`presigned_urls`);
- a filter that ends in AND, and other spellings that only MLflow's parser lets pass;
- a file below a path that is a file already, where MLflow's server fails with 500;
- all that a page of the web UI would change (`api.middleware.browser_security`).

Done otherwise:
- a version that becomes Production archives the one that was, with or without `archive_existing_versions`: a name has one;
- a canary, of which MLflow knows nothing, is in Staging with the tag `hanzo.stage` (`schemas.mlflow.registry`);
- a history of more than 25,000 points is in the order of its steps, and of time within each page: MLflow's is of time;
- a number as the value of a param in a batch is kept as text; MLflow's server keeps an empty text;
- of a tag that `runs/create` has twice the last counts, where MLflow's server answers in words of its database;
- a run of the prompt page has no model that would ask the gateway (`promptlab`);
- `runs/create` knows a call that is sent again by its header `Idempotency-Key` (`api.idempotency`);
- what was uploaded comes with a Content-Security-Policy, and errors never with SQL, a stack or a path of the server.

With sign-in, of which MLflow's server has another kind:
- open are /alive, /ready, /health and Prometheus's page on a port of its own, as row W6 has it, and besides
  `/v1/dataset-files`, a link whose signature is its permission. /version asks for a token;
- names are an organization's own, and so are free paths of the artifact proxy; a run's user is who signed in, whatever the
  request says;
- to delete experiments, runs, files and models, to set an alias and to move a stage takes ml-admin (their declarations).
"""
