"""Export a trained model: merge adapters, write safetensors and GGUF."""
