"""Attention over a list of tiles with an online softmax: the one inner loop of the XLA paths, dense and sparse.

For each head and tile of queries a loop runs over that tile's kept key tiles only; nothing else is computed. Memory is
bounded by a few tiles: no array of queries × keys exists, forward or backward. The backward is written out (a loop with
a traced trip count has no automatic one) and recomputes the weights of each tile from the saved log-sum-exp.

Legend: H heads of all batch elements, S queries, T keys, D head dim, K kinds of head, c = block_q, t = block_kv,
I query tiles, J key tiles.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Masked scores. Finite, so that a tile without a kept key for some row gives no NaN: the row's later tiles scale it to 0.
MASKED_SCORE = -1e30
LOG2E = math.log2(math.e)


@dataclasses.dataclass(frozen=True, eq=False)
class TilePlan:
  """Which tiles each kind of head visits, static numpy arrays. Compared by identity: make plans in cached functions.

  Query row s of a head of kind k keeps, inside the visited tiles, the keys [0, sink) and [start_KS[k, s], stop_KS[k, s]).
  Only tiles past the first `unmasked_KI` of each list evaluate that; the first ones must be kept whole.
  """

  block_q: int
  block_kv: int
  tiles_KIJ: np.ndarray  # key tiles to visit, those kept whole first; int32, padded with 0
  unmasked_KI: np.ndarray
  visited_KI: np.ndarray
  sink: int
  start_KS: np.ndarray
  stop_KS: np.ndarray


def make_plan(
  tables: list[np.ndarray], block_q: int, block_kv: int, sink: int, start_KS: np.ndarray, stop_KS: np.ndarray
) -> TilePlan:
  """Plan from one table [I, J] a kind of head: 0 empty, 1 to be masked, 2 kept whole (the values of svg/tiles.py)."""
  table_KIJ = np.stack(tables).astype(np.int32)
  visited_KI = (table_KIJ > 0).sum(-1, dtype=np.int32)
  if visited_KI.min() == 0:
    raise ValueError("A tile of queries visits no tile of keys; attention over no keys is undefined.")
  order_KIJ = np.argsort(-table_KIJ, axis=-1, kind="stable").astype(np.int32)[..., : visited_KI.max()]
  unmasked_KI = (table_KIJ == 2).sum(-1, dtype=np.int32)
  return TilePlan(block_q, block_kv, order_KIJ, unmasked_KI, visited_KI, sink, start_KS, stop_KS)


def _tiled(x_HSD: jax.Array, block: int) -> jax.Array:
  """[H, S, ...] -> [H, tiles, block, ...], zeros behind the end."""
  pad = -x_HSD.shape[1] % block
  x_HSD = jnp.pad(x_HSD, ((0, 0), (0, pad)) + ((0, 0),) * (x_HSD.ndim - 2))
  return x_HSD.reshape(x_HSD.shape[0], -1, block, *x_HSD.shape[2:])


def _rows(plan: TilePlan, values_KS: np.ndarray) -> np.ndarray:
  """[K, S] -> [K, I, c]; padded rows repeat the last one, so that they keep some key."""
  return np.pad(values_KS, ((0, 0), (0, -values_KS.shape[1] % plan.block_q)), mode="edge").reshape(
    values_KS.shape[0], -1, plan.block_q).astype(np.int32)


def _of_kind(plan: TilePlan, kind: jax.Array) -> tuple[jax.Array, ...]:
  """The plan's tables for one head: (tiles [I, J], unmasked [I], visited [I], start [I, c], stop [I, c])."""
  arrays = (plan.tiles_KIJ, plan.unmasked_KI, plan.visited_KI, _rows(plan, plan.start_KS), _rows(plan, plan.stop_KS))
  if len(plan.tiles_KIJ) == 1:
    return tuple(jnp.asarray(a[0]) for a in arrays)
  return tuple(lax.dynamic_index_in_dim(jnp.asarray(a), kind, keepdims=False) for a in arrays)


def _keep(plan: TilePlan, tile: jax.Array, start_c: jax.Array, stop_c: jax.Array) -> jax.Array:
  """Which pairs of a tile are kept, bool [c, t]."""
  key_t = tile * plan.block_kv + lax.iota(jnp.int32, plan.block_kv)
  # One unsigned comparison says start <= key < stop: on a CPU the mask then costs 1 % of a tile's time instead of 12 %.
  inside_ct = (key_t - start_c[:, None]).astype(jnp.uint32) < (stop_c - start_c).astype(jnp.uint32)[:, None]
  return inside_ct | (key_t < plan.sink)


def _dot(a: jax.Array, b: jax.Array, dims: tuple[int, int]) -> jax.Array:
  return lax.dot_general(a, b, (((dims[0],), (dims[1],)), ((), ())), preferred_element_type=jnp.float32)


def _over_tiles(plan: TilePlan, step, tiles_J, unmasked, visited, carry):
  """Runs step(carry, key tile, masked) over a query tile's list: first the tiles kept whole, then those to be masked."""
  if plan.tiles_KIJ.shape[-1] == 1 and plan.unmasked_KI.all():  # one whole tile: nothing to loop over
    return step(carry, tiles_J[0], False)
  if plan.unmasked_KI.any():
    carry = lax.fori_loop(0, unmasked, lambda n, c: step(c, tiles_J[n], False), carry)
  if (plan.unmasked_KI < plan.visited_KI).any():
    carry = lax.fori_loop(unmasked, visited, lambda n, c: step(c, tiles_J[n], True), carry)
  return carry


def _forward_head(plan: TilePlan, q_IcD, k_JtD, v_JtD, kind):
  """One head: (out [I, c, D] in q's dtype, log-sum-exp [I, c] in base 2, float32)."""
  exponent = LOG2E / math.sqrt(q_IcD.shape[-1])

  def query_tile(args):
    q_cD, tiles_J, unmasked, visited, start_c, stop_c = args

    def step(carry, tile, masked):
      max_c, sum_c, out_cD = carry
      score_ct = _dot(q_cD, k_JtD[tile], (1, 1))
      if masked:
        score_ct = jnp.where(_keep(plan, tile, start_c, stop_c), score_ct, MASKED_SCORE)
      new_max_c = jnp.maximum(max_c, score_ct.max(-1))
      scale_c = jnp.exp2((max_c - new_max_c) * exponent)
      weight_ct = jnp.exp2((score_ct - new_max_c[:, None]) * exponent)
      out_cD = out_cD * scale_c[:, None] + _dot(weight_ct.astype(v_JtD.dtype), v_JtD[tile], (1, 0))
      return new_max_c, sum_c * scale_c + weight_ct.sum(-1), out_cD

    c = plan.block_q
    start = (jnp.full(c, MASKED_SCORE), jnp.zeros(c), jnp.zeros((c, v_JtD.shape[-1])))
    max_c, sum_c, out_cD = _over_tiles(plan, step, tiles_J, unmasked, visited, start)
    return (out_cD / sum_c[:, None]).astype(q_IcD.dtype), max_c * exponent + jnp.log2(sum_c)

  return lax.map(query_tile, (q_IcD, *_of_kind(plan, kind)))


def _backward_head(plan: TilePlan, q_IcD, k_JtD, v_JtD, kind, out_IcD, lse_Ic, grad_IcD):
  """Gradients (dq, dk, dv) of one head, float32."""
  scale = 1.0 / math.sqrt(q_IcD.shape[-1])

  def query_tile(dkv, args):
    q_cD, out_cD, lse_c, grad_cD, tiles_J, unmasked, visited, start_c, stop_c = args
    # Sum over keys of weight × its gradient, which the softmax subtracts.
    mean_c = (out_cD.astype(jnp.float32) * grad_cD.astype(jnp.float32)).sum(-1)

    def step(carry, tile, masked):
      dq_cD, dk_JDt, dv_JDt = carry
      k_tD, v_tD = k_JtD[tile], v_JtD[tile]
      weight_ct = jnp.exp2(_dot(q_cD, k_tD, (1, 1)) * (scale * LOG2E) - lse_c[:, None])
      if masked:
        weight_ct = jnp.where(_keep(plan, tile, start_c, stop_c), weight_ct, 0.0)
      dscore_ct = weight_ct * (_dot(grad_cD, v_tD, (1, 1)) - mean_c[:, None]) * scale
      weight_ct, dscore_ct = weight_ct.astype(q_cD.dtype), dscore_ct.astype(q_cD.dtype)
      # Transposed: a CPU multiplies by the tile as it lies in 1.5 times the rate of multiplying by its transpose.
      dv_JDt = dv_JDt.at[tile].add(_dot(grad_cD, weight_ct, (0, 0)))
      dk_JDt = dk_JDt.at[tile].add(_dot(q_cD, dscore_ct, (0, 0)))
      return dq_cD + _dot(dscore_ct, k_tD, (1, 0)), dk_JDt, dv_JDt

    carry = (jnp.zeros(q_cD.shape), *dkv)
    dq_cD, *dkv = _over_tiles(plan, step, tiles_J, unmasked, visited, carry)
    return tuple(dkv), dq_cD

  zeros = tuple(jnp.zeros((x.shape[0], x.shape[2], x.shape[1])) for x in (k_JtD, v_JtD))
  (dk_JDt, dv_JDt), dq_IcD = lax.scan(query_tile, zeros, (q_IcD, out_IcD, lse_Ic, grad_IcD, *_of_kind(plan, kind)))
  return dq_IcD, dk_JDt.swapaxes(1, 2), dv_JDt.swapaxes(1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def tiled_attention(q_HSD, k_HTD, v_HTD, kind_H, plan: TilePlan, heads_at_once: int = 1) -> jax.Array:
  """Softmax attention of each query over the keys that `plan` keeps for its head's kind.

  Args:
    q_HSD, k_HTD, v_HTD: queries, keys and values in the order of tokens that the plan means. Scores are scaled by
      1/sqrt(D) here; softmax and sums are float32.
    kind_H: int32, which of the plan's kinds each head is. May be traced.
    heads_at_once: heads computed side by side. With 1 a head's own tiles are all that is computed; with more, a group
      waits for the head with the longest list. Few suit a CPU's caches, many an accelerator.

  Returns:
    out_HSD in q's dtype. Differentiable in q, k and v (reverse mode).
  """
  return _forward(q_HSD, k_HTD, v_HTD, kind_H, plan, heads_at_once)[0]


def _each_head(function, arrays, heads_at_once: int):
  return lax.map(function, arrays, batch_size=heads_at_once if heads_at_once > 1 else None)


def _forward(q_HSD, k_HTD, v_HTD, kind_H, plan, heads_at_once):
  tiled = _tiled(q_HSD, plan.block_q), _tiled(k_HTD, plan.block_kv), _tiled(v_HTD, plan.block_kv), kind_H
  out_HIcD, lse_HIc = _each_head(lambda head: _forward_head(plan, *head), tiled, heads_at_once)
  out_HSD = out_HIcD.reshape(len(kind_H), -1, q_HSD.shape[-1])[:, : q_HSD.shape[1]]
  return out_HSD, (q_HSD, k_HTD, v_HTD, kind_H, out_HSD, lse_HIc)


def _backward(plan, heads_at_once, saved, grad_HSD):
  q_HSD, k_HTD, v_HTD, kind_H, out_HSD, lse_HIc = saved
  tiled = (_tiled(q_HSD, plan.block_q), _tiled(k_HTD, plan.block_kv), _tiled(v_HTD, plan.block_kv), kind_H,
           _tiled(out_HSD, plan.block_q), lse_HIc, _tiled(grad_HSD, plan.block_q))
  grads = _each_head(lambda head: _backward_head(plan, *head), tiled, heads_at_once)
  dq, dk, dv = (g.reshape(x.shape[0], -1, x.shape[-1])[:, : x.shape[1]].astype(x.dtype)
                for g, x in zip(grads, (q_HSD, k_HTD, v_HTD), strict=True))
  return dq, dk, dv, None


tiled_attention.defvjp(_forward, _backward)
