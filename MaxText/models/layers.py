"""Building blocks shared by the models: one way to declare a parameter, linear layers and norms.

A parameter is declared once, with shape, storage type, logical axis names and initialiser. Names, not mesh axes: the
rules in base.yml (`logical_axis_rules`) map them to the mesh, so the models say nothing about parallelism.

Repeated blocks are not vmapped. A block made with `stack=L` declares every parameter with a leading 'layers' axis of
length L; the forward pass scans over that axis and runs the same code on one layer's slice.

Dimensions: E width in, O width out.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


@dataclasses.dataclass(frozen=True)
class Initializer:
  """Gaussian of the given mean and standard deviation; 0 makes a constant.

  A parameter carries its initialiser in its metadata (`init`), so that random weights can be made one by one, each
  straight in its shards, without compiling the whole model's initialisation (parallel/sharding.py).
  """

  mean: float = 0.0
  stddev: float = 0.0

  def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    if self.stddev == 0.0:
      return jnp.full(shape, self.mean, dtype)
    return (self.mean + self.stddev * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


zeros = Initializer()
ones = Initializer(mean=1.0)


def normal(stddev: float) -> Initializer:
  """Gaussian of mean 0 and the given standard deviation."""
  return Initializer(stddev=stddev)


def fan_in(num_inputs: int) -> Initializer:
  """Gaussian whose variance is 1 / num_inputs, which keeps the scale of unit-variance inputs."""
  return normal(1.0 / math.sqrt(num_inputs))


@dataclasses.dataclass(frozen=True)
class ParamMaker:
  """Declares parameters. One object carries what all parameters of a module share.

  Attributes:
    rngs: random streams of the initialisers.
    dtype: what the layers compute in.
    weight_dtype: what the weights are stored in; norms and modulation tables stay float32 (`float32=True`).
    stack: None, or the number of layers that share this declaration (a leading 'layers' axis).
    lora_rank, lora_scale: rank and strength of the adapters that stacked linear layers get; rank 0: none.
  """

  rngs: nnx.Rngs
  dtype: Any = jnp.float32
  weight_dtype: Any = jnp.float32
  stack: int | None = None
  lora_rank: int = 0
  lora_scale: float = 1.0

  def stacked(self, num_layers: int) -> ParamMaker:
    return dataclasses.replace(self, stack=num_layers)

  def __call__(self, shape, axes, init: Initializer, *, float32: bool = False) -> nnx.Param:
    """Returns an `nnx.Param` of `shape`; its metadata holds `axes` (a logical name or None a dimension) and `init`."""
    if len(shape) != len(axes):
      raise ValueError(f"a parameter of shape {shape} needs {len(shape)} axis names, got {axes}")
    if self.stack is not None:
      shape, axes = (self.stack, *shape), ("layers", *axes)
    dtype = jnp.float32 if float32 else self.weight_dtype
    return nnx.Param(init(self.rngs.params(), tuple(shape), dtype), axes=tuple(axes), init=init)


class Linear(nnx.Module):
  """y = x @ kernel + bias, computed in `dtype`; kernel [E, O]. With adapters also + scale · (x @ lora_A) @ lora_B."""

  def __init__(self, make: ParamMaker, num_in: int, num_out: int, axes=(None, None), *, bias: bool = True,
               init: Initializer | None = None, float32: bool = False):
    self.dtype = jnp.float32 if float32 else make.dtype
    self.kernel = make((num_in, num_out), axes, init or fan_in(num_in), float32=float32)
    self.bias = make((num_out,), (axes[1],), zeros, float32=float32) if bias else None
    rank = make.lora_rank if make.stack is not None else 0
    self.lora_scale = make.lora_scale
    self.lora_A = make((num_in, rank), (axes[0], None), fan_in(num_in), float32=True) if rank else None
    self.lora_B = make((rank, num_out), (None, axes[1]), zeros, float32=True) if rank else None

  def __call__(self, x):
    x = x.astype(self.dtype)
    y = jnp.dot(x, self.kernel[...].astype(self.dtype))
    if self.lora_A is not None:
      inner = jnp.dot(x, self.lora_A[...].astype(self.dtype))
      y = y + self.lora_scale * jnp.dot(inner, self.lora_B[...].astype(self.dtype))
    return y if self.bias is None else y + self.bias[...].astype(self.dtype)


class RMSNorm(nnx.Module):
  """x / rms(x) · scale over the last dimension, in float32, returned in the input's type."""

  def __init__(self, make: ParamMaker, width: int, eps: float = 1e-6, axis: str | None = "norm"):
    self.eps = eps
    self.scale = make((width,), (axis,), ones, float32=True)

  def __call__(self, x):
    x32 = x.astype(jnp.float32)
    y = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
    return (y * self.scale[...]).astype(x.dtype)


def layer_norm(x, eps: float, scale=None, bias=None):
  """Zero mean and unit variance over the last dimension, in float32; float32 out."""
  x32 = x.astype(jnp.float32)
  centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
  y = centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + eps)
  if scale is not None:
    y = y * scale + bias
  return y


class LayerNorm(nnx.Module):
  """Layer norm with learned scale and bias, in float32; float32 out."""

  def __init__(self, make: ParamMaker, width: int, eps: float = 1e-6):
    self.eps = eps
    self.scale = make((width,), ("norm",), ones, float32=True)
    self.bias = make((width,), ("norm",), zeros, float32=True)

  def __call__(self, x):
    return layer_norm(x, self.eps, self.scale[...], self.bias[...])
