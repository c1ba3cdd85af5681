"""Orders of tokens: temporal heads go to position-major order, spatial heads stay, chosen head by head with a select.

Queries and outputs of a temporal head lie in plain position-major order, its keys and values in sink-first position-major
order: the sink frames as they are, then the other frames position-major. Every tile of queries then sees the sink and one
run of keys (facts in masks.row_intervals).

An order is a transposition of [F, P], so no index array is read. The select reads both orders and writes one: 3 passes
over each of q, k, v and out, 12·B·S·N·D elements in all where XLA fuses the transposition into it, as on a CPU. On a TPU
it does not, so temporal heads are permuted by a kernel there (layout_kernel.py).

Legend: B batch, F frames, P tokens a frame, S = F·P, N heads, D head dim. Arrays are [B, S, N, D] unless `axis` says
where else the tokens lie.
"""

import jax
import jax.numpy as jnp

from MaxText.attention.svg.masks import HeadMask


def to_position_major(x: jax.Array, frames: int, axis: int = 1) -> jax.Array:
  """Tokens from frame-major [F, P] to position-major [P, F] order."""
  split = x.reshape(*x.shape[:axis], frames, -1, *x.shape[axis + 1 :])
  return jnp.swapaxes(split, axis, axis + 1).reshape(x.shape)


def to_frame_major(x: jax.Array, frames: int, axis: int = 1) -> jax.Array:
  """The way back."""
  split = x.reshape(*x.shape[:axis], -1, frames, *x.shape[axis + 1 :])
  return jnp.swapaxes(split, axis, axis + 1).reshape(x.shape)


def to_key_order(x: jax.Array, mask: HeadMask, axis: int = 1) -> jax.Array:
  """Tokens from frame-major order to the key order of a temporal head."""
  frames, sunk = mask.grid[0], mask.leading_frames
  if sunk == 0:
    return to_position_major(x, frames, axis)
  if sunk == frames:
    return x
  sink, rest = jnp.split(x, [mask.num_sink], axis)
  return jnp.concatenate([sink, to_position_major(rest, frames - sunk, axis)], axis)


def select_heads(temporal_BN: jax.Array, temporal_BSND: jax.Array, spatial_BSND: jax.Array) -> jax.Array:
  """Each head in its own order."""
  return jnp.where(temporal_BN[:, None, :, None], temporal_BSND, spatial_BSND)
