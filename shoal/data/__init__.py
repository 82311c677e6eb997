"""Datasets, the global order of samples, and a loader that can resume at any position."""

from shoal.data.loader import Loader
from shoal.data.order import BatchSchedule, micro_batch_slices, permute, samples_at
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
    "micro_batch_slices",
    "open_text",
    "permute",
    "prepare_text",
    "samples_at",
]
