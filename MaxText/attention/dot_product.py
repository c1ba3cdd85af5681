"""Dense attention in plain JAX: bounded memory, any device, any length, differentiable.

The work is tiled (tiled.py) and never makes an array of queries × keys.

Legend: B batch, S queries, T keys, N heads, D head dim, H = B·N.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from MaxText.attention.tiled import TilePlan, make_plan, tiled_attention

# Tiles of scores: on a CPU small enough for its caches and large enough for its threads (fastest of 64 … 5,376 queries ×
# 64 … 1,344 keys with two threads of an AMD EPYC with 512 KiB of second-level cache), on accelerators to fill the device.
CPU_BLOCKS = (1344, 384)
ACCELERATOR_BLOCKS = (512, 1024)
# On accelerators as many heads run side by side as keep one tile of scores of all of them below this many elements.
ACCELERATOR_SCORES = 1 << 26


def even_block(length: int, block: int) -> int:
  """A tile of about `block` that splits `length` with little padding: a multiple of 8 unless one tile does."""
  tiles = -(-length // block)
  return length if tiles == 1 else -(-length // tiles // 8) * 8


@functools.lru_cache(maxsize=64)
def dense_plan(num_queries: int, num_keys: int, block_q: int, block_kv: int) -> TilePlan:
  """Every tile; only the padding of the last key tile is masked."""
  table = np.full((-(-num_queries // block_q), -(-num_keys // block_kv)), 2)
  if num_keys % block_kv:
    table[:, -1] = 1
  whole = np.zeros((1, num_queries), np.int32)
  return make_plan([table], block_q, block_kv, 0, whole, whole + num_keys)


def heads_first(x_BSND: jax.Array) -> jax.Array:
  """[B, S, N, D] -> [B·N, S, D]."""
  B, S, N, D = x_BSND.shape
  return x_BSND.transpose(0, 2, 1, 3).reshape(B * N, S, D)


def tokens_first(x_HSD: jax.Array, batch: int) -> jax.Array:
  """[B·N, S, D] -> [B, S, N, D]."""
  H, S, D = x_HSD.shape
  return x_HSD.reshape(batch, H // batch, S, D).transpose(0, 2, 1, 3)


def per_platform(attend, *arrays, num_heads: int):
  """attend(*arrays, blocks, heads_at_once) with the tiles that suit the platform the program is compiled for.

  Results of `attend` have the dtype of the first array, or are no floats.
  """
  side_by_side = max(1, min(num_heads, ACCELERATOR_SCORES // (ACCELERATOR_BLOCKS[0] * ACCELERATOR_BLOCKS[1])))

  def on_cpu(*arrays):
    # A CPU multiplies bfloat16 by way of float32: converting once and not in every tile takes a third off the time.
    wide = (x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in arrays)
    out = attend(*wide, blocks=CPU_BLOCKS, heads_at_once=1)
    return out.astype(arrays[0].dtype) if jnp.issubdtype(out.dtype, jnp.floating) else out

  on_accelerator = functools.partial(attend, blocks=ACCELERATOR_BLOCKS, heads_at_once=side_by_side)
  return lax.platform_dependent(*arrays, cpu=on_cpu, default=on_accelerator)


@dataclasses.dataclass(frozen=True)
class DotProductAttention:
  """softmax(q kᵀ / sqrt(D)) v with an online softmax over tiles.

  Attributes:
    block_q, block_kv: tiles of queries and keys; 0 takes what suits the platform. They change rounding only.
  """

  block_q: int = 0
  block_kv: int = 0

  def describe(self) -> str:
    return "dot_product (plain JAX, online softmax over tiles)"

  def __call__(self, q_BSND: jax.Array, k_BTND: jax.Array, v_BTND: jax.Array, grid=None) -> jax.Array:
    """[B, S, N, D] × [B, T, N, D] × [B, T, N, D] -> [B, S, N, D] in q's dtype; `grid` does not matter."""
    num_queries, num_keys = q_BSND.shape[1], k_BTND.shape[1]

    def attend(q_HSD, k_HTD, v_HTD, blocks, heads_at_once):
      block_q = even_block(num_queries, self.block_q or blocks[0])
      block_kv = even_block(num_keys, self.block_kv or blocks[1])
      plan = dense_plan(num_queries, num_keys, block_q, block_kv)
      # Heads of short sequences go side by side until they fill a tile: starting each alone costs more than its work.
      at_once = max(heads_at_once, math.prod(CPU_BLOCKS) // (block_q * block_kv))
      at_once = -(-len(q_HSD) // -(-len(q_HSD) // at_once))  # groups of about the same size
      return tiled_attention(q_HSD, k_HTD, v_HTD, jnp.zeros(len(q_HSD), jnp.int32), plan, at_once)

    with jax.named_scope("dot_product_attention"):
      arrays = heads_first(q_BSND), heads_first(k_BTND), heads_first(v_BTND)
      return tokens_first(per_platform(attend, *arrays, num_heads=len(arrays[0])), len(q_BSND))


dot_product_attention = DotProductAttention()
