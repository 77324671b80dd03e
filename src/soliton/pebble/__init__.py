"""pebble, the bundled model: checkpoint, tokenizer and card as package data."""

from pathlib import Path


def path() -> Path:
    """Directory of the checkpoint files."""
    return Path(__file__).parent
