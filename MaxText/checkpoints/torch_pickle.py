"""Reads .pth files without executing them.

A .pth is a zip archive of a pickle (`data.pkl`) and the raw numbers of each storage (`data/0`, `data/1` …). A pickle is a
program for a stack machine that may call any function of any module; loading one runs it. Here a machine of our own reads
the few instructions that a state dict needs, and the few functions that it names have stand-ins below. Any other name is
refused, and nothing that the file names is ever imported or called. Sources: torch.save's documentation; pickletools.
"""

from __future__ import annotations

import os
import pickletools
import zipfile
import zlib
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from MaxText.checkpoints.tensor_files import StoredTensor

_DTYPES = {
  "DoubleStorage": np.dtype(np.float64),
  "FloatStorage": np.dtype(np.float32),
  "HalfStorage": np.dtype(np.float16),
  "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
  "LongStorage": np.dtype(np.int64),
  "IntStorage": np.dtype(np.int32),
  "ShortStorage": np.dtype(np.int16),
  "CharStorage": np.dtype(np.int8),
  "ByteStorage": np.dtype(np.uint8),
  "BoolStorage": np.dtype(np.bool_),
}

# The pickle of UMT5-XXL's 242 tensors takes 30 kB.
_MAX_PICKLE_BYTES = 64 << 20
_LEGACY_START = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."


class _Storage(NamedTuple):
  key: str
  dtype: np.dtype
  count: int


class _View(NamedTuple):
  """A tensor as pickled: a strided view of a storage, in elements."""

  storage: _Storage
  offset: int
  shape: tuple[int, ...]
  strides: tuple[int, ...]


class _Global(NamedTuple):
  """A name that the pickle refers to; only the names in `_CALLS` and the storage types get this far."""

  name: str


def read_index(path: str) -> dict[str, StoredTensor]:
  """Names of a .pth file's tensors and where they lie; `tensor_files.read` reads them.

  Tensors inside nested dicts or lists get dotted names; what is no tensor is left out.

  Raises:
    ValueError: the file is truncated, is not from torch.save, comes from before torch 1.6, or names anything that a
      state dict does not need.
  """
  _check_kind(path)
  try:
    with zipfile.ZipFile(path) as archive:
      entries = {entry.filename: entry for entry in archive.infolist()}
      pickles = [name for name in entries if name.endswith("/data.pkl")]
      if len(pickles) != 1:
        raise ValueError(f"{path} is a zip archive but not from torch.save: it has {len(pickles)} data.pkl inside")
      prefix, size = pickles[0].removesuffix("data.pkl"), entries[pickles[0]].file_size
      if size > _MAX_PICKLE_BYTES:
        raise ValueError(f"{path}: its pickle has {size} bytes, too many for a list of tensors")
      if f"{prefix}byteorder" in entries and archive.read(f"{prefix}byteorder") != b"little":
        raise ValueError(f"{path} was saved on a big-endian machine; save it again on a little-endian one")
      content = _Machine(path).run(archive.read(pickles[0]))
  except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
    raise ValueError(f"{path} is truncated or damaged ({error}); download it again") from error
  storages = {name.removeprefix(f"{prefix}data/"): entry for name, entry in entries.items()}
  with open(path, "rb") as file:
    return {name: _locate(path, file, name, view, storages) for name, view in _tensors(content).items()}


def _check_kind(path: str):
  """Refuses what is no zip archive, saying what it is instead."""
  with open(path, "rb") as file:
    start = file.read(len(_LEGACY_START))
  if start[:4] == b"PK\x03\x04":
    return
  if start == _LEGACY_START:
    raise ValueError(
      f"{path} is in the format of torch before 1.6, a chain of pickles. If you trust it, load it with torch and save it "
      "again"
    )
  if start[:1] == b"\x80":
    raise ValueError(f"{path} is a bare pickle, not a file of torch.save; it is not read")
  raise ValueError(f"{path} is not a .pth file of torch.save (it starts with {start[:8]!r}); download it again")


def _tensors(content: Any) -> dict[str, _View]:
  """Tensors by dotted name. A container met twice is walked once, so that no pickle makes the walk explode."""
  found: dict[str, _View] = {}
  pending, seen = [("", content)], set()
  while pending:
    name, value = pending.pop()
    if isinstance(value, _View):
      found[name] = value
    elif isinstance(value, (dict, list)) and id(value) not in seen:
      seen.add(id(value))
      items = list(value.items() if isinstance(value, dict) else enumerate(value))
      pending += [(f"{name}.{key}" if name else str(key), item) for key, item in reversed(items)]
  return found


def _locate(path: str, file, name: str, view: _View, storages: dict[str, zipfile.ZipInfo]) -> StoredTensor:
  """Where a view's numbers lie in the file, after checking that they are there."""
  storage, itemsize = view.storage, view.storage.dtype.itemsize
  entry = storages.get(storage.key)
  if entry is None:
    raise ValueError(f"{path}: the numbers of {name} (data/{storage.key}) are missing; download it again")
  if entry.compress_type != zipfile.ZIP_STORED:
    raise ValueError(f"{path}: the numbers of {name} are compressed, which torch.save never does")
  if min(view.offset, *view.shape, *view.strides, 0) < 0 or len(view.shape) != len(view.strides):
    raise ValueError(f"{path}: tensor {name} has an impossible shape {view.shape} or strides {view.strides}")
  empty = 0 in view.shape
  span = 0 if empty else 1 + sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True))
  if storage.count * itemsize > entry.file_size or view.offset + span > storage.count:
    raise ValueError(f"{path}: tensor {name} reaches beyond its {entry.file_size} bytes; the file is damaged")
  # The header before the numbers may be longer than the archive's directory says, so its length is read where it stands.
  file.seek(entry.header_offset)
  header = file.read(30)
  if len(header) != 30 or header[:4] != b"PK\x03\x04":
    raise ValueError(f"{path}: the header of data/{storage.key} is damaged; download it again")
  start = entry.header_offset + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
  offset = start + view.offset * itemsize
  if offset + span * itemsize > os.path.getsize(path):
    raise ValueError(f"{path} is truncated inside tensor {name}; download it again")
  strides = None if empty or view.strides == _row_major(view.shape, view.strides) else view.strides
  return StoredTensor(name, path, offset, storage.dtype, view.shape, strides)


def _row_major(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
  """Strides of a dense row-major array; where a dimension is 1 its stride means nothing and is taken as given."""
  dense, step = [], 1
  for n, stride in zip(reversed(shape), reversed(strides), strict=True):
    dense.append(stride if n == 1 else step)
    step *= n
  return tuple(reversed(dense))


def _ordered_dict() -> dict:
  return {}


def _rebuild_tensor(storage, offset, shape, strides, *_) -> _View:
  if not (isinstance(storage, _Storage) and isinstance(offset, int)):
    raise TypeError("a tensor without a storage")
  if not all(isinstance(n, int) for n in (*shape, *strides)):
    raise TypeError("a tensor whose shape is not made of integers")
  return _View(storage, offset, tuple(shape), tuple(strides))


def _rebuild_parameter(data, *_) -> _View:
  if not isinstance(data, _View):
    raise TypeError("a parameter without a tensor")
  return data


_CALLS = {
  "collections.OrderedDict": _ordered_dict,
  "torch._utils._rebuild_tensor": _rebuild_tensor,
  "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
  "torch._utils._rebuild_parameter": _rebuild_parameter,
}
_STORAGE_TYPES = {f"torch.{name}": dtype for name, dtype in _DTYPES.items()}

_IGNORED = {"PROTO", "FRAME"}
_CONSTANTS = {
  "NONE": lambda: None,
  "NEWTRUE": lambda: True,
  "NEWFALSE": lambda: False,
  "EMPTY_TUPLE": tuple,
  "EMPTY_LIST": list,
  "EMPTY_DICT": dict,
}
_LITERALS = {
  "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
  "BINBYTES", "SHORT_BINBYTES", "BINSTRING", "SHORT_BINSTRING",
}
_MEMO_PUTS = {"BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"}
_MEMO_GETS = {"BINGET", "LONG_BINGET", "GET"}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Machine:
  """Runs the instructions of one pickle on stand-ins."""

  def __init__(self, path: str):
    self.path = path
    self.stack: list[Any] = []
    self.marks: list[int] = []
    self.memo: dict[int, Any] = {}

  def run(self, pickle: bytes) -> Any:
    """Returns what the pickle describes: dicts, lists, numbers, texts and `_View`s."""
    try:
      for instruction, argument, _ in pickletools.genops(pickle):
        if instruction.name == "STOP":
          return self.stack.pop()
        self.step(instruction.name, argument)
    except _Refused as error:
      raise ValueError(f"{self.path} {error}; nothing in it was executed") from None
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
      raise ValueError(f"{self.path} is damaged: its pickle does not parse ({error}); download it again") from error
    raise ValueError(f"{self.path} is damaged: its pickle has no end")

  def step(self, name: str, argument: Any):
    stack = self.stack
    if name in _IGNORED:
      pass
    elif name in _CONSTANTS:
      stack.append(_CONSTANTS[name]())
    elif name in _LITERALS:
      stack.append(argument)
    elif name in _MEMO_PUTS:
      self.memo[len(self.memo) if name == "MEMOIZE" else argument] = stack[-1]
    elif name in _MEMO_GETS:
      stack.append(self.memo[argument])
    elif name in _TUPLES:
      stack[-_TUPLES[name] :] = [tuple(stack[-_TUPLES[name] :])]
    elif name == "MARK":
      self.marks.append(len(stack))
    elif name == "TUPLE":
      stack.append(tuple(self.pop_mark()))
    elif name in ("GLOBAL", "STACK_GLOBAL"):
      module, attribute = argument.split(" ", 1) if name == "GLOBAL" else (stack.pop(-2), stack.pop())
      stack.append(self.find(f"{module}.{attribute}"))
    elif name == "BINPERSID":
      stack.append(self.storage(stack.pop()))
    elif name == "REDUCE":
      arguments, function = stack.pop(), stack.pop()
      stack.append(_CALLS[function.name](*arguments))
    elif name == "SETITEM":
      value, key = stack.pop(), stack.pop()
      self.container(dict)[key] = value
    elif name == "SETITEMS":
      items = self.pop_mark()
      self.container(dict).update(zip(items[::2], items[1::2], strict=True))
    elif name == "APPEND":
      value = stack.pop()
      self.container(list).append(value)
    elif name == "APPENDS":
      values = self.pop_mark()
      self.container(list).extend(values)
    elif name == "BUILD":
      stack.pop()  # attributes of the object below, such as a state dict's version numbers; no weight is among them
    else:
      raise _Refused(f"uses the pickle instruction {name}, which a state dict does not need")

  def find(self, name: str) -> _Global:
    if name not in _CALLS and name not in _STORAGE_TYPES:
      raise _Refused(f"refers to {name}, which a state dict does not need; save the model's state dict alone")
    return _Global(name)

  def storage(self, identity: Any) -> _Storage:
    kind, storage_type, key, _, count = identity
    if kind != "storage" or not isinstance(key, str) or not isinstance(count, int):
      raise TypeError(f"an unknown kind of storage {kind!r}")
    return _Storage(key, _STORAGE_TYPES[storage_type.name], count)

  def pop_mark(self) -> list[Any]:
    mark = self.marks.pop()
    values = self.stack[mark:]
    del self.stack[mark:]
    return values

  def container(self, kind: type) -> Any:
    if type(self.stack[-1]) is not kind:
      raise TypeError(f"an item is put into a {type(self.stack[-1]).__name__}")
    return self.stack[-1]


class _Refused(Exception):
  """The pickle asks for something that is not allowed."""
