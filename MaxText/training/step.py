"""One training step, a pure function of its arguments: noise, velocity loss, gradient, update.

A clean latent x0 is mixed with noise, x = (1 - sigma) x0 + sigma noise, and the model predicts the velocity noise - x0 at
timestep 1000 sigma, as the sampler asks it to. Random numbers of a sample depend on (seed, step, its place in the global
batch) alone: neither on the mesh nor on how many parts the batch is worked through in.

Dimensions: B samples, F H W latent frames/rows/columns, C latent channels, T text tokens, E text width, A parts of a
batch (gradient accumulation), M = B / A samples of a part.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.scipy.special import ndtri
from jax.sharding import PartitionSpec

from MaxText.attention import Attention, make_attention
from MaxText.attention.ulysses import on_mesh
from MaxText.diffusion.flow_matching import NUM_TRAIN_TIMESTEPS, shift_sigmas
from MaxText.parallel import sharding
from MaxText.training import state as state_lib
from MaxText.training.state import Template, TrainState

Batch = dict[str, jax.Array]


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
class Recipe:
  """All static choices of a step. `seed` is that of the run."""

  levels: NoiseLevels
  text_dropout: float
  accumulation: int
  ema_decay: float
  remat: str
  attention: Attention
  seed: int


def make_recipe(config, placement: sharding.Placement) -> Recipe:
  """The choices of a configuration on a mesh."""
  low, high = {None: (0.0, 1.0), "high_noise": (config.boundary_ratio, 1.0), "low_noise": (0.0, config.boundary_ratio)}[
    config.train_expert]
  logit_normal = config.timestep_sampling == "logit_normal"
  normal = (config.logit_normal_mean, config.logit_normal_std) if logit_normal else None
  return Recipe(
    levels=NoiseLevels(config.flow_shift, normal, low, high), text_dropout=config.text_dropout,
    accumulation=config.gradient_accumulation_steps, ema_decay=config.ema_decay, remat=config.remat_policy,
    attention=on_mesh(make_attention(config, placement.mesh, training=True), placement), seed=config.seed)


def velocity_losses(model, latents_BFHWC, text_BTE, sigma_B, noise_keys_B, recipe: Recipe):
  """Mean squared error of the velocity of each sample, float32 [B]."""
  with jax.named_scope("noise"):
    shape = latents_BFHWC.shape[1:]
    noise = jax.vmap(lambda key: jax.random.normal(key, shape, jnp.float32))(noise_keys_B)
    sigma = sigma_B.reshape(-1, *(1,) * len(shape))
    noisy = (1 - sigma) * latents_BFHWC + sigma * noise
  velocity, _ = model(
    noisy, sigma_B * NUM_TRAIN_TIMESTEPS, model.text_keys_values(text_BTE), attention=recipe.attention,
    cross_attention=recipe.attention, remat=recipe.remat)
  with jax.named_scope("loss"):
    return jnp.mean(jnp.square(velocity - (noise - latents_BFHWC)), axis=tuple(range(1, velocity.ndim)))


def train_step(
  template: Template, optimizer: optax.GradientTransformation, recipe: Recipe, state: TrainState, kept: state_lib.Weights,
  batch: Batch, empty_text_TE,
) -> tuple[TrainState, dict[str, jax.Array]]:
  """One optimizer step.

  Args:
    template, optimizer, recipe: static.
    state: of the last step. kept: weights that are not trained (empty unless a LoRA is).
    batch: "latents" [B, F, H, W, C] float32, normalised; "text" [B, T, E], zeros past the prompt.
    empty_text_TE: embedding of the empty prompt, which takes the place of dropped texts; zeros follow it.
  Returns:
    the next state, and the metrics "loss" and "gradient_norm" (before clipping), float32 scalars.
  """
  samples, parts = batch["latents"].shape[0], recipe.accumulation
  step_key = jax.random.fold_in(jax.random.key(recipe.seed % 2**32), recipe.seed >> 32)
  keys_B = jax.random.split(jax.random.fold_in(step_key, state.step), samples)
  # Sample b goes to part b % A: so every device works on its own samples in every part, and none travels.
  parted = jax.tree.map(lambda x: _parted(x, parts), {**batch, "keys": keys_B})

  def loss_of_part(weights, part):
    keys_3M = jax.vmap(lambda key: jax.random.split(key, 3))(part["keys"]).swapaxes(0, 1)
    uniform_M = jax.vmap(lambda key: jax.random.uniform(key))(keys_3M[0])
    text = part["text"].astype(jnp.float32)
    if recipe.text_dropout:
      dropped_M = jax.vmap(lambda key: jax.random.bernoulli(key, recipe.text_dropout))(keys_3M[2])
      num_tokens = text.shape[1]
      padded_TE = jnp.pad(empty_text_TE[:num_tokens], ((0, max(0, num_tokens - len(empty_text_TE))), (0, 0)))
      text = jnp.where(dropped_M[:, None, None], padded_TE, text)
    model = template.merge({**kept, **weights})
    losses = velocity_losses(model, part["latents"], text, recipe.levels.sigma(uniform_M), keys_3M[1], recipe)
    return jnp.mean(losses)

  gradient_of_part = jax.value_and_grad(loss_of_part)
  if parts == 1:
    loss, gradient = gradient_of_part(state.weights, jax.tree.map(lambda x: x[0], parted))
  else:
    def add(total, part):
      return jax.tree.map(jnp.add, total, gradient_of_part(state.weights, part)), None

    zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.weights))
    total, _ = jax.lax.scan(add, zero, parted)
    loss, gradient = jax.tree.map(lambda x: x / parts, total)

  with jax.named_scope("optimizer"):
    updates, optimizer_state = optimizer.update(gradient, state.optimizer, state.weights)
    weights = optax.apply_updates(state.weights, updates)
    ema = None if state.ema is None else jax.tree.map(
      lambda old, new: recipe.ema_decay * old + (1 - recipe.ema_decay) * new, state.ema, weights)
    metrics = {"loss": loss, "gradient_norm": optax.tree.norm(gradient)}
    return TrainState(state.step + 1, weights, optimizer_state, ema), metrics


def eval_step(
  template: Template, recipe: Recipe, buckets: int, weights: state_lib.Weights, kept: state_lib.Weights, batch: Batch,
  number,
) -> jax.Array:
  """Loss of a batch in each of `buckets` equal parts of the noise levels [low, high], float32 [buckets].

  Levels and noise depend on the seed, `number` (of the batch) and the sample's place in it, so that evaluations at two
  steps differ by the weights alone. Within a bucket the samples' levels are spread evenly.
  """
  samples, levels = batch["latents"].shape[0], recipe.levels
  key = jax.random.fold_in(jax.random.key(recipe.seed % 2**32), np.uint32(2**31) + number)  # no step reaches that
  keys_B = jax.random.split(key, samples)
  model = template.merge({**kept, **weights})

  def bucket(_, index):
    sigma_B = levels.low + (levels.high - levels.low) * (index + (jnp.arange(samples) + 0.5) / samples) / buckets
    return None, jnp.mean(velocity_losses(model, batch["latents"], batch["text"], sigma_B, keys_B, recipe))

  return jax.lax.scan(bucket, None, jnp.arange(buckets, dtype=jnp.float32))[1]


def _parted(x_B, parts: int):
  """[B, …] → [A, M, …], the samples of a part spread over the devices."""
  x_AM = jnp.swapaxes(x_B.reshape(-1, parts, *x_B.shape[1:]), 0, 1)
  placement = sharding.active()
  if placement is None or placement.mesh.size == 1:
    return x_AM
  batch = placement.spec((sharding.BATCH,), x_AM.shape[1:2])
  where = jax.sharding.NamedSharding(placement.mesh, PartitionSpec(None, *batch))
  return jax.lax.with_sharding_constraint(x_AM, where)


def jit_train_step(
  template: Template, optimizer: optax.GradientTransformation, recipe: Recipe, abstract: TrainState,
  placement: sharding.Placement,
) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
  """Compiled (state, kept, batch, empty_text_TE) → (state, metrics); the state passed in is given up."""

  def step(state, kept, batch, empty_text_TE):
    return train_step(template, optimizer, recipe, state, kept, batch, empty_text_TE)

  return _jit(step, placement, (_shardings(abstract), placement.replicated), donate_argnums=0)


def jit_eval_step(template: Template, recipe: Recipe, buckets: int, placement: sharding.Placement) -> Callable[..., Any]:
  """Compiled (weights, kept, batch, number) → losses of the buckets."""

  def step(weights, kept, batch, number):
    return eval_step(template, recipe, buckets, weights, kept, batch, number)

  return _jit(step, placement, placement.replicated)


def _shardings(abstract: Any) -> Any:
  return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def _jit(function: Callable, placement: sharding.Placement, out_shardings: Any, **options: Any) -> Callable:
  def traced(*arguments):
    with sharding.mesh_rules(placement):
      return function(*arguments)

  return jax.jit(traced, out_shardings=out_shardings, **options)
