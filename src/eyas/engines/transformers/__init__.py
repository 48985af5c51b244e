"""The reference engine: transformers in this process."""
