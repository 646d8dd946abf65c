"""Settings loaded from the specification's configuration file."""

from pathlib import Path

from resources.settings.settings import Settings

ROOT = Path(__file__).resolve().parents[3]

SPECIFICATION = """
# /etc/hanzo-ml/config.yaml
server:
  host: 0.0.0.0
  port: 8057
  workers: 4
database:
  url: "postgresql://hanzo:password@postgres:5432/hanzo_ml"
storage:
  endpoint: "http://minio:9000"
  access_key: "${HANZO_STORAGE_ACCESS_KEY}"
  secret_key: "${HANZO_STORAGE_SECRET_KEY}"
  buckets:
    datasets: "hanzo-ml-datasets"
    checkpoints: "hanzo-ml-checkpoints"
    models: "hanzo-models"
stream:
  brokers: "kafka:9092"
  topic_prefix: "hanzo.ml"
auth:
  iam_url: "https://hanzo.id"
  verify_tokens: true
scheduler:
  namespace: "hanzo-ml"
  default_image: "hanzoai/ml-pytorch:2.3-cuda12.4"
  gpu_types:
    - "nvidia-a100-80gb"
    - "nvidia-a100-40gb"
    - "nvidia-h100-80gb"
  max_concurrent_jobs: 32
  checkpoint_bucket: "hanzo-ml-checkpoints"
hpo:
  max_concurrent_trials: 8
  default_strategy: "bayesian"
metrics:
  enabled: true
  port: 9090
  path: /metrics
logging:
  level: info
  format: json
"""


def load(folder: Path, text: str = "", **variables: str) -> Settings:
    if text:
        (folder / "config.yaml").write_text(text)
    return Settings.load({"HANZO_ML_HOME": str(folder), **variables})
