"""What training changes from step to step, and how it is made: weights, optimizer, average.

Weights are a plain mapping of dotted names to arrays: the component, then the name that its checkpoints use
("transformer.blocks.attn1.to_q.kernel"). A `Template` turns such a mapping back into the models. What is trained (all
weights, or the adapters of a LoRA) is float32; what stays is a second mapping of its own, so that no optimizer state or
gradient is made for it.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from optax import contrib

from MaxText.models.umt5 import Umt5Encoder
from MaxText.models.vae import WanVae
from MaxText.models.wan import WanTransformer
from MaxText.parallel import sharding

Weights = dict[str, jax.Array]
VAE_ENDS = ("conv_in", "conv_out", "quant_conv", "post_quant_conv")  # its first and last layers
LORA_SUFFIXES = (".lora_A", ".lora_B")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """What a step changes.

  Attributes:
    step: int32 scalar.
    weights: what is trained. optimizer: its state. ema: the weights' average, or None.
    statistics: running averages of what the objective measures; for the VAE the mean and mean square of the latents.
  """

  step: jax.Array
  weights: Weights
  optimizer: Any
  ema: Weights | None
  statistics: dict[str, jax.Array]


class Models(nnx.Module):
  """The components that a run works on, as attributes: transformer, transformer_2, text_encoder, vae."""

  def __init__(self, **components: nnx.Module):
    for name, component in components.items():
      setattr(self, name, component)


def components_of(config) -> tuple[str, ...]:
  """The components whose weights a configuration trains."""
  transformer = "transformer_2" if config.train_expert == "low_noise" else "transformer"
  return {"dit": (transformer,), "text": (transformer, "text_encoder"), "vae": ("vae",)}[config.train_target]


def of_component(weights: Mapping[str, Any], component: str) -> dict[str, Any]:
  """The weights of a component, under the names of its checkpoints."""
  prefix = f"{component}."
  return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


@dataclasses.dataclass(frozen=True, eq=False)
class Template:
  """The models without their numbers: `merge` puts them in.

  Attributes:
    graphdef: structure of `Models`.
    variables: dotted name → (path, nnx variable that holds a ShapeDtypeStruct with sharding).
    trained: names of the weights that are trained; the others stay.
  """

  graphdef: Any
  variables: Mapping[str, tuple[Any, Any]]
  trained: tuple[str, ...]

  @property
  def kept(self) -> tuple[str, ...]:
    return tuple(name for name in self.variables if name not in self.trained)

  def abstract(self, names) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: self.variables[name][1].get_value() for name in names}

  def abstract_state(self, names) -> nnx.State:
    """The nnx state of these weights alone."""
    return nnx.from_flat_state([self.variables[name] for name in names])

  def merge(self, weights: Mapping[str, jax.Array]) -> Models:
    leaves = [(path, variable.replace(weights[name])) for name, (path, variable) in self.variables.items()]
    return nnx.merge(self.graphdef, nnx.from_flat_state(leaves))


def as_weights(state: nnx.State) -> Weights:
  return {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(state)}


def make_template(config, placement: sharding.Placement) -> Template:
  """The components that a configuration trains; nothing is allocated."""
  lora = config.lora_rank > 0
  adapters = {"lora_rank": config.lora_rank, "lora_scale": lora_scale(config)} if lora else {}
  # Weights that are trained are float32; under a LoRA the others are stored as the user likes.
  weight_dtype = jnp.dtype(config.weight_dtype) if lora else jnp.float32
  dtypes = {"dtype": jnp.dtype(config.dtype), "weight_dtype": weight_dtype}

  def make_component(name: str) -> nnx.Module:
    if name == "vae":
      return WanVae(config.vae(), rngs=nnx.Rngs(0), **dtypes)
    if name == "text_encoder":
      return Umt5Encoder(config.umt5(), rngs=nnx.Rngs(0), **dtypes)
    return WanTransformer(config.wan(), rngs=nnx.Rngs(0), **dtypes, **adapters)

  def make():
    return Models(**{name: make_component(name) for name in components_of(config)})

  graphdef, abstract = nnx.split(nnx.eval_shape(make))
  variables = {
    ".".join(map(str, path)): (path, leaf)
    for path, leaf in nnx.to_flat_state(sharding.sharded_abstract(abstract, placement))
  }
  return Template(graphdef, variables, tuple(n for n in variables if not lora or n.endswith(LORA_SUFFIXES)))


def lora_scale(config) -> float:
  """Strength of the adapters: alpha / rank."""
  return 1.0 if config.lora_alpha is None else config.lora_alpha / config.lora_rank


def learning_rate(config) -> optax.Schedule:
  """Linear warm-up from 0, then constant or a cosine down to a fraction of the peak at the last step."""
  peak, warmup = config.learning_rate, config.warmup_steps
  if config.learning_rate_schedule == "cosine":
    after = optax.cosine_decay_schedule(peak, config.steps - warmup, config.cosine_learning_rate_final_fraction)
  else:
    after = optax.constant_schedule(peak)
  # The first step already moves: it is number 1 of the warm-up.
  return optax.join_schedules([lambda step: peak * (step + 1) / (warmup + 1), after], [warmup]) if warmup else after


def make_optimizer(config) -> optax.GradientTransformation:
  """AdamW, or Muon for the inner matrices and AdamW for the rest, after clipping by the norm of the whole gradient.

  Matrices alone decay, and nothing that is frozen. Muon (Jordan 2024; optax.contrib.muon) makes each layer's update
  orthogonal; scaled to the size of an update of AdamW (arXiv 2502.16982), it learns at the same rate.
  """
  frozen = ("vae.encoder.", "vae.quant_conv.") if config.vae_freeze_encoder else ()  # without gradient, Adam leaves them

  def decays(weights):
    return {name: name.endswith((".kernel", *LORA_SUFFIXES)) and not name.startswith(frozen) for name in weights}

  def matrices(weights):
    """Which axes of a kernel are a matrix's inputs and outputs; None for the weights that stay with AdamW."""

    def axes(name, weight):
      if not name.endswith(".kernel") or name.startswith(frozen):
        return None
      if ".blocks." in name:  # stacked: [L, in, out]
        return contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
      if name.startswith("vae.") and not any(f".{end}." in name for end in VAE_ENDS):  # [(t,) h, w, in, out]
        return contrib.MuonDimensionNumbers(reduction_axis=tuple(range(weight.ndim - 1)), output_axis=-1)
      return None

    return {name: axes(name, weight) for name, weight in weights.items()}

  if config.opt_type == "muon":
    optimizer = contrib.muon(
      learning_rate(config), beta=config.muon_beta, consistent_rms=0.2, weight_decay=config.adam_weight_decay,
      adam_b1=config.adam_b1, adam_b2=config.adam_b2, eps=config.adam_eps, nesterov=True,
      muon_weight_dimension_numbers=matrices)
  else:
    optimizer = optax.adamw(
      learning_rate(config), b1=config.adam_b1, b2=config.adam_b2, eps=config.adam_eps,
      weight_decay=config.adam_weight_decay, mask=decays)
  clip = config.gradient_clipping_threshold
  return optax.chain(optax.clip_by_global_norm(clip), optimizer) if clip else optimizer


def abstract_state(
  template: Template, optimizer: optax.GradientTransformation, placement: sharding.Placement, *, ema: bool,
  statistics: Mapping[str, tuple[int, ...]] = types.MappingProxyType({}),
) -> TrainState:
  """The train state as ShapeDtypeStructs with shardings: what belongs to a weight lies as the weight does.

  Args:
    ema: whether an average of the weights is kept.
    statistics: name → shape of what the objective measures.
  """
  weights = template.abstract(template.trained)

  def place(path, leaf):
    name = path[-1].key if path and isinstance(path[-1], jax.tree_util.DictKey) else None
    where = weights[name].sharding if name in weights else placement.replicated
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

  return TrainState(
    step=jax.ShapeDtypeStruct((), jnp.int32, sharding=placement.replicated),
    weights=weights,
    optimizer=jax.tree_util.tree_map_with_path(place, jax.eval_shape(optimizer.init, weights)),
    ema=dict(weights) if ema else None,
    statistics={name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=placement.replicated)
                for name, shape in statistics.items()},
  )


def make_abstract_state(config, template: Template, optimizer, placement: sharding.Placement) -> TrainState:
  """`abstract_state` of a configuration."""
  channels = (config.vae().z_dim,)
  measured = config.train_target == "vae" and not config.vae_freeze_encoder
  statistics = {"latents_mean": channels, "latents_square": channels} if measured else {}
  return abstract_state(template, optimizer, placement, ema=config.ema_decay > 0, statistics=statistics)


def init_state(abstract: TrainState, weights: Weights, optimizer: optax.GradientTransformation) -> TrainState:
  """Step 0 with these weights, everything created in its shards."""
  shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)

  def start(weights):
    # Copies: the arrays of a donated state may not be shared.
    ema = None if abstract.ema is None else jax.tree.map(jnp.copy, weights)
    statistics = {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in abstract.statistics.items()}
    return TrainState(jnp.zeros((), jnp.int32), weights, optimizer.init(weights), ema, statistics)

  return jax.jit(start, out_shardings=shardings, donate_argnums=0)(weights)


def make_weights(
  template: Template, names: tuple[str, ...], placement: sharding.Placement, seed: int,
  load: Callable[[str, dict[str, jax.ShapeDtypeStruct]], Mapping[str, jax.Array]] | None,
) -> Weights:
  """These weights from a folder, or random where it has none (adapters) or there is no folder.

  Args:
    load: (component, its names → where and how) → arrays, reading a weights folder; None for random weights.
  """
  fresh = tuple(name for name in names if load is None or name.endswith(LORA_SUFFIXES))
  read = template.abstract(name for name in names if name not in fresh)
  weights: Weights = {}
  if fresh:
    weights |= as_weights(sharding.init_state(template.abstract_state(fresh), placement, seed))
  for component in dict.fromkeys(name.partition(".")[0] for name in read):
    arrays = load(component, of_component(read, component))
    weights |= {f"{component}.{name}": array for name, array in arrays.items()}
  return {name: weights[name] for name in names}
