"""Fine-tuning side by side with what others use: the same model, records, precision and optimizer, in one run."""
