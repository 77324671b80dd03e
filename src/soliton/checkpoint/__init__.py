"""Files to tensors: config.json, tensor names, shards, tokenizer, chat template, synthetic weights."""

from soliton.checkpoint.chat import render
from soliton.checkpoint.config_json import spec_from_config
from soliton.checkpoint.load import Checkpoint, open_checkpoint
from soliton.checkpoint.names import Entry, tensor_table
from soliton.checkpoint.shards import SafetensorsSource, TensorSource
from soliton.checkpoint.tokenizer import Detokeniser, Tokenizer

__all__ = [
    "Checkpoint",
    "Detokeniser",
    "Entry",
    "SafetensorsSource",
    "TensorSource",
    "Tokenizer",
    "open_checkpoint",
    "render",
    "spec_from_config",
    "tensor_table",
]
