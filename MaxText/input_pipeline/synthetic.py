"""Random latents, texts and videos, for benchmarks and tests: the shapes of real data without files.

Dimensions: B samples of this host, F H W latent frames/rows/columns, C latent channels, T text tokens, E text width.
"""

from __future__ import annotations

import functools

import grain
import numpy as np

from MaxText.input_pipeline.grain_source import process_rows
from MaxText.parallel.sharding import Placement

NUM_SAMPLES = 16  # different ones; then they come again, so that a model can learn them
TEXT_LENGTH = 32  # tokens of a prompt; zeros follow, as after a real one


def sample(config, split: str, number: int) -> dict[str, np.ndarray]:
  """Sample `number` of what train_target reads, without its batch dimension; see `input_pipeline.make_iterator`."""
  draw = np.random.default_rng([config.seed, split == "eval", number])
  if config.train_target == "vae":
    shape = (config.num_frames, config.height, config.width, 3)
    return {"video": draw.integers(0, 256, shape, np.uint8)}
  latents = draw.standard_normal((*config.latent_grid, config.in_channels), np.float32)
  mask = np.arange(config.text_length) < TEXT_LENGTH
  if config.train_target == "text":
    ids = draw.integers(0, config.text_vocab_size, config.text_length, np.int32)
    return {"latents": latents, "ids": np.where(mask, ids, 0).astype(np.int32), "mask": mask}
  text = np.zeros((config.text_length, config.text_dim), np.float32)
  text[mask] = draw.standard_normal((mask.sum(), config.text_dim), np.float32)
  return {"latents": latents, "text": text}


def make_iterator(config, placement: Placement, split: str) -> grain.DatasetIterator:
  """Endless batches of this host's rows of the global batch.

  Which samples make a global batch depends on the seed alone, not on the number of hosts.
  """
  rows_B = process_rows(config, placement)
  made = functools.lru_cache(maxsize=NUM_SAMPLES)(lambda number: sample(config, split, number))

  def batch(number: int) -> dict[str, np.ndarray]:
    samples = [made((number * config.global_batch_size + int(row)) % NUM_SAMPLES) for row in rows_B]
    return {key: np.stack([each[key] for each in samples]) for key in samples[0]}

  # A batch may be large: two are made ahead, not Grain's five hundred.
  options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
  return iter(grain.MapDataset.range(2**31).map(batch).to_iter_dataset(options))
