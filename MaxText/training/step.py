"""One training step, a pure function of its arguments: loss, gradient, update.

Random numbers of a sample depend on (seed, step, its place in the global batch) alone: neither on the mesh nor on how
many parts the batch is worked through in.

Dimensions: B samples, A parts of a batch (gradient accumulation), M = B / A samples of a part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from MaxText.parallel import sharding
from MaxText.training import state as state_lib
from MaxText.training.objectives import Batch, Objective, make_objective
from MaxText.training.state import Template, TrainState

STATISTICS_DECAY = 0.99  # of the running averages, once that many steps have passed


@dataclasses.dataclass(frozen=True)
class Recipe:
  """All static choices of a step. `seed` is that of the run."""

  objective: Objective
  accumulation: int
  ema_decay: float
  seed: int


def make_recipe(config, placement: sharding.Placement) -> Recipe:
  """The choices of a configuration on a mesh."""
  return Recipe(objective=make_objective(config, placement), accumulation=config.gradient_accumulation_steps,
                ema_decay=config.ema_decay, seed=config.seed)


def train_step(
  template: Template, optimizer: optax.GradientTransformation, recipe: Recipe, state: TrainState, kept: state_lib.Weights,
  batch: Batch, empty: Batch,
) -> tuple[TrainState, dict[str, jax.Array]]:
  """One optimizer step.

  Args:
    template, optimizer, recipe: static.
    state: of the last step. kept: weights that are not trained (empty unless a LoRA is).
    batch, empty: what the objective reads, and the empty prompt.
  Returns:
    the next state, and the metrics "loss", "gradient_norm" (before clipping) and the objective's own, float32 scalars.
  """
  samples, parts = len(jax.tree.leaves(batch)[0]), recipe.accumulation
  step_key = jax.random.fold_in(jax.random.key(recipe.seed % 2**32), recipe.seed >> 32)
  keys_B = jax.random.split(jax.random.fold_in(step_key, state.step), samples)
  # Sample b goes to part b % A: so every device works on its own samples in every part, and none travels.
  parted = jax.tree.map(lambda x: _parted(x, parts), {**batch, "keys": keys_B})

  def loss_of_part(weights, part):
    models = template.merge({**kept, **weights})
    return recipe.objective.loss(models, part, part["keys"], empty)

  gradient_of_part = jax.value_and_grad(loss_of_part, has_aux=True)
  if parts == 1:
    (loss, measured), gradient = gradient_of_part(state.weights, jax.tree.map(lambda x: x[0], parted))
  else:
    def add(total, part):
      return jax.tree.map(jnp.add, total, gradient_of_part(state.weights, part)), None

    first = jax.eval_shape(gradient_of_part, state.weights, jax.tree.map(lambda x: x[0], parted))
    zero = (jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), first[0]), jax.tree.map(jnp.zeros_like, state.weights))
    total, _ = jax.lax.scan(add, zero, parted)
    (loss, measured), gradient = jax.tree.map(lambda x: x / parts, total)

  with jax.named_scope("optimizer"):
    updates, optimizer_state = optimizer.update(gradient, state.optimizer, state.weights)
    weights = optax.apply_updates(state.weights, updates)
    ema = None if state.ema is None else jax.tree.map(
      lambda old, new: recipe.ema_decay * old + (1 - recipe.ema_decay) * new, state.ema, weights)
    decay = jnp.minimum(STATISTICS_DECAY, state.step / (state.step + 1))  # the first steps count alike
    statistics = jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, state.statistics, measured.statistics)
    metrics = {"loss": loss, "gradient_norm": optax.tree.norm(gradient), **measured.metrics}
    return TrainState(state.step + 1, weights, optimizer_state, ema, statistics), metrics


def eval_step(
  template: Template, recipe: Recipe, buckets: int, weights: state_lib.Weights, kept: state_lib.Weights, batch: Batch,
  number,
) -> jax.Array:
  """The objective's evaluation of a batch.

  Random numbers depend on the seed, `number` (of the batch) and the sample's place in it, so that evaluations at two
  steps differ by the weights alone.
  """
  samples = len(jax.tree.leaves(batch)[0])
  key = jax.random.fold_in(jax.random.key(recipe.seed % 2**32), np.uint32(2**31) + number)  # no step reaches that
  return recipe.objective.evaluate(template.merge({**kept, **weights}), batch, jax.random.split(key, samples), buckets)


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
  """Compiled (state, kept, batch, empty) → (state, metrics); the state passed in is given up."""

  def step(state, kept, batch, empty):
    return train_step(template, optimizer, recipe, state, kept, batch, empty)

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
