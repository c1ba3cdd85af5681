"""What a step is fed: the global batch and the empty prompt, as arrays, or as shapes that a program is compiled for.

Dimensions: B samples of the global batch, F H W latent frames/rows/columns, C latent channels, T text tokens, t those of
the empty prompt, E text width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from MaxText import pyconfig
from MaxText.attention.ulysses import check_parallel
from MaxText.config_types import ConfigError
from MaxText.input_pipeline import clips
from MaxText.models.tokenizer import EOS_ID
from MaxText.parallel.sharding import BATCH, Placement


def check_mesh(config, placement: Placement) -> None:
  """Refuses a batch, heads or tokens that the mesh cannot share out.

  Raises:
    ValueError: names the key and what would fit.
  """
  ways = 1
  for axis in placement.mesh_axes(BATCH):
    ways *= placement.mesh.shape[axis]
  part = config.global_batch_size // config.gradient_accumulation_steps
  if part % ways:
    unit = ways * config.gradient_accumulation_steps
    fits = sorted({max(unit, config.global_batch_size // unit * unit), -(-config.global_batch_size // unit) * unit})
    raise ConfigError(
      f"global_batch_size={config.global_batch_size}: its parts of {part} (gradient_accumulation_steps="
      f"{config.gradient_accumulation_steps}) do not divide over the {ways} devices along data and fsdp; nearest: "
      f"{' or '.join(map(str, fits))}, or spread devices over ici_context_parallelism")
  if placement.mesh.size > 1 and config.train_target != "vae":
    for height, width in clips.sizes(config):
      check_parallel(
        strategy=config.context_parallel_strategy, num_heads=config.num_heads, num_frames=config.num_frames,
        height=height, width=width, placement=placement)


def global_batch(local: dict[str, Any], placement: Placement) -> dict[str, Any]:
  """This host's rows → global arrays, samples spread over data and fsdp."""

  def place(array):
    shape = (len(array) * jax.process_count(), *array.shape[1:])
    return jax.make_array_from_process_local_data(_sharding(placement, shape), array)

  return {key: place(array) for key, array in local.items()}


def abstract_batches(config, placement: Placement) -> Iterator[dict[str, jax.ShapeDtypeStruct]]:
  """What `global_batch` makes of a configuration's batches, without data: one for every size of clips.

  Which dataset_type the rows come from makes no difference: all give what `input_pipeline.make_iterator` promises.
  """
  batch, (_, stride) = config.global_batch_size, config.vae_strides
  for height, width in clips.sizes(config):
    if config.train_target == "vae":
      rows = {"video": ((config.num_frames, height, width, 3), jnp.uint8)}
    else:
      latents = (config.latent_grid[0], height // stride, width // stride, config.in_channels)
      rows = {"latents": (latents, jnp.float32)}
    if config.train_target == "dit":
      rows["text"] = ((config.text_length, config.text_dim), jnp.float32)
    elif config.train_target == "text":
      rows |= {"ids": ((config.text_length,), jnp.int32), "mask": ((config.text_length,), jnp.bool)}
    yield {key: jax.ShapeDtypeStruct((batch, *shape), dtype, sharding=_sharding(placement, (batch, *shape)))
           for key, (shape, dtype) in rows.items()}


def empty_prompt(config, placement: Placement) -> dict[str, Any]:
  """The empty prompt, which takes the place of dropped texts and which decode's unconditional half reads too.

  {"text": float32 [t, E]}, or {"ids": int32 [t], "mask": bool [t]} where the text encoder is trained; zeros where there
  is no text to drop.
  """
  value = {"text": np.zeros((1, config.text_dim), np.float32)}
  if config.train_target == "text":
    value = {"ids": np.array([EOS_ID], np.int32), "mask": np.ones(1, bool)}  # the end token alone
  elif config.text_dropout and config.train_target == "dit" and config.dataset_type == "latents":
    from MaxText.input_pipeline.records import open_dataset

    with pyconfig.input_errors(f"dataset_path={config.dataset_path}"):
      value = {"text": open_dataset(config.dataset_path).empty_text().astype(np.float32)}
  elif config.text_dropout and config.train_target == "dit" and config.dataset_type == "video":
    from MaxText.input_pipeline.encode import Encoders

    value = {"text": Encoders(config).texts([""])[""].astype(np.float32)}
  return jax.device_put(value, placement.replicated)


def abstract_empty_prompt(config, placement: Placement) -> dict[str, jax.ShapeDtypeStruct]:
  """The shapes of `empty_prompt`, whose only token is the end token (t = 1)."""
  rows = {"text": ((1, config.text_dim), jnp.float32)}
  if config.train_target == "text":
    rows = {"ids": ((1,), jnp.int32), "mask": ((1,), jnp.bool)}
  return {key: jax.ShapeDtypeStruct(shape, dtype, sharding=placement.replicated) for key, (shape, dtype) in rows.items()}


def _sharding(placement: Placement, shape: tuple[int, ...]) -> jax.sharding.NamedSharding:
  return placement.sharding((BATCH, *(None,) * (len(shape) - 1)), shape)
