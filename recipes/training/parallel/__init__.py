"""Training on several GPUs: process groups, FSDP, ZeRO, pipeline and DDP buckets."""
