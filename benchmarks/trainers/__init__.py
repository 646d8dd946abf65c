"""Fine-tuning benchmark: other trainers with the same model, records, precision and optimizer."""
