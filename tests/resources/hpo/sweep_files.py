"""Sweep configurations for tests: the specification's own, and a small one with changes."""

from typing import Any

from resources.hpo.sweep_config import SweepConfig

SPECIFIED = """
experiment: "zen-7b-lora-hpo"
base_config:
  model: "zen-7b"
  method: "lora"
  dataset: "instruction-v2"
  max_steps: 5000
  eval_steps: 500
search_space:
  learning_rate:
    type: log_uniform
    min: 1e-6
    max: 1e-3
  lora_rank:
    type: choice
    values: [8, 16, 32, 64, 128]
  lora_alpha:
    type: choice
    values: [16, 32, 64, 128, 256]
  warmup_ratio:
    type: uniform
    min: 0.0
    max: 0.1
  weight_decay:
    type: log_uniform
    min: 1e-4
    max: 1e-1
strategy: bayesian # grid | random | bayesian | pbt
objective:
  metric: "eval/loss"
  direction: minimize
max_trials: 50
max_concurrent_trials: 4 # Run 4 trials in parallel
early_stopping:
  patience: 3 # Stop trial if no improvement for 3 evals
  min_delta: 0.001
resources_per_trial:
  gpus: 1
  gpu_type: "nvidia-a100-80gb"
  memory: "64Gi"
"""
"""The specification's example with its indentation, which the extracted copy lacks, restored."""


def small(**changes: Any) -> dict[str, Any]:
    """Return a sweep over one number, with the given changes."""
    document = {
        "experiment": "doors-hpo",
        "base_config": {"dataset": "colours", "recipe": "smollm2-135m-lora", "max_steps": 40, "eval_steps": 10},
        "search_space": {"learning_rate": {"type": "log_uniform", "min": 1e-5, "max": 1e-1}},
        "strategy": "random",
        "objective": {"metric": "eval/loss", "direction": "minimize"},
        "max_trials": 6,
        "max_concurrent_trials": 2,
    }
    return {**document, **changes}


def sweep(**changes: Any) -> SweepConfig:
    return SweepConfig.model_validate(small(**changes))
