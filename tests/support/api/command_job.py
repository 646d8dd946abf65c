"""The specification's command job."""

SPECIFICATION = """
name: "zen-72b-finetune-finance"
type: training
image: "hanzoai/ml-pytorch:2.3-cuda12.4"
command: ["torchrun", "--nproc_per_node=8", "train.py"]
env:
  HANZO_ML_TRACKING_URI: "http://ml.hanzo.svc:8057"
  HANZO_ML_EXPERIMENT: "zen-72b-finance"
resources:
  gpus: 8
  gpu_type: "nvidia-a100-80gb"
  memory: "512Gi"
  cpu: 64
distributed:
  strategy: fsdp
  num_nodes: 4
  gpus_per_node: 8
storage:
  datasets: "s3://hanzo-ml/datasets/finance-corpus-v3/7/"
  checkpoints: "s3://hanzo-ml/checkpoints/zen-72b-finance/"
schedule:
  max_duration: "48h"
  checkpoint_interval: "1h"
  preemptible: false
"""
