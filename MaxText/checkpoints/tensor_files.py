"""Tensors in files: where each lies, reading a part of one, and writing safetensors.

Reads are plain positioned reads into memory of our own. A memory map would be simpler to index, but the pages it touches
count as this process's memory until the kernel takes them back, and a 15 GB folder would then show up as 15 GB.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

_DTYPES = {
  "F64": np.dtype(np.float64),
  "F32": np.dtype(np.float32),
  "F16": np.dtype(np.float16),
  "BF16": np.dtype(ml_dtypes.bfloat16),
  "I64": np.dtype(np.int64),
  "I32": np.dtype(np.int32),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}

# A longer header is not a header: the published ones stay under 1 MB.
_MAX_HEADER_BYTES = 100_000_000
BLOCK_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True)
class StoredTensor:
  """A tensor in a file, `offset` bytes from its start.

  Dense and row-major, unless `strides` (in elements) says otherwise, as for a transposed tensor in a .pth.
  """

  name: str
  file: str
  offset: int
  dtype: np.dtype
  shape: tuple[int, ...]
  strides: tuple[int, ...] | None = None

  @property
  def nbytes(self) -> int:
    return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: str) -> tuple[dict[str, StoredTensor], dict[str, str]]:
  """Reads what a .safetensors file holds, without its numbers.

  Returns:
    ({name: where it lies}, the file's own metadata).

  Raises:
    ValueError: the file is truncated, is no safetensors file, or holds numbers of a kind that no weight has.
  """
  size = os.path.getsize(path)
  with open(path, "rb") as f:
    length = int.from_bytes(f.read(8), "little")
    if size < 8 or length > _MAX_HEADER_BYTES:
      raise ValueError(f"{path} is not a safetensors file ({size} bytes); download it again")
    if size < 8 + length:
      raise ValueError(f"{path} is truncated: it has {size} bytes, its header needs {8 + length}; download it again")
    try:
      header = json.loads(f.read(length))
      metadata = header.pop("__metadata__", None) or {}
      entries = {name: (e["dtype"], tuple(e["shape"]), *_offsets(e)) for name, e in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
      raise ValueError(f"{path} is not a safetensors file: its header does not parse ({e}); download it again") from e
  expected = 8 + length + max((end for *_, end in entries.values()), default=0)
  if size != expected:
    fault = "is truncated" if size < expected else "has something behind its tensors"
    raise ValueError(f"{path} {fault}: it has {size} bytes and its header promises {expected}; download it again")
  stored, last = {}, 0
  for name, (code, shape, begin, end) in sorted(entries.items(), key=lambda entry: entry[1][2:]):
    if begin != last or not all(type(n) is int and n >= 0 for n in shape):
      raise ValueError(f"{path}: tensor {name} of shape {list(shape)} at {begin} does not follow the one that ends at "
                       f"{last}; the file is damaged")
    last = end
    if not isinstance(code, str) or code not in _DTYPES:
      raise ValueError(f"{path}: tensor {name} is stored as {code}; supported are {', '.join(_DTYPES)}")
    stored[name] = StoredTensor(name, path, 8 + length + begin, _DTYPES[code], shape)
    if stored[name].nbytes != end - begin:
      raise ValueError(f"{path}: tensor {name} of shape {list(shape)} has {end - begin} bytes; the file is damaged")
  return stored, metadata


def _offsets(entry: Mapping[str, Any]) -> tuple[int, int]:
  begin, end = entry["data_offsets"]
  return int(begin), int(end)


def read(stored: StoredTensor, index: tuple[slice, ...] | None = None, dtype: np.dtype | None = None) -> np.ndarray:
  """Reads a box of a tensor, converted on the way.

  Args:
    stored: where the tensor lies.
    index: one unit-step slice a dimension; None reads everything.
    dtype: what to convert to; None keeps the stored type.

  Returns:
    A new array of the box's shape. While it runs, memory holds that array and a block of at most BLOCK_BYTES (or one
    row; or, if it has strides, the tensor).
  """
  dtype = stored.dtype if dtype is None else np.dtype(dtype)
  bounds = [s.indices(n) for s, n in zip(index or [slice(None)] * len(stored.shape), stored.shape, strict=True)]
  out = np.empty([stop - start for start, stop, _ in bounds], dtype)
  if out.size == 0:
    return out
  with open(stored.file, "rb", buffering=0) as f:
    if stored.strides is not None:
      span = 1 + sum((n - 1) * s for n, s in zip(stored.shape, stored.strides, strict=True))
      steps = [s * stored.dtype.itemsize for s in stored.strides]
      whole = np.lib.stride_tricks.as_strided(_read_at(f, stored, stored.offset, span), stored.shape, steps)
      out[...] = whole[tuple(slice(start, stop) for start, stop, _ in bounds)]
      return out
    if not stored.shape:
      out[...] = _read_at(f, stored, stored.offset, 1)[0]
      return out
    row = math.prod(stored.shape[1:])
    rest = tuple(slice(start, stop) for start, stop, _ in bounds[1:])
    first, last, _ = bounds[0]
    step = max(1, BLOCK_BYTES // (row * stored.dtype.itemsize))
    if dtype == stored.dtype and out[0].size == row:
      # Whole rows of the right type go straight to their place.
      _read_into(f, stored, stored.offset + first * row * dtype.itemsize, out.reshape(-1).view(np.uint8))
      return out
    for start in range(first, last, step):
      stop = min(start + step, last)
      block = _read_at(f, stored, stored.offset + start * row * stored.dtype.itemsize, (stop - start) * row)
      out[start - first : stop - first] = block.reshape(stop - start, *stored.shape[1:])[(slice(None), *rest)]
  return out


def _read_at(f, stored: StoredTensor, offset: int, count: int) -> np.ndarray:
  block = np.empty(count, stored.dtype)
  _read_into(f, stored, offset, block.view(np.uint8))
  return block


def _read_into(f, stored: StoredTensor, offset: int, out: np.ndarray):
  view, done = memoryview(out), 0
  while done < len(view):
    count = os.preadv(f.fileno(), [view[done : done + BLOCK_BYTES]], offset + done)
    if count == 0:
      raise ValueError(f"{stored.file} ends inside tensor {stored.name}; the file changed while it was read")
    done += count


def write_safetensors(
  path: str,
  entries: Iterable[tuple[str, np.dtype, tuple[int, ...]]],
  fetch: Callable[[str], np.ndarray],
  metadata: Mapping[str, str] | None = None,
):
  """Writes a .safetensors file one tensor at a time.

  Args:
    path: file to write.
    entries: (name, type, shape) of every tensor, in the order to write them.
    fetch: returns the array of a name; only one is held at a time.
    metadata: text to put in the header.
  """
  entries = list(entries)
  header, offset = {"__metadata__": dict(metadata or {})}, 0
  for name, dtype, shape in entries:
    end = offset + math.prod(shape) * np.dtype(dtype).itemsize
    header[name] = {"dtype": _CODES[np.dtype(dtype)], "shape": list(shape), "data_offsets": [offset, end]}
    offset = end
  text = json.dumps(header, separators=(",", ":")).encode()
  text += b" " * (-len(text) % 8)  # so that the numbers start at a multiple of eight
  with open(path, "wb") as f:
    f.write(len(text).to_bytes(8, "little") + text)
    for name, dtype, shape in entries:
      array = np.asarray(fetch(name), order="C")
      if array.dtype != dtype or array.shape != tuple(shape):
        raise AssertionError(f"{name}: announced {dtype} {shape}, got {array.dtype} {array.shape}")
      f.write(array.reshape(-1).view(np.uint8).data)
