"""Instruction data: records of prompts and answers, rendered by a chat template, as samples of tokens of which only
some count in the loss."""

from shoal.data.instructions.config import DataSource, InstructionDataset
from shoal.data.instructions.prepare import Prepared, open_instructions, prepare_instructions
from shoal.data.instructions.samples import Packs, Samples, collate_samples

__all__ = [
    "DataSource",
    "InstructionDataset",
    "Packs",
    "Prepared",
    "Samples",
    "collate_samples",
    "open_instructions",
    "prepare_instructions",
]
