"""Reads quantised weights from safetensors: quantises a part of a matrix while it is read, or takes it as it is stored.

No rank ever has a whole matrix in full precision: numbers are read in stretches, and a rank packs those of its shard.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import UserError
from shoal.quantised.layers import PARTS, QuantisedLinear, quantised_layers
from shoal.quantised.schemes import BLOCK, NESTED_BLOCK, FourBit, Part, Scheme, Shape, block_maxima, scheme_from_json
from shoal.weights.conversion import FileTensor, OpenFiles, Source

_STRETCH = 1 << 22  # numbers that are read at a time, whole blocks
_STATE = "weight.quant_state.bitsandbytes__"
_STORED = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
"""The tensors that bitsandbytes stores beside a 4-bit weight, besides the one with its options."""


@dataclass(frozen=True)
class Quantisation:
    """How a tensor of a quantised layer is made from whole tensors in files; a manifest can hold it."""

    scheme: Scheme
    part: Part
    shape: Shape
    """The shape of the layer's matrix."""
    is_stored: bool = False
    """True if the files have the matrix as bitsandbytes has quantised and saved it."""

    @property
    def result_shape(self) -> tuple[int, ...]:
        """The shape of the layer's tensor."""
        return self.scheme.shapes(self.shape)[self.part]

    def __call__(self, *tensors: Tensor) -> Tensor:
        """Returns the layer's tensor. If it is stored, the tensors are those of `stored_names`."""
        if not self.is_stored or not isinstance(self.scheme, FourBit):
            return self.scheme.quantise(self.part, tensors[0].float())
        if self.part == "weight":
            return tensors[0].reshape(-1).view(torch.uint8).view(self.scheme.dtypes["weight"])[:, None]
        return _stored_statistics(self.scheme, *tensors)

    def as_json(self) -> dict[str, Any]:
        """Returns the entry of a manifest."""
        return {
            "scheme": self.scheme.as_json(),
            "part": self.part,
            "matrix": [*self.shape],
            "is_stored": self.is_stored,
        }

    @classmethod
    def from_json(cls, about: Mapping[str, Any]) -> Quantisation:
        """Returns what an entry says; the inverse of `as_json`. Raises ValueError for impossible claims."""
        scheme, part, shape = scheme_from_json(about["scheme"]), about["part"], about["matrix"]
        if part not in PARTS or len(shape) != 2 or not all(type(size) is int and size > 0 for size in shape):
            raise ValueError(f"the quantised part {part!r:.100} of a matrix {shape!r:.100} is not known")
        return cls(scheme, part, (shape[0], shape[1]), about["is_stored"] is True)


@dataclass(frozen=True)
class QuantisedSource(Source):
    """A tensor of a quantised layer, made from a matrix in the files, or from what bitsandbytes stored there."""

    parts: tuple[Source, ...]
    quantisation: Quantisation

    def meta(self, files: OpenFiles) -> Tensor:
        scheme, part, shape = self.quantisation.scheme, self.quantisation.part, self.quantisation.shape
        found = self.parts[0].meta(files).shape
        if not self.quantisation.is_stored and found != shape:
            raise RuntimeError(f"its shape is {[*found]}, and that of the layer {[*shape]}")
        return torch.empty(self.quantisation.result_shape, dtype=scheme.dtypes[part], device="meta")

    def fill(self, out: Tensor, box: Sequence[slice], files: OpenFiles) -> None:
        scheme = self.quantisation.scheme
        if self.quantisation.is_stored:
            names = [name for part in self.parts for name in part.names()]
            out.copy_(self.quantisation(*(files[name][...] for name in names))[tuple(box)])
        elif not isinstance(scheme, FourBit):  # each row by itself
            rows = box[0]
            for start in range(rows.start, rows.stop, step := max(1, _STRETCH // self.quantisation.shape[1])):
                stop = min(start + step, rows.stop)
                matrix = self._rows(start, stop, files).to(out.device)
                out[start - rows.start : stop - rows.start] = scheme.quantise(self.quantisation.part, matrix)
        elif self.quantisation.part == "weight":
            self._fill_codes(out, box[0], scheme, files)
        else:
            numel = prod(self.quantisation.shape)
            maxima = [block_maxima(numbers.to(out.device)) for numbers, _ in self._stretches(0, numel, files)]
            scales = torch.cat(maxima).cpu()
            out.copy_(scheme.statistics_of(*scheme.nested(scales) if scheme.double else (scales,))[tuple(box)])

    def _fill_codes(self, out: Tensor, box: slice, scheme: FourBit, files: OpenFiles) -> None:
        """Packs the blocks that a shard has a part of, and takes the part."""
        per_element = 2 * out.element_size()  # numbers in an element of the packed tensor; it divides a block
        first = box.start * per_element // BLOCK * BLOCK
        last = min(ceil(box.stop * per_element / BLOCK) * BLOCK, prod(self.quantisation.shape))
        for numbers, start in self._stretches(first, last, files):
            codes, offset = scheme.codes(numbers.to(out.device)), start // per_element
            begin, end = max(offset, box.start), min(offset + len(codes), box.stop)
            if begin < end:
                out[begin - box.start : end - box.start] = codes[begin - offset : end - offset]

    def _stretches(self, first: int, last: int, files: OpenFiles) -> Iterator[tuple[Tensor, int]]:
        """Yields the matrix's numbers from `first` to `last`, row after row, in stretches with their starts."""
        columns = self.quantisation.shape[1]
        for start in range(first, last, _STRETCH):
            stop = min(start + _STRETCH, last)
            row = start // columns
            numbers = self._rows(row, ceil(stop / columns), files).view(-1)
            yield numbers[start - row * columns : stop - row * columns], start

    def _rows(self, start: int, stop: int, files: OpenFiles) -> Tensor:
        columns = self.quantisation.shape[1]
        rows = torch.empty(stop - start, columns)
        self.parts[0].fill(rows, [slice(start, stop), slice(0, columns)], files)
        return rows


@dataclass(frozen=True)
class DequantisedSource(Source):
    """The matrix that a quantised layer computes with, from the sources of its tensors."""

    parts: tuple[QuantisedSource, ...]
    """Those of `weight` and `statistics`."""

    def meta(self, files: OpenFiles) -> Tensor:
        return torch.empty(self.parts[0].quantisation.shape, device="meta")

    def fill(self, out: Tensor, box: Sequence[slice], files: OpenFiles) -> None:
        quantisation = self.parts[0].quantisation
        weight, statistics = (torch.empty_like(part.meta(files), device="cpu") for part in self.parts)
        for part, tensor in zip(self.parts, (weight, statistics), strict=True):
            part.fill(tensor, [slice(0, size) for size in tensor.shape], files)
        out.copy_(quantisation.scheme.dequantise(weight, statistics, quantisation.shape, torch.float32)[tuple(box)])


def matrix_sources(sources: Mapping[str, Source]) -> dict[str, Source]:
    """Returns the same sources with the dequantised matrix in the place of each quantised layer's `weight`."""
    result = dict(sources)
    for name, source in sources.items():
        if isinstance(source, QuantisedSource) and source.quantisation.part == "weight":
            statistics = sources[f"{name.removesuffix('weight')}statistics"]
            assert isinstance(statistics, QuantisedSource)
            result[name] = DequantisedSource((source, statistics))
    return result


def quantised_sources(model: nn.Module, sources: Mapping[str, Source], files: OpenFiles) -> dict[str, Source]:
    """Returns the sources of a model whose linear layers are quantised.

    `sources` are those of the model with the same names before: `<layer>.weight` is made from the layer's matrix, or,
    if the files are quantised, from what bitsandbytes has in its place.
    """
    result = dict(sources)
    layers = {name: layer for name, layer in quantised_layers(model).items() if f"{name}.weight" in sources}
    stored_names = {name: _stored_names(layer, sources[f"{name}.weight"], files) for name, layer in layers.items()}
    if any(stored_names.values()) and (plain := [name for name, stored in stored_names.items() if stored is None]):
        raise UserError(
            f"model.name: the files have {plain[0]} without quantisation, and other layers quantised; list it in "
            "llm_int8_skip_modules of the quantization_config in their config.json"
        )
    for name, layer in layers.items():
        source, stored = sources[f"{name}.weight"], stored_names[name]
        if isinstance(layer.scheme, FourBit) or stored is None:
            for part in PARTS:
                quantisation = Quantisation(layer.scheme, part, layer.shape, stored is not None)
                parts = (source,) if stored is None else tuple(map(FileTensor, stored[part]))
                result[f"{name}.{part}"] = QuantisedSource(parts, quantisation)
        else:  # 8 bits are stored as they are held
            result |= {f"{name}.{part}": FileTensor(stored[part][0]) for part in PARTS}
    return result


def _stored_names(layer: QuantisedLinear, source: Source, files: OpenFiles) -> dict[Part, tuple[str, ...]] | None:
    """Returns the names of the file tensors that hold a layer quantised by bitsandbytes, or None if it is not."""
    if not isinstance(source, FileTensor):
        return None
    prefix = source.name.removesuffix("weight")
    if f"{prefix}SCB" in files:
        return {"weight": (source.name,), "statistics": (f"{prefix}SCB",)}
    if not isinstance(layer.scheme, FourBit) or f"{prefix}weight.absmax" not in files:
        return None
    options = f"{prefix}{_STATE}{layer.scheme.quant_type}"
    names = [options, *(f"{prefix}weight.{key}" for key in _STORED if f"{prefix}weight.{key}" in files)]
    if missing := [name for name in names if name not in files]:
        raise UserError(f"model.name: the files have no tensor {missing[0]!r}; save the quantised model again")
    return {"weight": (source.name,), "statistics": tuple(names)}


def _stored_statistics(scheme: FourBit, options: Tensor, scales: Tensor, values: Tensor, *nested: Tensor) -> Tensor:
    """Returns the tensor `statistics` from the tensors that bitsandbytes stores, in the order of `_stored_names`."""
    from bitsandbytes.functional import get_4bit_type

    about = json.loads(bytes(options.tolist()))
    if about.get("blocksize") != BLOCK or (nested and about.get("nested_blocksize") != NESTED_BLOCK):
        raise UserError(
            f"model.name: its weights are quantised in blocks of {about.get('blocksize')}; only blocks of {BLOCK}, "
            "transformers' own, can be opened: use the weights that they were made from"
        )
    if not torch.equal(values, get_4bit_type(scheme.quant_type, device="cpu")) or bool(nested) != scheme.double:
        raise UserError(
            f"model.name: its weights are not quantised as its config.json says ({scheme.describe()}); save the "
            "quantised model again"
        )
    if not nested:
        return scheme.statistics_of(scales)
    return scheme.statistics_of(scales, nested[1], nested[0], torch.tensor(float(about["nested_offset"])))
