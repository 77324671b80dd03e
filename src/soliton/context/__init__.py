"""One stream's memory: its buffers, their staging and commit, and checkpoints for prefix reuse."""

from .checkpoints import CheckpointTree, Saved
from .stream import Stream

__all__ = ["CheckpointTree", "Saved", "Stream"]
