"""Datasets, the global order of samples, and the loader that can be resumed at any position."""

from shoal.data.loader import Loader
from shoal.data.order import BatchSchedule, permute, samples_at, share
from shoal.data.stream import OrderedStream, ShardedStream
from shoal.data.text import TextDataset, TokenWindows, open_text, prepare_text
from shoal.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "BatchSchedule",
    "ByteTokenizer",
    "Loader",
    "OrderedStream",
    "ShardedStream",
    "TextDataset",
    "TokenWindows",
    "Tokenizer",
    "load_tokenizer",
    "open_text",
    "permute",
    "prepare_text",
    "samples_at",
    "share",
]
