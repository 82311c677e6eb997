"""LoRA: small trained matrices beside frozen weights, with PEFT's meaning, parameter names and file format."""

from shoal.lora.config import LoraConfig

__all__ = ["LoraConfig"]
