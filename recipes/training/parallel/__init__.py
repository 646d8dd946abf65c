"""Training on several GPUs: process groups, FSDP, ZeRO and pipeline stages."""
