"""vLLM as an engine: hidden states through its own facility, or through hooks in its workers."""
