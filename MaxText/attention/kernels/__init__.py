"""Pallas TPU attention: one kernel family, dense and block-sparse.

  block_sparse.py  the kernel and `block_sparse_attention`, which takes any step plan
  steps.py         step lists from tile tables (numpy)
  plans.py         step plans of Sparse VideoGen heads
  tuned.py         tile sizes for each chip, from configs/tpu/

Legend: H heads (batch folded in), S query tokens, T key tokens, D head dim.
"""

import jax
import jax.numpy as jnp

from MaxText.attention.kernels.block_sparse import KernelTiling, block_sparse_attention
from MaxText.attention.kernels.plans import cached_dense_plan, svg_plan
from MaxText.attention.kernels.steps import StepPlan, dense_plan, plan_steps
from MaxText.attention.kernels.tuned import Tiles, this_chip, tuned_tiles
from MaxText.attention.svg.masks import HeadMask

__all__ = ["KernelTiling", "StepPlan", "Tiles", "block_sparse_attention", "dense_attention", "dense_plan", "plan_steps",
           "svg_attention", "svg_plan", "this_chip", "tuned_tiles"]


def dense_attention(q_HSD: jax.Array, k_HTD: jax.Array, v_HTD: jax.Array, *, chip: str | None = None, block_q: int = 0,
                    block_kv: int = 0, interpret: bool = False) -> jax.Array:
  """softmax(q k^T / sqrt(D)) v, out_HSD in q's dtype; 0 takes tuned tiles, None the chip of the device here."""
  S, T = q_HSD.shape[1], k_HTD.shape[1]
  tiles = tuned_tiles(chip or this_chip(), "dense", S, T, block_q, block_kv)
  plan = cached_dense_plan(S, T, tiles.block_q, tiles.block_kv, tiles.masked_chunk)
  return block_sparse_attention(q_HSD, k_HTD, v_HTD, plan, tiling=tiles.tiling, interpret=interpret)


def svg_attention(q_HSD: jax.Array, k_HSD: jax.Array, v_HSD: jax.Array, temporal_H: jax.Array, mask: HeadMask,
                  kernel: str = "aligned", *, chip: str | None = None, block_q: int = 0, block_kv: int = 0,
                  interpret: bool = False) -> jax.Array:
  """Sparse VideoGen attention, each head's tokens already in its own order (masks.query_order, masks.key_order).

  Args:
    temporal_H: traced flags; a new routing compiles nothing.
    mask: of either kind of head; the other kind's differs in `temporal` alone.
    kernel: naive, exact or aligned.
    chip, block_q, block_kv: None and 0 take the chip of the device here and its tuned tiles.
  """
  S = q_HSD.shape[1]
  tiles = tuned_tiles(chip or this_chip(), kernel, S, S, block_q, block_kv)
  plan = svg_plan(mask, kernel, tiles.block_q, tiles.block_kv, tiles.masked_chunk, tiles.tiling.probe)
  return block_sparse_attention(q_HSD, k_HSD, v_HSD, plan, temporal_H.astype(jnp.int32), tiling=tiles.tiling,
                                interpret=interpret)
