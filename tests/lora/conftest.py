"""Shared by the tests of adapters."""

from lora.fake_hub import fake_hub

__all__ = ["fake_hub"]
