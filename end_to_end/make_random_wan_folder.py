"""Writes a Diffusers folder of a Wan model with random weights: published layout, any size, to measure memory and speed.

  .venv/bin/python end_to_end/make_random_wan_folder.py OUT model_name=wan2.1-t2v-1.3b

makes Wan 2.1 1.3B with the full UMT5-XXL and VAE: about 15 GB in bfloat16 (the VAE in float32), the text encoder in
shards of at most 5 GB. Every key of the configuration may follow (`model_name=wan-test` makes a few MB). The numbers are
windows into one random block, scaled so that activations keep their size; the videos show noise.

Numbers are written as they are made: memory stays at a few matrices. Made on a CPU machine; no accelerator is used.
"""

from __future__ import annotations

import functools
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np
import sentencepiece

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

from MaxText import pyconfig  # noqa: E402
from MaxText.checkpoints import diffusers_folder, export, names  # noqa: E402
from MaxText.checkpoints.contents import Folder  # noqa: E402

# So many random numbers are made, fewer for small models; every array is a window into copies of them.
MIN_BLOCK, MAX_BLOCK = 1 << 16, 1 << 24

CORPUS = "a red ball moves slowly right over the snow while a cat runs behind the green mountain and blue rivers rise"


class RandomLeaves(Mapping):
  """Leaves of a component by path, made when asked for: views that take the memory of one layer.

  Layers are windows at different offsets, so no two are alike; so are the rows of an embedding table.
  """

  def __init__(self, rows: Sequence[names.Tensor], dtype: np.dtype, seed: int):
    self.shapes = names.leaf_shapes(tuple(rows))
    self.rows = {row.path: row for row in rows}
    self.dtype = dtype
    size = np.clip(max(math.prod(row.shape) for row in rows), MIN_BLOCK, MAX_BLOCK)
    self.block = np.random.default_rng(seed).standard_normal(size, np.float32)
    self.scaled = functools.cache(lambda scale: (self.block * np.float32(scale)).astype(dtype))

  def __iter__(self):
    return iter(self.shapes)

  def __len__(self):
    return len(self.shapes)

  def __getitem__(self, path: str) -> np.ndarray:
    row, shape = self.rows[path], self.shapes[path]
    if path.endswith(".scale"):
      return np.broadcast_to(np.ones((), self.dtype), shape)
    numbers = self.scaled(scale_of(path, row.our_shape))
    if path.endswith(".embedding"):
      return windows(numbers, shape, (len(numbers) - shape[1]) // shape[0])
    num_layers = 1 if row.layer is None else shape[0]
    size, step = math.prod(row.shape), 4099  # a prime, so that layers do not line up with rows
    numbers = np.resize(numbers, size + step * num_layers)
    # Dense in the file's layout and a transposed view in ours, so that writing is a plain copy.
    theirs = windows(numbers, (num_layers, size), step).reshape(num_layers, *row.shape)
    return theirs.transpose(0, *(1 + axis for axis in row.order)).reshape(shape)


def scale_of(path: str, shape: Sequence[int]) -> float:
  """Standard deviation that keeps activations at about the size they come in with."""
  if path.endswith(".bias"):
    return 0.02
  if path.endswith("relative_bias"):
    return 0.1
  if path.endswith("scale_shift_table"):
    return shape[-1] ** -0.5
  if path.endswith(".embedding"):
    return 1.0
  # UMT5 does not divide its scores by sqrt(head dim), 8 at full size; its queries do it.
  return math.prod(shape[:-1]) ** -0.5 / (8 if path.endswith("attention.q.kernel") else 1)


def windows(numbers: np.ndarray, shape: tuple[int, int], step: int) -> np.ndarray:
  """Rows of `shape[1]` numbers, each `step` after the last; a view."""
  return np.lib.stride_tricks.as_strided(numbers, shape, (step * numbers.itemsize, numbers.itemsize), writeable=False)


def write_tokenizer(path: str):
  """Trains a small sentencepiece vocabulary with UMT5's special ids, and bytes, so that it can spell any prompt."""
  rng = np.random.default_rng(0)
  lines = [" ".join(rng.choice(CORPUS.split(), 9)) for _ in range(400)]
  with open(os.path.join(path, "spiece.model"), "wb") as stream:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter(lines), model_writer=stream, vocab_size=380, hard_vocab_limit=False, byte_fallback=True,
      pad_id=0, eos_id=1, bos_id=2, unk_id=3, minloglevel=2,
    )
  specials = {str(i): {"content": text, "normalized": False, "special": True} for i, text in
              enumerate(("<pad>", "</s>", "<s>", "<unk>"))}
  with open(os.path.join(path, "tokenizer_config.json"), "w", encoding="utf-8") as stream:
    json.dump({"tokenizer_class": "T5Tokenizer", "extra_ids": 0, "model_max_length": 512, "eos_token": "</s>",
               "unk_token": "<unk>", "pad_token": "<pad>", "added_tokens_decoder": specials}, stream, indent=2)


def write_folder(config: pyconfig.Config, path: str, shard_bytes: int = export.SHARD_BYTES):
  """Writes the folder that `config` describes.

  Args:
    config: architecture, `weight_dtype` of the transformers and the text encoder, `flow_shift`, `seed`.
    path: a folder that does not exist.
    shard_bytes: largest shard.
  """
  os.makedirs(os.path.join(path, "tokenizer"))
  folder = Folder(
    path=path, format="diffusers", wan=config.wan(), vae=config.vae(), umt5=config.umt5(), num_experts=config.num_experts,
    boundary_ratio=config.boundary_ratio, flow_shift=config.flow_shift,
    tokenizer_path=os.path.join(path, "tokenizer", "spiece.model"), stored={}, configs={},
  )
  export.write_configs(folder, path, config.flow_shift)
  write_tokenizer(os.path.join(path, "tokenizer"))
  for i, component in enumerate(folder.components):
    rows = names.tensors(component, folder.architecture(component))
    dtype = np.dtype(ml_dtypes.bfloat16 if config.weight_dtype == "bfloat16" and component != "vae" else np.float32)
    leaves = RandomLeaves(rows, dtype, config.seed + i)
    print(f"{component}: {sum(math.prod(row.shape) for row in rows):,} parameters in {len(rows):,} tensors", flush=True)
    export.write_shards(os.path.join(path, component), diffusers_folder.STEMS[component], rows, leaves,
                        {row.name: dtype for row in rows}, shard_bytes)


@pyconfig.run_main
def main(argv: Sequence[str]):
  if {"-h", "--help"} & set(argv):
    print(__doc__)
    return
  if not argv or "=" in argv[0]:
    raise pyconfig.ConfigError("the first argument must be the folder to write; --help explains")
  path, *keys = argv
  if os.path.exists(path):
    raise pyconfig.ConfigError(f"{path} exists; give a new folder")
  video = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "configs", "video.yml")
  write_folder(pyconfig.initialize([video, *keys], command="make_random_wan_folder"), path)


if __name__ == "__main__":
  sys.exit(main())
