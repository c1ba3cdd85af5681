"""Attention: one signature for every kind, so that models never know which one runs.

    attention(q_BSND, k_BTND, v_BTND, grid) -> out_BSND

q, k and v are [batch, tokens, heads, head_dim]; the scale 1/sqrt(head_dim) is applied inside. `grid` = (F, H, W) says how
the S = F·H·W tokens of a video lie, frame-major; None means cross-attention, where k and v have T tokens of their own.
An attention is pure, usable inside jit, hashable (so that it can be a static argument), and has `describe()`, one line
for logs and records. Softmax and sums are float32, the result has q's dtype.

  dot_product.py  plain JAX with bounded memory, on any device, differentiable
  flash.py        the fastest dense kernel of the device
  svg/            Sparse VideoGen
  ulysses.py      runs any of them on a mesh
"""

from __future__ import annotations

from typing import Protocol

import jax

Grid = tuple[int, int, int]


class Attention(Protocol):
  """What every kind of attention looks like."""

  def __call__(self, q_BSND: jax.Array, k_BTND: jax.Array, v_BTND: jax.Array, grid: Grid | None) -> jax.Array: ...

  def describe(self) -> str: ...


# The kinds import the names above.
from MaxText.attention.dot_product import DotProductAttention, dot_product_attention  # noqa: E402
from MaxText.attention.flash import FlashAttention, make_flash_attention  # noqa: E402

__all__ = ["Attention", "DotProductAttention", "FlashAttention", "Grid", "dot_product_attention", "make_attention"]


def make_attention(config, mesh: jax.sharding.Mesh | None = None, *, training: bool = False) -> Attention:
  """The dense attention of a configuration: of all steps, or with attention=svg of the dense steps and layers.

  Args:
    config: attention, flash_block_q, flash_block_kv and compile_topology are read.
    mesh: where it will run (also a mesh of a topology to compile for); None means the default backend.
    training: whether gradients are needed, which not every kernel has.
  """
  if config.attention == "dot_product":
    return dot_product_attention
  platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
  return make_flash_attention(
    platform, config.flash_block_q or 0, config.flash_block_kv or 0, chip=config.topology_chip, training=training)
