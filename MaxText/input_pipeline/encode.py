"""Clips to latents and captions to embeddings, with the weights that decode uses, on the configuration's mesh.

The text encoder is sharded like a model; the VAE is small, so every device holds it and encodes clips of its own.

Dimensions: B clips, T video frames (of text: tokens), F H W latent frames/rows/columns, C latent channels, E text width.
"""

from __future__ import annotations

import contextlib
import hashlib
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from MaxText.checkpoints import export
from MaxText.checkpoints import folder as folder_lib
from MaxText.models.tokenizer import Tokenizer
from MaxText.models.umt5 import Umt5Encoder, encode_prompts, jitted_encode
from MaxText.models.vae import WanVae, encode_video
from MaxText.parallel import mesh as mesh_lib
from MaxText.parallel import sharding

PROMPTS_A_BATCH = 4  # captions encoded together
FINGERPRINTED = 2**16  # elements; larger tensors are left out of a fingerprint


class Encoders:
  """The VAE and the text encoder of a configuration, both loaded. Random weights where no folder is given.

  Of several processes each has encoders of its own, spread over its own devices: what one encodes is no other's business.

  Raises:
    ValueError: sizes that the mesh or the folder does not fit.
  """

  def __init__(self, config):
    self.config = config
    if config.jax_cache_dir:
      jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(config.jax_cache_dir).expanduser()))
    mesh = mesh_lib.make_mesh(config) if jax.process_count() == 1 else _local_mesh()
    self.placement = sharding.Placement(mesh, sharding.parse_rules(config.logical_axis_rules))
    dtypes = {"dtype": jnp.dtype(config.dtype), "weight_dtype": jnp.dtype(config.weight_dtype)}
    whole = sharding.Placement(self.placement.mesh, ((sharding.BATCH, self.placement.mesh_axes(sharding.BATCH)),))
    self._vae_placement = whole
    self.vae = self._load("vae", lambda: WanVae(config.vae(), rngs=nnx.Rngs(0), **dtypes), whole)
    self.text_encoder: Umt5Encoder | None = None
    self.tokenizer: Tokenizer | None = None
    if config.folder is not None:
      self.tokenizer = Tokenizer(str(pathlib.Path(config.folder.tokenizer_path).parent))
      # As in decode: weights that are stored in bfloat16 stay so, since each layer is cast when it is used.
      if set(export.stored_dtypes(config.folder, "text_encoder").values()) == {np.dtype(jnp.bfloat16)}:
        dtypes["weight_dtype"] = jnp.dtype(jnp.bfloat16)
      with self._on_mesh():
        self.text_encoder = self._load(
          "text_encoder", lambda: Umt5Encoder(config.umt5(), rngs=nnx.Rngs(0), **dtypes), self.placement)

  @contextlib.contextmanager
  def _on_mesh(self):
    with jax.set_mesh(self.placement.mesh), sharding.mesh_rules(self.placement):
      yield

  def _load(self, component: str, make: Callable[[], nnx.Module], placement: sharding.Placement) -> nnx.Module:
    if self.config.folder is None:
      return sharding.init_sharded(make, placement)
    graphdef, abstract = nnx.split(nnx.eval_shape(make))
    abstract = sharding.sharded_abstract(abstract, placement)
    return nnx.merge(graphdef, folder_lib.load(self.config.folder, component, abstract))

  def fingerprints(self) -> dict[str, str]:
    """Names the weights: equal for equal weights, whatever their format and number type."""
    return {name: _fingerprint(module) if module is not None else "random"
            for name, module in (("vae", self.vae), ("text_encoder", self.text_encoder))}

  def texts(self, captions: Sequence[str]) -> dict[str, np.ndarray]:
    """Embeddings of captions without their padding: text → float32 [T, E], T as long as the text.

    Without weights there is no vocabulary: the embeddings are random numbers seeded by the text, as decode has them.
    """
    distinct = list(dict.fromkeys(captions))
    if self.text_encoder is None:
      shape = (self.config.text_length, self.config.text_dim)
      return {text: np.random.default_rng(list(text.encode())).standard_normal(shape, np.float32) for text in distinct}
    embedded: dict[str, np.ndarray] = {}
    with self._on_mesh():
      for start in range(0, len(distinct), PROMPTS_A_BATCH):
        group = distinct[start:start + PROMPTS_A_BATCH]
        lengths = self.tokenizer(group).mask.sum(axis=1)
        full = [*group, *[group[-1]] * (PROMPTS_A_BATCH - len(group))]  # one shape, one compiled program
        values = np.asarray(encode_prompts(self.text_encoder, self.tokenizer, full)).astype(np.float32)
        embedded.update({text: value[:length] for text, value, length in zip(group, values, lengths, strict=False)})
    return embedded

  def token_embeddings(self, ids_BT: np.ndarray, mask_BT: np.ndarray) -> np.ndarray:
    """Token ids → float32 [B, T, E], zeros past each prompt."""
    graph, state = nnx.split(self.text_encoder)
    with self._on_mesh():
      return np.asarray(jitted_encode(jax.default_backend())(graph, state, ids_BT, mask_BT), np.float32)

  def latents(self, video_BTHW3: np.ndarray) -> np.ndarray:
    """uint8 clips → normalised latents, float32 [B, F, H, W, C] on the host."""
    frames = _Frames(video_BTHW3, self._vae_placement)
    return np.asarray(encode_video(
      self.vae, frames, tile_size=self.config.vae_tile_size, tile_overlap=self.config.vae_tile_overlap), np.float32)


def _local_mesh() -> jax.sharding.Mesh:
  """All devices of this process, which share out samples and weights."""
  devices = np.array(jax.local_devices()).reshape(1, -1, 1, 1)
  return jax.sharding.Mesh(devices, mesh_lib.AXES, axis_types=(jax.sharding.AxisType.Auto,) * len(mesh_lib.AXES))


class _Frames:
  """uint8 clips that become numbers in [-1, 1] on the devices a chunk at a time, clips spread over the devices."""

  def __init__(self, video_BTHW3: np.ndarray, placement: sharding.Placement):
    self._video, self._placement = video_BTHW3, placement
    self.shape, self.ndim = video_BTHW3.shape, video_BTHW3.ndim

  def __getitem__(self, index) -> jax.Array:
    chunk = self._video[index].astype(np.float32) / 127.5 - 1.0
    return jax.device_put(chunk, self._placement.sharding((sharding.BATCH, None, None, None, None), chunk.shape))


def _fingerprint(module: nnx.Module) -> str:
  digest = hashlib.sha256(repr(module.config).encode())
  for path, leaf in sorted(nnx.to_flat_state(nnx.state(module)), key=lambda item: tuple(map(str, item[0]))):
    value: Any = leaf.get_value()
    if value.size <= FINGERPRINTED:
      digest.update(".".join(map(str, path)).encode())
      digest.update(np.asarray(value).astype(ml_dtypes.bfloat16).tobytes())
  return digest.hexdigest()[:32]
