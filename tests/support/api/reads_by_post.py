"""MLflow's routes that read by POST."""

import re

READS_BY_POST = re.compile(
    r"/search$|/search-datasets$|/get-latest-versions$|/graphql$|/ui-telemetry$|/gateway-proxy$|/presigned-download-url$|^/login$|^/logout$"
    r"|^/dagster/\{path|/datasets/trace$|/jobs/estimate$|/traces$|\{unserved"
)
