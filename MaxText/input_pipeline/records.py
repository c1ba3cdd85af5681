"""The encoded dataset on disk: what encode_dataset writes and training reads.

    dataset.json                                   what is in it; written last, so a folder that has it is whole
    train-480x832-00000-of-00012.arrayrecord       one record a clip: latents and text embedding
    empty_text.safetensors                         embedding of the empty prompt, for text dropout
    skipped.jsonl                                  videos that were left out, and why
    plan.json                                      what was asked for; a second start of encode_dataset compares it

A record is a safetensors file in memory: `latents` [F, H, W, C], normalised as the transformer takes them, `text` [t, E]
without the padding, and the file's name, the clip's number and the caption as metadata. While shards are being made,
`<shard>.json` beside a shard says that it is whole.

Dimensions: F H W latent frames/rows/columns, C latent channels, T text tokens, E text width.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
from array_record.python.array_record_module import ArrayRecordWriter
from safetensors.numpy import save

from MaxText.config_types import ConfigError

DATASET, PLAN, SKIPPED, EMPTY_TEXT = "dataset.json", "plan.json", "skipped.jsonl", "empty_text.safetensors"
SUFFIX = ".arrayrecord"
VERSION = 1
SPLITS = ("train", "eval")
_DTYPES = {"F32": np.float32, "BF16": ml_dtypes.bfloat16}


def pack(arrays: Mapping[str, np.ndarray], dtype: str, metadata: Mapping[str, str] | None = None) -> bytes:
  """Arrays as one record, stored as `dtype` ('float32' or 'bfloat16')."""
  kept = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
  return save({name: np.ascontiguousarray(array).astype(kept) for name, array in arrays.items()}, dict(metadata or {}))


def unpack(record: bytes) -> dict[str, np.ndarray]:
  """The arrays of a record, float32."""
  return {
    name: np.frombuffer(entry["data"], _DTYPES[entry["dtype"]]).reshape(entry["shape"]).astype(np.float32)
    for name, entry in safetensors.deserialize(bytes(record))
  }


def caption(record: bytes) -> str:
  """The caption that a record was made with."""
  length = int.from_bytes(record[:8], "little")  # a safetensors file starts with the length of its JSON header
  return json.loads(bytes(record[8:8 + length]))["__metadata__"]["caption"]


def bucket_name(height: int, width: int) -> str:
  return f"{height}x{width}"


def shard_name(split: str, bucket: str, index: int, count: int) -> str:
  return f"{split}-{bucket}-{index:05d}-of-{count:05d}{SUFFIX}"


def sync(path: pathlib.Path) -> None:
  """Flushes a file or folder to disk: a crash after a rename must not leave an empty file under the final name."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def replace_file(path: pathlib.Path, content: bytes) -> None:
  """Writes a file under a temporary name, and renames it when it is whole and on disk."""
  temporary = path.with_name(path.name + ".tmp")
  temporary.write_bytes(content)
  sync(temporary)
  os.replace(temporary, path)
  sync(path.parent)


def to_json(value: Any) -> bytes:
  return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


class ShardWriter:
  """Writes one shard; nothing has the shard's name before `finish`."""

  def __init__(self, path: pathlib.Path):
    self.path = path
    self.count = 0
    self._temporary = path.with_name(path.name + ".tmp")
    self._writer = ArrayRecordWriter(str(self._temporary), "group_size:1")  # clips are large and read one by one

  def write(self, record: bytes) -> None:
    self._writer.write(record)
    self.count += 1

  def finish(self, skipped: Sequence[Mapping[str, str]]) -> None:
    """Gives the shard its name (unless it is empty), and then says beside it that it is whole."""
    self._writer.close()
    if self.count:
      sync(self._temporary)
      os.replace(self._temporary, self.path)
    else:
      self._temporary.unlink()
    replace_file(marker(self.path), to_json({"count": self.count, "skipped": list(skipped)}))

  def abandon(self) -> None:
    with contextlib.suppress(Exception):
      self._writer.close()
    self._temporary.unlink(missing_ok=True)


def marker(shard: pathlib.Path) -> pathlib.Path:
  return shard.with_suffix(".json")


@dataclasses.dataclass(frozen=True)
class Bucket:
  """Clips of one size.

  Attributes:
    height, width: of the video. latent_shape: (F, H, W, C). shards: split → (file name, number of records).
  """

  height: int
  width: int
  latent_shape: tuple[int, int, int, int]
  shards: Mapping[str, tuple[tuple[str, int], ...]]

  def count(self, split: str) -> int:
    return sum(count for _, count in self.shards.get(split, ()))


@dataclasses.dataclass(frozen=True)
class Dataset:
  """What dataset.json says.

  Attributes:
    num_frames, fps: of every clip. text_width: E. fingerprints: of the weights that encoded it: 'vae', 'text_encoder'.
  """

  path: pathlib.Path
  num_frames: int
  fps: float
  text_width: int
  dtype: str
  fingerprints: Mapping[str, str]
  buckets: tuple[Bucket, ...]

  def count(self, split: str) -> int:
    return sum(bucket.count(split) for bucket in self.buckets)

  def write(self) -> None:
    values = dataclasses.asdict(self)
    del values["path"]
    replace_file(self.path / DATASET, to_json({"version": VERSION, **values}))

  def empty_text(self) -> np.ndarray:
    """Embedding of the empty prompt, float32 [t, E] without padding."""
    return unpack((self.path / EMPTY_TEXT).read_bytes())["text"]


def open_dataset(path: str) -> Dataset:
  """Reads dataset.json and checks that the shards are there.

  Raises:
    ConfigError: no such folder, no shards, an unfinished or damaged dataset.
  """
  about, root = f"dataset_path={path}", pathlib.Path(path).expanduser()
  if not root.is_dir():
    raise ConfigError(f"{about}: {'is a file, not a folder' if root.exists() else 'there is no such folder'}; "
                      "encode_dataset makes one")
  if not (root / DATASET).is_file():
    if (root / PLAN).is_file():
      raise ConfigError(f"{about}: encode_dataset has not finished there; start it again with the same arguments, and it "
                        "goes on where it stopped")
    raise ConfigError(f"{about}: holds no shards ({DATASET} is missing); make them with python -m MaxText.encode_dataset")
  try:
    values = json.loads((root / DATASET).read_text(encoding="utf-8"))
    if values.pop("version") != VERSION:
      raise ConfigError(f"{about}: was written by another version of this program; encode it again")
    buckets = tuple(
      Bucket(b["height"], b["width"], tuple(b["latent_shape"]),
             {split: tuple((name, int(count)) for name, count in shards) for split, shards in b["shards"].items()})
      for b in values.pop("buckets"))
    dataset = Dataset(path=root, buckets=buckets, **values)
  except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
    if isinstance(error, ConfigError):
      raise
    raise ConfigError(f"{about}: {DATASET} is damaged ({error!r}); encode the videos again") from None
  wanted = [name for b in buckets for shards in b.shards.values() for name, _ in shards]
  missing = [name for name in wanted if not (root / name).is_file()]
  if not wanted or missing:
    raise ConfigError(f"{about}: {f'the shard {missing[0]} is missing' if missing else 'holds no shards'}; copy the "
                      "folder again, or encode the videos again")
  return dataset
