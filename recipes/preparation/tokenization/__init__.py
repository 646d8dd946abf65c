"""Turn records into tokens with a base model's tokenizer and chat template."""
