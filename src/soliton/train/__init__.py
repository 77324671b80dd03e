"""Training a DSpark draft for a target: data the target wrote, losses, the trainer, its checkpoints, the export."""
