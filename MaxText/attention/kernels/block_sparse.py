"""One Pallas TPU kernel for dense and block-sparse attention: a flat list of kept tiles, one inner loop.

Legend: H heads (batch folded in), S query tokens, T key tokens, D head dim (128 lanes inside), L steps of the launch,
P patterns (static step lists that a head may choose from), q a query tile of `block_q` rows, c a chunk of keys.

What makes it fast, in the order of its worth:

* **Transposed products.** S^T = K Q^T and O^T += V^T P^T put the keys on sublanes. The second product then fills a
  256 x 256 MXU (128 rows x keys x queries) at half the cycles of P V, and row statistics need no cross-lane work.
* **No running maximum on the critical path.** The reference m of a row comes from a probe of the first kept keys; any
  m within +-100 (log2) of the true maximum is exact in float32. A step that meets more is done again, see below.
* **The idle half of the contraction carries -m.** D = 128 fills half of the 256-deep MXU; two further rows of Q^T hold
  -m (as a bfloat16 pair, 16 bits) against ones in K, so the subtraction costs nothing.
* **Only kept tiles exist.** The grid is one axis over a scalar-prefetched list of (head, query tile, key tile); idle
  slots repeat the block of the step before, so they fetch nothing.

When a step's logits rise more than 100 above the reference (or stay 100 below it where the probe could not see kept
keys), its result is dropped: accumulators are double buffered, so the state before the step is still there. The
reference moves to the maximum just seen, the old state is rescaled, and the step runs again. That is right for every
input and costs one more pass of just that step.

Precision: bfloat16 products with float32 accumulation, base-2 exponentials, P rounded to bfloat16 for the second
product, sums of P in float32.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from MaxText.attention.kernels import steps as steplib
from MaxText.attention.kernels.steps import StepPlan

LANES = 128
MASKED = -1e30  # logit of a pair that is not kept; exp2 gives exactly 0
UNSEEN = -5e29  # a row maximum below this has met no kept key yet
LIMIT = 100.0  # log2: largest exponent above the reference that a step may keep (sums over 2^20 keys stay in float32)
RECENTRE = 40.0  # log2: rows farther than this from the reference move when a step is done again
FAR_KEY = 2**30  # key index of a row that a clamped chunk reads twice: outside every band and sink

NN = (((1,), (0,)), ((), ()))  # A B
NT = (((1,), (1,)), ((), ()))  # A B^T
TN = (((0,), (0,)), ((), ()))  # A^T B
f32, bf16 = jnp.float32, jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class KernelTiling:
  """How the kernel walks through one tile; none of it changes the result.

  Attributes:
    chunk: keys of one pass of the unmasked body (a multiple of 16; multiples of 256 fill the MXU).
    unroll: whether the unmasked body is one straight line (True) or a loop over chunks.
    probe: keys of the first tile that give the reference maximum.
    reference_in_mxu: subtract m inside the product: free on 256-deep MXUs (v6e, tpu7x), twice the work on 128-deep ones.
    vmem_limit_bytes: scoped VMEM that the compiler may use.
  """

  chunk: int = 1024
  unroll: bool = True
  probe: int = 128
  reference_in_mxu: bool = True
  vmem_limit_bytes: int = 110 * 2**20


def when(condition):
  """pl.when, where None means always."""
  return pl.when(condition) if condition is not None else lambda body: body()


def _kernel(
    blocks_L, flags_L, q_ref, k_ref, v_ref, *rest,
    plan: StepPlan, tiling: KernelTiling, scale: float,
):  # fmt: skip
  if plan.edges_P3S is not None:
    edges_ref, *rest = rest
  o_ref, qt_s, m_s, l_s, o_s, turn_s = rest
  step = pl.program_id(0)
  flags = flags_L[step]
  _, row, col = steplib.unpack_block(blocks_L[step])
  block_q, block_kv = q_ref.shape[0], k_ref.shape[0]
  by_band = plan.edges_P3S is not None

  def has(bit):
    return (flags & bit) != 0

  def keep_both_edges(key_c1, by_band=by_band):
    """Boolean [c, q]: the whole mask."""
    if not by_band:
      return key_c1 < plan.num_keys
    in_band = (key_c1 >= edges_ref[0:1, :]) & (key_c1 < edges_ref[1:2, :])
    return in_band | (key_c1 < plan.sink) if plan.sink else in_band

  def keep_one_edge(key_c1):
    """Boolean [c, q] where only the band's start, or only its end, crosses the tile: one comparison for either."""
    upper = has(steplib.UPPER)
    key = jnp.where(upper, -1 - key_c1, key_c1)  # key < stop  <=>  -1 - key >= -stop
    return key >= jnp.where(upper, edges_ref[2:3, :], edges_ref[0:1, :])

  def key_rows(start, size):
    return col * block_kv + start + lax.broadcasted_iota(jnp.int32, (size, 1), 0)

  def ones_for_reference(size):
    lane = lax.broadcasted_iota(jnp.int32, (size, LANES), 1)
    return jnp.where(lane >= LANES - 2, 1.0, 0.0).astype(bf16)

  def write_reference(m_1q):
    """Stores -m in the last two rows of the augmented Q^T; returns what they really hold."""
    high = m_1q.astype(bf16).astype(f32)
    low = (m_1q - high).astype(bf16).astype(f32)
    sub = lax.broadcasted_iota(jnp.int32, (16, block_q), 0)
    rows = jnp.where(sub == 14, -high, jnp.where(sub == 15, -low, 0.0))
    qt_s[2 * LANES - 16 :, :] = rows.astype(bf16)
    return high + low

  def read_reference():
    rows = qt_s[2 * LANES - 16 :, :].astype(f32)
    return -(rows[14:15, :] + rows[15:16, :])

  @pl.when(step == 0)
  def _start_launch():
    turn_s[0] = 0

  @pl.when(has(steplib.FIRST))
  def _start_query_tile():
    src = turn_s[0]
    o_s[src] = jnp.zeros_like(o_s[src])
    l_s[src] = jnp.zeros_like(l_s[src])
    m_s[...] = jnp.full_like(m_s, MASKED)
    q = q_ref[...]
    if plan.num_queries % block_q:  # rows past the end hold anything, NaN too
      q_row = row * block_q + lax.broadcasted_iota(jnp.int32, (block_q, LANES), 0)
      q = jnp.where(q_row < plan.num_queries, q.astype(f32), 0.0).astype(bf16)
    # Q^T by a product with the identity: exact, and cheaper than the transpose unit.
    a, b = (lax.broadcasted_iota(jnp.int32, (LANES, LANES), d) for d in (0, 1))
    qt = lax.dot_general(jnp.where(a == b, 1.0, 0.0).astype(bf16), q, NT, preferred_element_type=f32)
    qt = (qt * scale).astype(bf16)
    qt_s[:LANES, :] = qt
    qt_s[LANES : 2 * LANES - 16, :] = jnp.zeros((LANES - 16, block_q), bf16)
    probe = min(tiling.probe, block_kv)
    s = lax.dot_general(k_ref[:probe, :], qt, NN, preferred_element_type=f32)
    if plan.probe_masked or plan.has_tail:
      s = jnp.where(keep_both_edges(key_rows(0, probe), plan.probe_masked), s, MASKED)
    m = s.max(axis=0, keepdims=True)
    write_reference(jnp.where(m > UNSEEN, m, 0.0))

  def attend(start, size, src, dst, keep=None):
    """Adds `size` keys to the state; `keep` [c, q] masks pairs, None keeps all."""
    k = k_ref[pl.ds(start, size), :]
    if tiling.reference_in_mxu:
      k = jnp.concatenate([k, ones_for_reference(size)], axis=1)
      s = lax.dot_general(k, qt_s[...], NN, preferred_element_type=f32)
    else:
      s = lax.dot_general(k, qt_s[:LANES, :], NN, preferred_element_type=f32) - read_reference()
    if keep is not None:
      s = jnp.where(keep, s, MASKED)
    v = v_ref[pl.ds(start, size), :]
    if keep is not None and plan.has_tail:  # 0 x NaN is NaN: rows past the end must not reach the product
      v = jnp.where(key_rows(start, size) < plan.num_keys, v.astype(f32), 0.0).astype(bf16)
    by_sublane = (size // 8, 8, block_q)
    m_s[...] = jnp.maximum(m_s[...], s.reshape(by_sublane).max(axis=0))
    p = jnp.exp2(s)
    l_s[dst] = l_s[src] + p.reshape(by_sublane).sum(axis=0)
    o_s[dst] = o_s[src] + lax.dot_general(v, p.astype(bf16), TN, preferred_element_type=f32)

  def fast_body(src, dst):
    """Every pair of the tile counts."""
    sizes = steplib.split(block_kv, tiling.chunk)
    start = 0
    if not tiling.unroll:
      looped = steplib.leading_equal(sizes)

      def chunk(i, _):
        attend(pl.multiple_of(i * sizes[0], 16), sizes[0], jnp.where(i == 0, src, dst), dst)

      lax.fori_loop(0, looped, chunk, None)
      start, sizes = looped * sizes[0], sizes[looped:]
    for size in sizes:
      attend(start, size, dst if start else src, dst)
      start += size

  def masked_body(src, dst, keep, nowhere):
    """Masks every pair, and visits only the chunks that hold kept keys."""
    size = min(plan.masked_chunk, block_kv)
    o_s[dst] = o_s[src]
    l_s[dst] = l_s[src]

    def chunk(c, _):
      start = pl.multiple_of(jnp.minimum(c * size, block_kv - size), 16)  # the last chunk may reach back
      key = key_rows(start, size)
      if block_kv % size:
        again = lax.broadcasted_iota(jnp.int32, (size, 1), 0) < c * size - start
        key = jnp.where(again, nowhere, key)  # a key read twice counts once
      attend(start, size, dst, dst, keep(key))

    lax.fori_loop(*steplib.unpack_chunks(flags), chunk, None)

  def too_far():
    """Whether a row's largest exponent has left the range in which float32 holds the step's sums."""
    far = jnp.max(m_s[...]) > LIMIT
    if plan.probe_masked:  # the probe may have met no kept key of a row, then m can also be far too high
      row_max = m_s[...].max(axis=0, keepdims=True)
      far |= jnp.max(jnp.where(row_max > UNSEEN, -row_max, 0.0)) > LIMIT
    return far

  # Conditions that hold for every step of the launch are left out: straight-line code overlaps better.
  @when(has(steplib.ACTIVE) if plan.any_idle else None)
  def _step():
    src = turn_s[0]
    dst = 1 - src
    turn_s[0] = dst
    if plan.any_full:
      when(~has(steplib.MASKED) if plan.any_masked else None)(lambda: fast_body(src, dst))
    one_edge = has(steplib.LOWER | steplib.UPPER)
    if plan.any_one_edge:
      pl.when(one_edge)(lambda: masked_body(src, dst, keep_one_edge, jnp.where(has(steplib.LOWER), -FAR_KEY, FAR_KEY)))
    undone = has(steplib.MASKED) & ~one_edge if plan.any_both_edges else False

    def attempt(state):
      tries, _ = state
      row_max = m_s[...].max(axis=0, keepdims=True)
      moves = (row_max > UNSEEN) & (jnp.abs(row_max) > RECENTRE)
      old = read_reference()
      shift = write_reference(old + jnp.where(moves, row_max, 0.0)) - old
      # A row that moves down has met no kept key before this step: its sums are 0, and 0 times a bounded factor stays 0.
      factor = jnp.exp2(jnp.minimum(-shift, 126.0))
      o_s[src] = o_s[src] * factor
      l_s[src] = l_s[src] * factor
      m_s[...] = m_s[...] - shift
      masked_body(src, dst, keep_both_edges, FAR_KEY)
      return tries + 1, too_far()

    # A second attempt always fits unless the logits are beyond float32 itself; a third bounds the loop.
    lax.while_loop(lambda state: state[1] & (state[0] < 3), attempt, (0, too_far() | undone))

  @pl.when(has(steplib.LAST))
  def _finish_query_tile():
    now = turn_s[0]
    l = l_s[now].sum(axis=0, keepdims=True)
    o = o_s[now] * jnp.where(l > 0, 1.0 / l, 0.0)  # a query tile without keys gives 0
    o_ref[...] = o.T.astype(o_ref.dtype)


def launch_steps(plan: StepPlan, pattern_H: jax.Array, num_heads: int) -> tuple[jax.Array, jax.Array]:
  """The launch's step list: (blocks_L, flags_L) int32 for the patterns that the heads chose (traced values)."""
  head_HL = jnp.arange(num_heads, dtype=jnp.int32)[:, None]
  blocks_HL = jnp.asarray(plan.blocks_PL)[pattern_H] | steplib.pack_head(head_HL)
  flags_HL = jnp.asarray(plan.flags_PL)[pattern_H] | steplib.pack_pattern(pattern_H[:, None].astype(jnp.int32))
  return blocks_HL.reshape(-1), flags_HL.reshape(-1)


def block_sparse_attention(
    q_HSD: jax.Array,
    k_HTD: jax.Array,
    v_HTD: jax.Array,
    plan: StepPlan,
    pattern_H: jax.Array | None = None,
    *,
    tiling: KernelTiling | None = None,
    scale: float | None = None,
    interpret: bool = False,
) -> jax.Array:
  """softmax(scale q k^T + mask) v over the tiles that the plan keeps.

  Args:
    q_HSD: queries, bfloat16 inside whatever they come as; D at most 128.
    k_HTD, v_HTD: keys and values, in the order that the plan's key tiles count.
    plan: static step lists and mask (`steps.plan_steps`, `steps.dense_plan`).
    pattern_H: integer or boolean, traced: which of the plan's patterns each head follows; None means pattern 0.
    tiling: how the kernel walks through a tile.
    scale: of the logits, default D ** -0.5.
    interpret: run in Pallas' interpreter (any backend, slow).

  Returns:
    out_HSD in the dtype of q. A query that keeps no key gives 0.

  Raises:
    ValueError: shapes that do not fit the plan.
  """
  tiling = tiling or KernelTiling()
  H, S, D = q_HSD.shape
  T = k_HTD.shape[1]
  if k_HTD.shape != (H, T, D) or v_HTD.shape != (H, T, D):
    raise ValueError(f"k {k_HTD.shape} and v {v_HTD.shape} must be {(H, T, D)} for q {q_HSD.shape}")
  if (S, T) != (plan.num_queries, plan.num_keys):
    raise ValueError(f"the plan is for {plan.num_queries} queries and {plan.num_keys} keys, not {S} and {T}")
  if D > LANES:
    raise ValueError(f"head dim {D}: this kernel carries at most {LANES}")
  if H * plan.num_steps > steplib.MAX_STEPS:
    raise ValueError(f"{H} heads x {plan.num_steps} steps in one launch: scalar memory holds {steplib.MAX_STEPS}; choose "
                     f"larger tiles than {plan.block_q} x {plan.block_kv}, or fewer heads")
  if H > steplib.MAX_HEADS:
    raise ValueError(f"{H} heads x batch in one launch: at most {steplib.MAX_HEADS}; split the batch")
  scale = (D**-0.5 if scale is None else scale) * math.log2(math.e)
  dtype = q_HSD.dtype
  q_HSD, k_HTD, v_HTD = (x.astype(bf16) for x in (q_HSD, k_HTD, v_HTD))
  if D < LANES:
    q_HSD, k_HTD, v_HTD = (jnp.pad(x, ((0, 0), (0, 0), (0, LANES - D))) for x in (q_HSD, k_HTD, v_HTD))
  if pattern_H is None:
    pattern_H = jnp.zeros((H,), jnp.int32)
  blocks_L, flags_L = launch_steps(plan, pattern_H.astype(jnp.int32), H)

  block_q, block_kv = plan.block_q, plan.block_kv
  def at(pick):
    return lambda s, blocks, flags: pick(*steplib.unpack_block(blocks[s]), flags[s])
  q_spec = pl.BlockSpec((None, block_q, LANES), at(lambda h, r, c, f: (h, r, 0)))
  kv_spec = pl.BlockSpec((None, block_kv, LANES), at(lambda h, r, c, f: (h, c, 0)))
  in_specs, operands = [q_spec, kv_spec, kv_spec], [q_HSD, k_HTD, v_HTD]
  if plan.edges_P3S is not None:
    in_specs.append(pl.BlockSpec((None, 3, block_q), at(lambda h, r, c, f: (steplib.unpack_pattern(f), 0, r))))
    operands.append(jnp.asarray(plan.edges_P3S))
  out = pl.pallas_call(
      functools.partial(_kernel, plan=plan, tiling=tiling, scale=scale),
      grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=2,
          grid=(blocks_L.shape[0],),
          in_specs=in_specs,
          out_specs=q_spec,
          scratch_shapes=[
              pltpu.VMEM((2 * LANES, block_q), bf16),  # scaled Q^T over -m
              pltpu.VMEM((8, block_q), f32),  # largest exponent met, relative to m
              pltpu.VMEM((2, 8, block_q), f32),  # sums of P, before and after the step
              pltpu.VMEM((2, LANES, block_q), f32),  # O^T, before and after the step
              pltpu.SMEM((1,), jnp.int32),  # which of the two holds the state
          ],
      ),
      out_shape=jax.ShapeDtypeStruct((H, S, LANES), bf16),
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=("arbitrary",),
          disable_bounds_checks=True,
          vmem_limit_bytes=tiling.vmem_limit_bytes,
      ),
      interpret=interpret,
      name=plan.kernel_name,
  )(blocks_L, flags_L, *operands)
  return out[..., :D].astype(dtype)
