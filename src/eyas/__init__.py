"""Train EAGLE-3 draft models for a target LLM and prove that they work."""

__version__ = "0.1.0"
