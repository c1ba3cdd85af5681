"""What a run minimises: the error of the velocity (the transformer, alone or with the text encoder), or the difference
between a video and its reconstruction (the VAE).

An objective is a frozen choice of everything static. It is asked for the loss of a part of a batch, with one random key a
sample, and for the loss of a whole batch split by noise level, for evaluation.

A clean latent x0 is mixed with noise, x = (1 - sigma) x0 + sigma noise, and the model predicts the velocity noise - x0 at
timestep 1000 sigma, as the sampler asks it to.

Dimensions: B samples, F H W latent frames/rows/columns, C latent channels, T text tokens or video frames, E text width.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.scipy.special import ndtri

from MaxText.attention import Attention, make_attention
from MaxText.attention.ulysses import on_mesh
from MaxText.diffusion.flow_matching import NUM_TRAIN_TIMESTEPS, shift_sigmas
from MaxText.models import vae as vae_lib
from MaxText.parallel import sharding

Batch = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Measured:
  """What a forward pass finds beside the loss.

  Attributes:
    metrics: name → float32 scalar, for the run's lines.
    statistics: name → array, of which the train state keeps a running average.
  """

  metrics: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
  statistics: dict[str, jax.Array] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class NoiseLevels:
  """Distribution of sigma: a uniform number, through the logistic normal if asked for, then shifted.

  Attributes:
    shift: as the sampler's.
    normal: None, or (mean, deviation) of the logit.
    low, high: the part of [0, 1] that sigma is confined to.
  """

  shift: float = 1.0
  normal: tuple[float, float] | None = None
  low: float = 0.0
  high: float = 1.0

  def __post_init__(self):
    if not 0 <= self.low < self.high <= 1:
      raise ValueError(f"noise levels from {self.low} to {self.high}: must be a part of 0 to 1")

  def _cumulative(self, sigma: float) -> float:
    """Share of the whole distribution below sigma."""
    unshifted = sigma / (self.shift - (self.shift - 1) * sigma)
    if self.normal is None or unshifted in (0.0, 1.0):
      return unshifted
    mean, deviation = self.normal
    z = (math.log(unshifted / (1 - unshifted)) - mean) / deviation
    return 0.5 * (1 + math.erf(z / math.sqrt(2)))

  def sigma(self, uniform):
    """Uniform numbers in [0, 1) → sigma, float32, of the same shape."""
    low, high = self._cumulative(self.low), self._cumulative(self.high)
    u = low + (high - low) * uniform
    if self.normal is not None:
      mean, deviation = self.normal
      u = jax.nn.sigmoid(mean + deviation * ndtri(u))
    return shift_sigmas(u, self.shift)


@dataclasses.dataclass(frozen=True)
class FlowMatching:
  """Mean squared error of the velocity.

  Attributes:
    transformer: the component that is trained: 'transformer' or 'transformer_2'.
    levels: distribution of sigma.
    text_dropout: share of samples that see the empty prompt.
    remat: a key of `models.wan.REMAT_POLICIES`, or 'none'.
    attention: of the transformer, dense.
    latent_frames: None, or how many latent frames of each sample are kept, the first and random others, at their own
      temporal positions.
  """

  transformer: str
  levels: NoiseLevels
  text_dropout: float
  remat: str
  attention: Attention
  latent_frames: int | None = None

  def loss(self, models, batch: Batch, keys_B, empty: Batch) -> tuple[jax.Array, Measured]:
    """Loss of a batch, float32 scalar.

    Args:
      models: has the transformer, and, if it is trained too, the text encoder.
      batch: "latents" [B, F, H, W, C] float32, normalised; and either "text" [B, T, E], embeddings with zeros past the
        prompt, or "ids" int32 and "mask" bool [B, T], which the text encoder in `models` embeds.
      keys_B: one random key a sample.
      empty: the empty prompt in the same form, without B, which takes the place of dropped texts.
    """
    keys_3B = jax.vmap(lambda key: jax.random.split(key, 3))(keys_B).swapaxes(0, 1)
    uniform_B = jax.vmap(lambda key: jax.random.uniform(key))(keys_3B[0])
    prompts = {name: batch[name] for name in ("text", "ids", "mask") if name in batch}
    if self.text_dropout:
      dropped_B = jax.vmap(lambda key: jax.random.bernoulli(key, self.text_dropout))(keys_3B[2])
      prompts = {name: _replaced(value, empty[name], dropped_B) for name, value in prompts.items()}
    frames_BK = None
    if self.latent_frames is not None:
      # Rotary positions are relative: with the first frame always there, the others' tell where in the clip they are.
      later = batch["latents"].shape[1] - 1
      shuffled_BF = jax.vmap(lambda key: jax.random.permutation(jax.random.fold_in(key, 3), later))(keys_B)
      frames_BK = jnp.pad(1 + jnp.sort(shuffled_BF[:, : self.latent_frames - 1], axis=1), ((0, 0), (1, 0)))
    losses_B = self.losses(models, batch["latents"], prompts, self.levels.sigma(uniform_B), keys_3B[1], frames_BK)
    return jnp.mean(losses_B), Measured()

  def losses(self, models, latents_BFHWC, prompts: Batch, sigma_B, noise_keys_B, frames_BK=None) -> jax.Array:
    """Mean squared error of each sample at its noise level, float32 [B]; of these K frames alone, or of all."""
    model = getattr(models, self.transformer)
    clip_frames = latents_BFHWC.shape[1]
    if frames_BK is not None:
      latents_BFHWC = jnp.take_along_axis(latents_BFHWC, frames_BK[:, :, None, None, None], axis=1)
    with jax.named_scope("noise"):
      shape = latents_BFHWC.shape[1:]
      noise = jax.vmap(lambda key: jax.random.normal(key, shape, jnp.float32))(noise_keys_B)
      sigma = sigma_B.reshape(-1, *(1,) * len(shape))
      noisy = (1 - sigma) * latents_BFHWC + sigma * noise
    velocity, _ = model(
      noisy, sigma_B * NUM_TRAIN_TIMESTEPS, model.text_keys_values(_embedded(models, prompts)),
      attention=self.attention, cross_attention=self.attention, remat=self.remat,
      frames_BF=frames_BK, clip_frames=clip_frames)
    with jax.named_scope("loss"):
      return jnp.mean(jnp.square(velocity - (noise - latents_BFHWC)), axis=tuple(range(1, velocity.ndim)))

  def evaluate(self, models, batch: Batch, keys_B, buckets: int) -> jax.Array:
    """Loss in each of `buckets` equal parts of the noise levels [low, high], float32 [buckets].

    Within a part the samples' levels are spread evenly, the same at every call.
    """
    samples, levels = batch["latents"].shape[0], self.levels

    def bucket(_, index):
      sigma_B = levels.low + (levels.high - levels.low) * (index + (jnp.arange(samples) + 0.5) / samples) / buckets
      return None, jnp.mean(self.losses(models, batch["latents"], batch, sigma_B, keys_B))

    return jax.lax.scan(bucket, None, jnp.arange(buckets, dtype=jnp.float32))[1]


@dataclasses.dataclass(frozen=True)
class Reconstruction:
  """Error of the decoded video, and the divergence of the latents from a normal distribution.

  The error is the mean absolute one and, weighted, the mean square, both of numbers in [-1, 1].

  Attributes:
    mse_weight: of the mean square.
    kl_weight: of the divergence, a mean over all latent numbers as the error is one over all pixels.
    remat: 'none', or anything else: each chunk of frames is computed again in the backward pass.
    freeze_encoder: whether the decoder alone is trained.
  """

  mse_weight: float
  kl_weight: float
  remat: str
  freeze_encoder: bool

  def loss(self, models, batch: Batch, keys_B, empty: Batch) -> tuple[jax.Array, Measured]:
    """Loss of "video" uint8 [B, T, H, W, 3], float32 scalar; the latents' mean and mean square as statistics.

    With a frozen encoder the latents stay what they are: no divergence, no statistics.
    """
    del empty
    video_BTHW3 = _unit(batch["video"])

    def noise(shape):
      return jax.vmap(lambda key: jax.random.normal(key, shape[1:], jnp.float32))(keys_B)

    video, mean, log_variance = vae_lib.reconstruct(
      models.vae, video_BTHW3, noise, remat=self.remat != "none", freeze_encoder=self.freeze_encoder)
    with jax.named_scope("loss"):
      difference = video - video_BTHW3
      error = jnp.mean(jnp.abs(difference)) + self.mse_weight * jnp.mean(jnp.square(difference))
      divergence = 0.5 * jnp.mean(jnp.square(mean) + jnp.exp(log_variance) - 1 - log_variance)
      positions = tuple(range(mean.ndim - 1))
      metrics = {"psnr": _psnr(video, video_BTHW3), "kl": divergence}
      if self.freeze_encoder:
        return error, Measured(metrics)
      statistics = {"latents_mean": jnp.mean(mean, positions), "latents_square": jnp.mean(jnp.square(mean), positions)}
    return error + self.kl_weight * divergence, Measured(metrics, statistics)

  def evaluate(self, models, batch: Batch, keys_B, buckets: int) -> jax.Array:
    """Mean absolute error through the mean of the latents, as encode_dataset and decode work, float32 [1]."""
    del keys_B, buckets
    video_BTHW3 = _unit(batch["video"])
    video, _, _ = vae_lib.reconstruct(models.vae, video_BTHW3, jnp.zeros, remat=False)
    return jnp.mean(jnp.abs(video - video_BTHW3))[None]


Objective = FlowMatching | Reconstruction


def make_objective(config, placement: sharding.Placement) -> Objective:
  """What a configuration's train_target asks for."""
  if config.train_target == "vae":
    return Reconstruction(config.vae_mse_weight, config.vae_kl_weight, config.remat_policy, config.vae_freeze_encoder)
  low, high = {None: (0.0, 1.0), "high_noise": (config.boundary_ratio, 1.0), "low_noise": (0.0, config.boundary_ratio)}[
    config.train_expert]
  logit_normal = config.timestep_sampling == "logit_normal"
  normal = (config.logit_normal_mean, config.logit_normal_std) if logit_normal else None
  return FlowMatching(
    transformer="transformer_2" if config.train_expert == "low_noise" else "transformer",
    levels=NoiseLevels(config.flow_shift, normal, low, high), text_dropout=config.text_dropout, remat=config.remat_policy,
    attention=on_mesh(make_attention(config, placement.mesh, training=True), placement),
    latent_frames=config.train_latent_frames)


def _embedded(models: nnx.Module, prompts: Batch) -> jax.Array:
  """Text embeddings float32 [B, T, E], zeros past each prompt."""
  if "text" in prompts:
    return prompts["text"].astype(jnp.float32)
  text_BTE = models.text_encoder.encode(prompts["ids"], prompts["mask"])
  return jnp.where(prompts["mask"][:, :, None], text_BTE, 0).astype(jnp.float32)


def _replaced(values_BT, empty_T, dropped_B) -> jax.Array:
  """The empty prompt, cut or filled with zeros to T, where a sample's text is dropped."""
  num_tokens = values_BT.shape[1]
  rest = ((0, max(0, num_tokens - len(empty_T))), *((0, 0) for _ in empty_T.shape[1:]))
  padded_T = jnp.pad(empty_T[:num_tokens], rest).astype(values_BT.dtype)
  return jnp.where(dropped_B.reshape(-1, *(1,) * padded_T.ndim), padded_T, values_BT)


def _unit(video_uint8) -> jax.Array:
  return video_uint8.astype(jnp.float32) / 127.5 - 1.0


def _psnr(video, target) -> jax.Array:
  """dB, pooled over the batch, of numbers in [-1, 1]; as decode will clip them."""
  error = jnp.mean(jnp.square(jnp.clip(video, -1.0, 1.0) - target))
  return 10 * jnp.log10(4.0 / jnp.maximum(error, 1e-10))
