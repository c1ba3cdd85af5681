"""Random latents and texts, for benchmarks and tests: the shapes of real data without files.

Dimensions: B samples of this host, F H W latent frames/rows/columns, C latent channels, T text tokens, E text width.
"""

from __future__ import annotations

import functools

import grain
import jax
import numpy as np

NUM_SAMPLES = 16  # different ones; then they come again, so that a model can learn them
TEXT_TOKENS = 512
TEXT_LENGTH = 32  # tokens of a prompt; zeros follow, as after a real one


@functools.lru_cache(maxsize=2 * NUM_SAMPLES)
def sample(seed: int, split: str, number: int, latent_shape: tuple[int, ...], text_dim: int) -> dict[str, np.ndarray]:
  """Sample `number`: {"latents": float32 [F, H, W, C], "text": float32 [T, E]}."""
  draw = np.random.default_rng([seed, split == "eval", number])
  text = np.zeros((TEXT_TOKENS, text_dim), np.float32)
  text[:TEXT_LENGTH] = draw.standard_normal((TEXT_LENGTH, text_dim), np.float32)
  return {"latents": draw.standard_normal(latent_shape, np.float32), "text": text}


def make_iterator(config, split: str) -> grain.DatasetIterator:
  """Endless batches of this host's rows of the global batch: {"latents": [B, F, H, W, C], "text": [B, T, E]} float32.

  Which samples make a global batch depends on the seed alone, not on the number of hosts.
  """
  share = config.global_batch_size // jax.process_count()
  first = jax.process_index() * share
  shape = (*config.latent_grid, config.in_channels)

  def batch(number: int) -> dict[str, np.ndarray]:
    rows = [(number * config.global_batch_size + first + row) % NUM_SAMPLES for row in range(share)]
    samples = [sample(config.seed, split, row, shape, config.text_dim) for row in rows]
    return {key: np.stack([each[key] for each in samples]) for key in samples[0]}

  # A batch may be large: two are made ahead, not Grain's five hundred.
  options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
  return iter(grain.MapDataset.range(2**31).map(batch).to_iter_dataset(options))
