"""Bases in 4 or 8 bits, by bitsandbytes: frozen linear layers whose weights are plain tensors of packed numbers."""

from shoal.quantised.layers import QuantisedLinear, dequantise, quantise_layers, quantised_layers
from shoal.quantised.schemes import EightBit, FourBit, Scheme

__all__ = [
    "EightBit",
    "FourBit",
    "QuantisedLinear",
    "Scheme",
    "dequantise",
    "quantise_layers",
    "quantised_layers",
]
