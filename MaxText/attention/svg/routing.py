"""Which heads are spatial and which temporal: a few sampled queries are attended with either mask, the nearer one wins.

The sample covers the whole sequence, its positions are fixed by the grid alone, and each head's choice depends on nothing
but its own q, k and v: every shard and every host decides the same. What is scored is the mask that the kernel runs,
rounded where the kernel rounds.

Legend: B batch, S tokens, N heads, D head dim, R sampled rows, t keys of a chunk, M = 3 masks (none, spatial, temporal).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from MaxText.attention import Grid
from MaxText.attention.svg.masks import HeadMask, query_order
from MaxText.attention.svg.tiles import intervals

# Fractional parts of multiples of these fill the unit square evenly (the R2 sequence, M. Roberts 2018).
ROW_STEP, COLUMN_STEP = 0.7548776662466927, 0.5698402909980532
MASKED_SCORE = -1e30
CHUNK = 2048  # keys at a time


def sampled_rows(grid: Grid, count: int) -> np.ndarray:
  """Frame-major indices of the sampled queries, [R]: frames in equal shares, spread over the picture; all if few."""
  frames, height, width = grid
  tokens = frames * height * width
  if tokens <= count:
    return np.arange(tokens)
  index = np.arange(count)
  frame = ((index + 0.5) * frames / count).astype(int)
  row = ((index + 0.5) * ROW_STEP % 1 * height).astype(int)
  column = ((index + 0.5) * COLUMN_STEP % 1 * width).astype(int)
  return (frame * height + row) * width + column


def key_positions(token: jax.Array, mask: HeadMask) -> jax.Array:
  """Position in the head's key order of each frame-major token index (the inverse of masks.key_order, in arithmetic)."""
  if not mask.temporal:
    return token
  frame, position = token // mask.frame_tokens, token % mask.frame_tokens
  if not mask.sink_first:
    return position * mask.grid[0] + frame
  sunk = min(mask.sink_frames, mask.grid[0])
  outside = mask.num_sink + position * (mask.grid[0] - sunk) + frame - sunk
  return jnp.where(frame < sunk, token, outside)


def route(
  q_BSND: jax.Array, k_BSND: jax.Array, v_BSND: jax.Array, spatial: HeadMask, temporal: HeadMask, *,
  num_sampled_queries: int, kernel: str, block_q: int, block_kv: int,
) -> jax.Array:
  """Routes every head of every batch element.

  Args:
    q_BSND, k_BSND, v_BSND: frame-major.
    kernel, block_q, block_kv: what will run, hence which mask is scored.

  Returns:
    temporal_BN, bool: True where the temporal mask's output is nearer to dense attention's, in mean squared error over
    (sampled rows, D), float32. Ties are spatial.
  """
  rows = sampled_rows(spatial.grid, num_sampled_queries)
  edges = [_sampled_intervals(mask, rows, kernel, block_q, block_kv) for mask in (spatial, temporal)]

  def keep(token_t):
    """[M, R, t]: what dense, spatial and temporal attention keep of these keys."""
    kept = [jnp.ones((len(rows), len(token_t)), bool)]
    for mask, (sink, start_R, stop_R) in zip((spatial, temporal), edges, strict=True):
      key_t = key_positions(token_t, mask)
      kept.append((key_t < sink) | ((key_t >= start_R[:, None]) & (key_t < stop_R[:, None])))
    return jnp.stack(kept)

  with jax.named_scope("svg_route"):
    out_BNMRD = _sampled_outputs(q_BSND[:, rows], k_BSND, v_BSND, keep)
    error_BNM = jnp.square(out_BNMRD[:, :, 1:] - out_BNMRD[:, :, :1]).mean((-2, -1))
    return error_BNM[..., 1] < error_BNM[..., 0]


def _sampled_intervals(mask: HeadMask, rows: np.ndarray, kernel: str, block_q: int, block_kv: int):
  sink, start_S, stop_S = intervals(mask, kernel, block_q, block_kv)
  position = np.argsort(query_order(mask), kind="stable")[rows]
  return sink, start_S[position].astype(np.int32), stop_S[position].astype(np.int32)


def _sampled_outputs(q_BRND, k_BSND, v_BSND, keep) -> jax.Array:
  """Attention of the sampled rows under each mask in one pass over the keys, [B, N, M, R, D] float32."""
  B, R, N, D = q_BRND.shape
  num_keys, M = k_BSND.shape[1], 3
  chunk = min(CHUNK, num_keys)
  q_BRND = q_BRND.astype(jnp.float32) * (math.log2(math.e) / math.sqrt(D))

  def step(carry, first):
    max_BNMR, sum_BNMR, out_BNMRD = carry
    begin = jnp.minimum(first, num_keys - chunk)  # the last chunk reaches back; what it has in common with the one before
    token_t = begin + lax.iota(jnp.int32, chunk)  # is left out
    k_BtND, v_BtND = (
      lax.dynamic_slice_in_dim(x, begin, chunk, axis=1).astype(jnp.float32) for x in (k_BSND, v_BSND))
    score_BNRt = jnp.einsum("brnd,btnd->bnrt", q_BRND, k_BtND)
    kept_MRt = keep(token_t) & (token_t >= first)
    score_BNMRt = jnp.where(kept_MRt, score_BNRt[:, :, None], MASKED_SCORE)
    new_max_BNMR = jnp.maximum(max_BNMR, score_BNMRt.max(-1))
    scale_BNMR = jnp.exp2(max_BNMR - new_max_BNMR)
    weight_BNMRt = jnp.exp2(score_BNMRt - new_max_BNMR[..., None])
    part_BNMRD = jnp.einsum("bnmrt,btnd->bnmrd", weight_BNMRt, v_BtND)
    sum_BNMR = sum_BNMR * scale_BNMR + weight_BNMRt.sum(-1)
    return (new_max_BNMR, sum_BNMR, out_BNMRD * scale_BNMR[..., None] + part_BNMRD), None

  start = (jnp.full((B, N, M, R), MASKED_SCORE), jnp.zeros((B, N, M, R)), jnp.zeros((B, N, M, R, D)))
  firsts = jnp.arange(-(-num_keys // chunk), dtype=jnp.int32) * chunk
  (_, sum_BNMR, out_BNMRD), _ = lax.scan(step, start, firsts)
  return out_BNMRD / sum_BNMR[..., None]
