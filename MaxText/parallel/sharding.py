"""Where arrays lie on the mesh: logical axis names → mesh axes → shardings.

Models name the dimensions of their parameters (`nnx.Param` metadata `axes`) and of a few activations;
`logical_axis_rules` says which mesh axes split a name. A mesh axis that does not divide a dimension, or that another
dimension of the array already took, is left out there (the dimension is replicated over it); `fallbacks` reports the
former.

How a weight travels: it is stored in pieces over fsdp, context and tensor. A layer about to use it asks for it whole over
the axes that split samples and tokens (`gather`), which becomes one all-gather of that layer inside the layer loop.
Without that request the compiler may as well move the activations, or sum partial products, and it does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from MaxText.parallel.mesh import AXES, listed

WEIGHT_NAMES = ("layers", "embed", "heads", "mlp", "vocab", "norm", "conv_in", "conv_out")
BATCH, TOKENS, HEADS = "batch", "tokens", "heads"
NAMES = (BATCH, TOKENS, *WEIGHT_NAMES)

Rules = tuple[tuple[str, tuple[str, ...]], ...]
Axes = tuple[str | None, ...]


def parse_rules(raw: Sequence[Any]) -> Rules:
  """`logical_axis_rules` as written in YAML ([name, mesh axis | list of mesh axes | null]) → checked, hashable rules.

  Raises:
    ValueError: a rule of another form, an unknown name or mesh axis, or two rules for one name.
  """
  rules: dict[str, tuple[str, ...]] = {}
  for rule in raw:
    if not isinstance(rule, (list, tuple)) or len(rule) != 2 or not isinstance(rule[0], str):
      raise ValueError(f"logical_axis_rules: {rule!r} is no rule; write [logical name, mesh axis or list of mesh axes]")
    name, axes = rule
    axes = () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
    for word, allowed, what in ((name, NAMES, "logical name"), *((a, AXES, "mesh axis") for a in axes)):
      if word not in allowed:
        near = difflib.get_close_matches(str(word), allowed, n=1)
        raise ValueError(f"logical_axis_rules: unknown {what} {word!r} in {list(rule)!r}; "
                         + (f"did you mean {near[0]!r}? " if near else "") + f"known: {listed(allowed, 'and')}")
    if name in rules:
      raise ValueError(f"logical_axis_rules: two rules for {name!r}; give one with a list of mesh axes")
    if len(set(axes)) != len(axes):
      raise ValueError(f"logical_axis_rules: {list(rule)!r} names a mesh axis twice")
    rules[name] = axes
  return tuple(rules.items())


@dataclasses.dataclass(frozen=True)
class Fallback:
  """A mesh axis that a rule asked for and that does not divide the dimension."""

  name: str
  size: int
  mesh_axis: str
  mesh_size: int

  def __str__(self):
    return f"{self.name} of size {self.size} is not split over {self.mesh_axis}={self.mesh_size}: it does not divide"


@dataclasses.dataclass(frozen=True)
class Placement:
  """A mesh and the rules that map logical names to its axes. Hashable."""

  mesh: Mesh
  rules: Rules

  def mesh_axes(self, name: str | None) -> tuple[str, ...]:
    """Mesh axes of size above one that the rule of `name` asks for; a name without a rule is replicated."""
    return tuple(a for a in dict(self.rules).get(name, ()) if self.mesh.shape[a] > 1)

  def resolve(self, axes: Axes, shape: Sequence[int], without: Sequence[str] = ()) -> tuple[P, list[Fallback]]:
    """Partition spec of an array whose dimensions are named `axes`, and what fell back to replication.

    Args:
      axes: one logical name or None a dimension.
      shape: sizes; a mesh axis is used only where it divides what is left of the dimension.
      without: mesh axes that must not be used.
    """
    taken, parts, fallbacks = set(without), [], []
    for name, size in zip(axes, shape, strict=True):
      chosen: list[str] = []
      for axis in self.mesh_axes(name):
        if axis in taken:
          continue
        if size % (math.prod(self.mesh.shape[a] for a in chosen) * self.mesh.shape[axis]):
          fallbacks.append(Fallback(name, size, axis, self.mesh.shape[axis]))
          continue
        chosen.append(axis)
        taken.add(axis)
      parts.append(None if not chosen else chosen[0] if len(chosen) == 1 else tuple(chosen))
    while parts and parts[-1] is None:
      parts.pop()
    return P(*parts), fallbacks

  def spec(self, axes: Axes, shape: Sequence[int], without: Sequence[str] = ()) -> P:
    return self.resolve(axes, shape, without)[0]

  def sharding(self, axes: Axes, shape: Sequence[int], without: Sequence[str] = ()) -> NamedSharding:
    return NamedSharding(self.mesh, self.spec(axes, shape, without))

  @property
  def replicated(self) -> NamedSharding:
    return NamedSharding(self.mesh, P())

  @property
  def gathered_axes(self) -> tuple[str, ...]:
    """Mesh axes that split samples or tokens: a weight must be whole over them when it is used."""
    return (*self.mesh_axes(BATCH), *self.mesh_axes(TOKENS))


# A jit-cache-sensitive context: a function traced under one placement is traced again under another.
_active = jax.make_user_context(None)


@contextlib.contextmanager
def mesh_rules(placement: Placement | None) -> Iterator[None]:
  """Within it, `constrain` and `gather` of the models act on this placement; None: they do nothing."""
  with _active(placement):
    yield


def active() -> Placement | None:
  return _active.value


def constrain(x: jax.Array, axes: Axes) -> jax.Array:
  """Asks the compiler to lay `x` out as the active rules say of its logical names; without a placement returns x."""
  placement = active()
  if placement is None or placement.mesh.size == 1:
    return x
  return jax.lax.with_sharding_constraint(x, placement.sharding(axes, x.shape))


def parameter_axes(param: nnx.Variable, ndim: int) -> Axes:
  """Logical names of a parameter's dimensions; of a slice of a stacked parameter, without its 'layers'."""
  axes = param.get_metadata().get("axes") or (None,) * ndim
  if len(axes) == ndim + 1 and axes[0] == "layers":
    axes = axes[1:]
  if len(axes) != ndim:
    raise ValueError(f"a parameter of {ndim} dimensions carries the logical axes {axes}")
  return axes


def map_parameters(function: Callable[[Axes, Any], Any], tree: Any) -> Any:
  """`function(axes, value)` on every variable of an nnx state or module; the same tree with the results as values."""

  def one(leaf):
    if not isinstance(leaf, nnx.Variable):
      return leaf
    value = leaf.get_value()
    return leaf.replace(function(parameter_axes(leaf, len(value.shape)), value))

  return jax.tree.map(one, tree, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def gather(module: Any) -> Any:
  """The module, with its weights whole over the axes that split samples and tokens, for use in this layer.

  Call it on one layer's module inside the layer loop, so that one layer is whole at a time. No placement: as it is.
  """
  placement = active()
  if placement is None or placement.mesh.size == 1:
    return module

  def whole(axes, value):
    return jax.lax.with_sharding_constraint(value, placement.sharding(axes, value.shape, placement.gathered_axes))

  graphdef, state = nnx.split(module)
  return nnx.merge(graphdef, map_parameters(whole, state))


def sharded_abstract(abstract_state: Any, placement: Placement) -> Any:
  """The same state with `jax.ShapeDtypeStruct` leaves that carry their NamedSharding."""

  def place(axes, value):
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=placement.sharding(axes, value.shape))

  return map_parameters(place, abstract_state)


SMALL = 2**20  # elements; below this a random weight costs more to compile than to compute


@functools.lru_cache(maxsize=1024)
def _weight_maker(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding, constant: bool) -> Callable:
  """Compiled (key, mean, stddev) -> weight in its shards; one for all weights of a shape."""
  from MaxText.models.layers import Initializer

  def make(key, mean, stddev):
    if constant:
      return jnp.full(shape, mean, dtype)
    return (mean + stddev * Initializer(0.0, 1.0)(key, shape, jnp.float32)).astype(dtype)

  quick = sharding.mesh.devices.flat[0].platform == "cpu" and math.prod(shape) < SMALL
  options = {"xla_backend_optimization_level": 0} if quick else None
  return jax.jit(make, out_shardings=sharding, compiler_options=options)


def init_sharded(make_module: Callable[[], nnx.Module], placement: Placement, seed: int = 0) -> nnx.Module:
  """Random weights of a module, each created on the devices that keep it, never whole.

  A weight depends on the seed, its name and its shape, not on the mesh (counter-based random bits are partitioned with
  the array) nor on the other weights.
  """
  graphdef, abstract = nnx.split(nnx.eval_shape(make_module))
  return nnx.merge(graphdef, init_state(abstract, placement, seed))


def init_state(abstract_state: Any, placement: Placement, seed: int = 0) -> nnx.State:
  """`init_sharded` for an abstract state, which may be a part of a module's."""
  leaves = []
  for path, leaf in nnx.to_flat_state(abstract_state):
    value, init = leaf.get_value(), leaf.get_metadata()["init"]
    sharding = placement.sharding(parameter_axes(leaf, len(value.shape)), value.shape)
    key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(".".join(map(str, path)).encode()))
    make = _weight_maker(value.shape, value.dtype, sharding, init.stddev == 0.0)
    leaves.append((path, leaf.replace(make(key, init.mean, init.stddev))))
  return nnx.from_flat_state(leaves)


def _named_parameters(state: Any) -> list[tuple[str, Axes, Any]]:
  flat = nnx.to_flat_state(nnx.state(state) if isinstance(state, nnx.Module) else state)
  return [(".".join(map(str, path)), parameter_axes(leaf, len(leaf.shape)), leaf.get_value()) for path, leaf in flat]


def fallbacks(state: Any, placement: Placement) -> dict[str, list[Fallback]]:
  """Parameters that a rule wanted split and that are not, by name."""
  found = {name: placement.resolve(axes, value.shape)[1] for name, axes, value in _named_parameters(state)}
  return {name: items for name, items in found.items() if items}


def repeated_work(placement: Placement, samples: int) -> str | None:
  """Warns of mesh axes that should split the samples and cannot, so that their devices do the same work over again.

  Args:
    samples: batch of the transformer; with guidance two for each video.
  """
  idle = placement.resolve((BATCH,), (samples,))[1]
  if not idle:
    return None
  axes = " × ".join(f"{fallback.mesh_axis}={fallback.mesh_size}" for fallback in idle)
  return (f"a batch of {samples} cannot be split over {axes}: these devices hold parts of the weights, but repeat each "
          "other's work; to share one video's work use ici_context_parallelism and context_parallel_strategy=ulysses")


def _bytes_per_device(value: Any) -> int:
  shape = value.sharding.shard_shape(value.shape) if value.sharding is not None else value.shape
  return math.prod(shape) * jnp.dtype(value.dtype).itemsize


def check_sharded_enough(state: Any, placement: Placement, tolerance: float, slack_bytes: int = 64 * 2**20) -> None:
  """Refuses weights that lie on the devices in too many copies.

  Args:
    state: nnx state or module of placed arrays, or of ShapeDtypeStruct with shardings.
    tolerance: how far a device's bytes may exceed a perfect split over every axis but data, as a share of that split.
    slack_bytes: an excess below this never matters (small models, norms and biases).
  Raises:
    ValueError: names the tensors that cost most, their specs and the mesh axes that would be free to split them.
  """
  usable = {axis for axis in AXES if axis != "data" and placement.mesh.shape[axis] > 1}
  ways = math.prod(placement.mesh.shape[axis] for axis in usable)
  rows, held, perfect = [], 0, 0.0
  for name, axes, value in _named_parameters(state):
    whole = math.prod(value.shape) * jnp.dtype(value.dtype).itemsize
    mine = _bytes_per_device(value)
    held, perfect = held + mine, perfect + whole / ways
    rows.append((mine - whole / ways, name, axes, value))
  excess = held / perfect - 1 if perfect else 0.0
  if excess <= tolerance or held - perfect <= slack_bytes:
    return
  lines = []
  for extra, name, axes, value in sorted(rows, key=lambda row: -row[0])[:5]:
    spec = value.sharding.spec if isinstance(value.sharding, NamedSharding) else P()
    taken = {a for part in spec if part for a in ((part,) if isinstance(part, str) else part)}
    free = [f"{axis}={placement.mesh.shape[axis]}" for axis in AXES if axis in usable - taken]
    if extra <= 0:
      break
    lines.append(f"  {name} {tuple(value.shape)} axes {axes} spec {spec}, free: {', '.join(free) or 'none'}, "
                 f"{extra / 2**20:.1f} MiB a device too many")
  raise ValueError(
    f"the weights are not sharded enough: a device holds {held / 2**20:.1f} MiB, {100 * excess:.1f} % above the "
    f"{perfect / 2**20:.1f} MiB of a perfect split {ways} ways (sharding_tolerance={tolerance}); choose sizes that "
    f"divide the dimensions, change logical_axis_rules, or raise sharding_tolerance:\n" + "\n".join(lines))


def debug_sharding(state: Any) -> str:
  """One line a parameter: name, shape, type, spec, MiB a device; and the sum."""
  lines, total = [], 0
  for name, axes, value in _named_parameters(state):
    size = _bytes_per_device(value)
    total += size
    spec = value.sharding.spec if isinstance(value.sharding, NamedSharding) else "one device"
    lines.append(f"{name}  {jnp.dtype(value.dtype).name}{list(value.shape)}  {axes}  {spec}  {size / 2**20:.3f} MiB")
  return "\n".join([*lines, f"total  {total / 2**20:.3f} MiB a device"])
