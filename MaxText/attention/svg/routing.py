"""Which heads are spatial and which temporal: a few sampled queries are attended with either mask, the nearer one wins.

The sample covers the whole sequence, its positions are fixed by the grid alone, and each head's choice depends on nothing
but its own q, k and v: every shard and every host decides the same. What is scored is the mask that the kernel runs,
rounded where the kernel rounds.

Legend: B batch, S tokens, N heads, H heads of all batch elements, D head dim, R sampled rows, t keys of a chunk, M = 3
masks (none, spatial, temporal).
Scores are kept transposed, keys × rows: statistics of a row then need no sum across neighbouring elements.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from MaxText.attention import Grid
from MaxText.attention.dot_product import heads_first
from MaxText.attention.svg.masks import HeadMask, key_order, query_order
from MaxText.attention.svg.tiles import intervals

# Fractional parts of multiples of these fill the unit square evenly (the R2 sequence, M. Roberts 2018).
ROW_STEP, COLUMN_STEP = 0.7548776662466927, 0.5698402909980532


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
  sunk = mask.leading_frames
  outside = mask.num_sink + position * (mask.grid[0] - sunk) + frame - sunk
  return jnp.where(frame < sunk, token, outside)


def route(*args, **kwargs) -> jax.Array:
  """temporal_BN, bool: heads whose temporal mask has the smaller of `errors`. Ties are spatial. Arguments as `errors`."""
  error_BN2 = errors(*args, **kwargs)
  return error_BN2[..., 1] < error_BN2[..., 0]


def errors(
  q_BSND: jax.Array, k_BSND: jax.Array, v_BSND: jax.Array, spatial: HeadMask, temporal: HeadMask, *,
  num_sampled_queries: int, kernel: str, block_q: int, block_kv: int, chunk: int, backend: str = "xla",
  interpret: bool = False,
) -> jax.Array:
  """What each mask costs each head on the sampled rows.

  Args:
    q_BSND, k_BSND, v_BSND: frame-major.
    kernel, block_q, block_kv: what will run, hence which mask is scored.
    chunk: keys at a time on the XLA path; the largest array is B·N·3R × chunk.
    backend: 'xla', or 'pallas' for the TPU kernel; interpret runs that one anywhere, slowly.

  Returns:
    [B, N, 2] float32: mean squared error of the spatial and of the temporal mask's output to dense attention's, over
    (sampled rows, D).
  """
  rows = sampled_rows(spatial.grid, num_sampled_queries)
  edges = [_sampled_intervals(mask, rows, kernel, block_q, block_kv) for mask in (spatial, temporal)]

  def keep(token_t):
    """What spatial and temporal attention keep of these keys, two bool arrays [t, R]."""
    for mask, (sink, start_R, stop_R) in zip((spatial, temporal), edges, strict=True):
      key_t1 = key_positions(token_t, mask)[:, None]
      yield (key_t1 < sink) | ((key_t1 >= start_R) & (key_t1 < stop_R))

  with jax.named_scope("svg_route"):
    exponent = math.log2(math.e) / math.sqrt(q_BSND.shape[-1])
    if backend == "pallas":
      from MaxText.attention.svg import routing_kernel  # Pallas takes a while to import, and only a TPU needs it
      position_S = np.argsort(key_order(temporal), kind="stable")
      q_HSD, k_HSD, v_HSD = map(heads_first, (q_BSND, k_BSND, v_BSND))
      # Slices: for a gather XLA would first bring all of q into another layout.
      q_HRD = jnp.concatenate([q_HSD[:, row : row + 1] for row in rows], axis=1).astype(jnp.float32) * exponent
      out_HMRD = routing_kernel.sampled_outputs(q_HRD, k_HSD, v_HSD, position_S, tuple(edges), interpret=interpret)
      out_BNMRD = out_HMRD.reshape(len(q_BSND), -1, *out_HMRD.shape[1:])
    else:
      q_HRD = heads_first(q_BSND[:, rows]).astype(jnp.float32) * exponent
      out_HDMR = _sampled_outputs(q_HRD, heads_first(k_BSND), heads_first(v_BSND), keep, chunk)
      out_BNMRD = jnp.moveaxis(out_HDMR.reshape(len(q_BSND), -1, *out_HDMR.shape[1:]), 2, -1)
    return jnp.square(out_BNMRD[:, :, 1:] - out_BNMRD[:, :, :1]).mean((3, 4))


def _sampled_intervals(mask: HeadMask, rows: np.ndarray, kernel: str, block_q: int, block_kv: int):
  sink, start_S, stop_S = intervals(mask, kernel, block_q, block_kv)
  position = np.argsort(query_order(mask), kind="stable")[rows]
  return sink, start_S[position].astype(np.int32), stop_S[position].astype(np.int32)


def _sampled_outputs(q_HRD, k_HSD, v_HSD, keep, chunk: int) -> jax.Array:
  """Attention of the sampled rows without and under each mask in one pass over the keys, [H, D, M, R] float32.

  q comes times log2(e) / sqrt(D). `keep(tokens)` gives each mask's [t, R].
  The three share scores and exponentials, which are relative to the row's largest score of all keys. A mask that keeps
  nothing above 2⁻¹²⁶ of that weight gives 0.
  """
  H, R, D = q_HRD.shape
  num_keys, M = k_HSD.shape[1], 3
  chunk = min(chunk, num_keys)

  def step(carry, first):
    max_HR, sum_HMR, out_HDMR = carry
    begin = jnp.minimum(first, num_keys - chunk)  # the last chunk reaches back; what the one before it had is left out
    token_t = begin + lax.iota(jnp.int32, chunk)
    k_HtD, v_HtD = (
      lax.dynamic_slice_in_dim(x, begin, chunk, axis=1).astype(jnp.float32) for x in (k_HSD, v_HSD))
    score_HtR = jnp.einsum("htd,hrd->htr", k_HtD, q_HRD)
    score_HtR = jnp.where((token_t >= first)[:, None], score_HtR, -jnp.inf)
    new_max_HR = jnp.maximum(max_HR, score_HtR.max(-2))
    scale_HR = jnp.exp2(max_HR - new_max_HR)
    weight_HtR = jnp.exp2(score_HtR - new_max_HR[:, None])
    weight_HtX = jnp.concatenate([weight_HtR, *(jnp.where(kept, weight_HtR, 0.0) for kept in keep(token_t))], -1)
    part_HDX = jnp.einsum("htd,htx->hdx", v_HtD, weight_HtX)
    sum_HMR = sum_HMR * scale_HR[:, None] + weight_HtX.sum(-2).reshape(sum_HMR.shape)
    out_HDMR = out_HDMR * scale_HR[:, None, None] + part_HDX.reshape(out_HDMR.shape)
    return (new_max_HR, sum_HMR, out_HDMR), None

  start = (jnp.full((H, R), -jnp.inf), jnp.zeros((H, M, R)), jnp.zeros((H, D, M, R)))
  firsts = jnp.arange(-(-num_keys // chunk), dtype=jnp.int32) * chunk
  (_, sum_HMR, out_HDMR), _ = lax.scan(step, start, firsts)
  return out_HDMR / jnp.where(sum_HMR > 0, sum_HMR, 1.0)[:, None]
