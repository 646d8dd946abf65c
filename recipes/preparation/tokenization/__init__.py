"""Tokenize records with a base model's tokenizer and chat template."""
