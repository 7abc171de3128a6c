"""Asynchronous RL post-training of language models from one torchrun."""

__version__ = "0.1.0"
