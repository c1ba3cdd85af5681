"""The permutation of temporal heads as a Pallas TPU kernel: one read and one write, spatial heads by plain copies.

XLA's select (layout.py) reads both orders and materialises the other one first; this kernel looks at each head's flag. A
spatial head, and the sink frames of any head, are copied by DMA alone. A temporal head comes in blocks of `width`
positions of all frames, is shuffled in vector memory by strided stores (or loads, on the way back), and leaves by DMA.

Bytes moved: one read and one write of q, k, v and out, 8·H·S·D·itemsize in all. At 75,600 tokens, 10 heads of 128,
bfloat16 that is 1.55 GB, 0.95 ms at a v6e's 1,640 GB/s; the shuffle takes 0.05 ms an array beside it (AOT estimate, 100
steps). XLA compiles the select for the same shapes to 6.4 GB (its own cost analysis).

Legend: H heads (batch folded in), S = F·P tokens, F frames, P positions, D head dim, c frames in the sink, G = F − c.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
BLOCK_BYTES = 4 << 20  # of one block in float32, at most


def block_width(frames: int, positions: int) -> int:
  """Positions in a block: the largest divisor of P that is a multiple of 8 and fits BLOCK_BYTES; 0 if there is none."""
  most = BLOCK_BYTES // (frames * LANES * 4)
  return max((w for w in range(8, min(positions, most) + 1, 8) if positions % w == 0), default=0)


def permute(
  x_HSD: jax.Array, temporal_H: jax.Array, grid: tuple[int, int, int], sunk: int = 0, *, back: bool = False,
  interpret: bool = False,
) -> jax.Array:
  """Each head's tokens in its own order, [H, S, D]; spatial heads as they are.

  Args:
    temporal_H: traced flags; temporal heads move, unless all frames are in the sink.
    sunk: sink frames, which stay in front in frame-major order (keys and values); 0 for queries.
    back: from the head's order to frame-major order (outputs; sunk = 0).

  Raises:
    ValueError: P has no divisor that is a multiple of 8, so that no block is aligned (`block_width` is 0).
  """
  if sunk == grid[0]:
    return x_HSD
  H, S, D = x_HSD.shape
  F, P = grid[0], S // grid[0]
  G, width = F - sunk, block_width(F, P)
  if not width or (back and sunk):
    raise ValueError(f"no aligned blocks of {P} positions: P needs a divisor that is a multiple of 8, and back no sink")
  depth = -D % LANES
  x_HSD = jnp.pad(x_HSD, ((0, 0), (0, 0), (0, depth))) if depth else x_HSD
  x_HFPD = x_HSD.reshape(H, F, P, LANES)
  if back:  # the rows of a block lie together
    view = x_HSD
    block = pl.BlockSpec((None, width * G, LANES), lambda h, j, flags: (h, jnp.where(flags[h] != 0, j, 0), 0))
  else:
    view = x_HFPD
    block = pl.BlockSpec((None, F, width, LANES), lambda h, j, flags: (h, 0, jnp.where(flags[h] != 0, j, 0), 0))
  out = pl.pallas_call(
    functools.partial(_kernel, P=P, G=G, width=width, sunk=sunk, back=back),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(H, P // width),
      in_specs=[block, pl.BlockSpec(memory_space=pl.ANY)],
      out_specs=pl.BlockSpec(memory_space=pl.ANY),
      scratch_shapes=[
        pltpu.VMEM((width * G, LANES), jnp.float32),
        pltpu.VMEM((2, G, width, LANES) if back else (2, width * G, LANES), x_HSD.dtype),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SemaphoreType.DMA,
      ],
    ),
    out_shape=jax.ShapeDtypeStruct((H, F, P, LANES) if back else (H, S, LANES), x_HSD.dtype),
    compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=64 << 20),
    name="svg_permute",
    interpret=interpret,
  )(temporal_H.astype(jnp.int32), view, x_HFPD if back else x_HSD)
  return out.reshape(H, S, LANES)[..., :D]


def _kernel(flags_ref, block_ref, whole_ref, out_ref, wide_ref, stage_ref, sent, copied, *, P, G, width, sunk, back):
  h, j, last = pl.program_id(0), pl.program_id(1), pl.num_programs(1) - 1
  temporal = flags_ref[h] != 0

  def through_the_head(condition, copy):
    """A copy that runs beside all steps of its head."""
    pl.when(condition & (j == 0))(lambda: copy().start())
    pl.when(condition & (j == last))(lambda: copy().wait())

  through_the_head(~temporal, lambda: pltpu.make_async_copy(whole_ref.at[h], out_ref.at[h], copied))
  if sunk:
    sink = pl.ds(0, sunk * P)
    through_the_head(temporal, lambda: pltpu.make_async_copy(whole_ref.at[h, sink], out_ref.at[h, sink], copied))

  def send(step):
    """The copy of the block of a step out of its stage."""
    if back:
      place = out_ref.at[h, :, pl.ds(pl.multiple_of(step * width, 8), width)]
    else:
      place = out_ref.at[h, pl.ds(pl.multiple_of(sunk * P + step * width * G, 8), width * G)]
    return pltpu.make_async_copy(stage_ref.at[step % 2], place, sent.at[step % 2])

  @pl.when(temporal)
  def _():
    pl.when(j >= 2)(lambda: send(j - 2).wait())
    # Strided access needs 32-bit elements.
    if back:
      wide_ref[...] = block_ref[...].astype(jnp.float32)
      for f in range(G):
        stage_ref[j % 2, f] = wide_ref[pl.ds(f, width, stride=G), :].astype(stage_ref.dtype)
    else:
      for f in range(G):
        wide_ref[pl.ds(f, width, stride=G), :] = block_ref[sunk + f].astype(jnp.float32)
      stage_ref[j % 2] = wide_ref[...].astype(stage_ref.dtype)
    send(j).start()

  @pl.when(temporal & (j == last))
  def _():
    pl.when(j >= 1)(lambda: send(j - 1).wait())
    send(j).wait()
