"""kvd: a daemon that keeps the KV cache of LLM inference engines outside the engine."""

__version__ = "0.1.0"
