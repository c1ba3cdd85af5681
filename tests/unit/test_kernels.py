"""The Pallas kernel in interpret mode against masked softmax in float64, on tiny tiles.

Legend: H heads, S query tokens, T key tokens, D head dim.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.attention.kernels import block_sparse, steps
from MaxText.attention.kernels.block_sparse import KernelTiling, block_sparse_attention
from MaxText.attention.svg import masks, tiles

TINY = KernelTiling(chunk=32, probe=16)
CHUNK = 32  # keys of a masked pass


def make_qkv(H, S, T=None, D=128, gain=1.0, seed=0):
  rng = np.random.default_rng(seed)
  shapes = ((H, S, D), (H, T or S, D), (H, T or S, D))
  return tuple(jnp.asarray(rng.normal(size=s) * g, jnp.bfloat16) for s, g in zip(shapes, (gain, gain, 1.0), strict=True))


def reference(q_HSD, k_HTD, v_HTD, keep_HST):
  """Float64 softmax over kept pairs; rows that keep nothing give 0. Rounds scaled q to bfloat16 as the kernel does."""
  scale = jnp.float32(q_HSD.shape[-1] ** -0.5 * np.log2(np.e))
  q, k, v = (np.asarray(x, np.float64) for x in ((q_HSD * scale).astype(jnp.bfloat16), k_HTD, v_HTD))
  s = np.where(keep_HST, np.einsum("hsd,htd->hst", q, k), -np.inf)
  top = s.max(-1, keepdims=True)
  p = np.exp2(s - np.where(np.isfinite(top), top, 0.0))
  total = p.sum(-1, keepdims=True)
  return np.einsum("hst,htd->hsd", p, v) / np.where(total > 0, total, 1.0)


def assert_close(out, expected):
  """Within bfloat16 tolerance: the relative root mean square of P and output rounding is about 2^-9 each."""
  out = np.asarray(out, np.float64)
  assert np.isfinite(out).all()
  scale = np.sqrt((expected**2).mean())
  assert np.sqrt(((out - expected) ** 2).mean()) <= 0.01 * scale
  assert np.abs(out - expected).max() <= 0.06 * max(scale, np.abs(expected).max())


def svg_plan(kernel, head_masks, block_q, block_kv, masked_chunk=CHUNK, probe=TINY.probe):
  """Plan with one pattern a mask, and the kept pairs of each pattern in the kernel's own order, bool [P, S, S]."""
  S = head_masks[0].num_tokens
  tables = np.stack([tiles.TABLES[kernel](m, block_q, block_kv, False) for m in head_masks])
  intervals = [masks.row_intervals(m)[1:] for m in head_masks]
  plan = steps.plan_steps(
      tables, S, S, block_q, block_kv, intervals=None if kernel == "aligned" else intervals,
      sink=head_masks[0].num_sink, masked_chunk=masked_chunk, probe=probe,
  )  # fmt: skip
  if kernel == "aligned":
    keep = np.repeat(np.repeat(tables != steps.EMPTY, block_q, 1), block_kv, 2)[:, :S, :S]
  else:
    key = np.arange(S)
    keep = np.stack([
        (key < m.num_sink) | ((key >= start[:, None]) & (key < stop[:, None]))
        for m, (start, stop) in zip(head_masks, intervals, strict=True)
    ])
  return plan, keep


# The interpreter's programs are large and run once: compile them without optimization.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@functools.partial(jax.jit, static_argnames=("plan", "tiling"), compiler_options=QUICK)
def run(q, k, v, pattern_H=None, *, plan, tiling=TINY):
  return block_sparse_attention(q, k, v, plan, pattern_H, tiling=tiling, interpret=True)


@pytest.mark.parametrize("S,T,D", [(300, 300, 128), (100, 100, 64), (130, 75, 128)])
def test_dense_on_ragged_and_short_sequences(S, T, D):
  qkv = make_qkv(2, S, T, D)
  plan = steps.dense_plan(S, T, 128, min(64, -(-T // 16) * 16) if S > 100 else 128, CHUNK)
  assert_close(run(*qkv, plan=plan), reference(*qkv, np.ones((1, S, T), bool)))


def test_the_walk_through_a_tile_does_not_change_the_result():
  tiling = KernelTiling(chunk=32, probe=16, unroll=False)
  qkv = make_qkv(1, 256)
  plan = steps.dense_plan(256, 256, 256, 112, 48)
  assert_close(run(*qkv, plan=plan, tiling=tiling), reference(*qkv, np.ones((1, 256, 256), bool)))


# (grid, half width): ragged; s = .50 whose temporal edges differ by one between rows; one frame; everything in the band.
CASES = [((5, 4, 15), 60), ((7, 5, 9), masks.half_width(0.5, 315)), ((1, 12, 13), 40), ((3, 6, 10), 179)]


@pytest.mark.parametrize("kernel,grid,half_width", [
    *(("exact", *case) for case in CASES), *(("aligned", *case) for case in CASES[1:3]), ("naive", *CASES[1]),
])
def test_svg_kernels_equal_their_mask(kernel, grid, half_width):
  """All spatial, all temporal, mixed, and a batch of two with different routes: one executable, flags are traced."""
  head_masks = [masks.HeadMask(grid, half_width, temporal) for temporal in (False, True)]
  plan, keep = svg_plan(kernel, head_masks, 128, 64)
  qkv = make_qkv(4, head_masks[0].num_tokens)
  for routes in ([0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 1, 0]):
    assert_close(run(*qkv, jnp.asarray(routes), plan=plan), reference(*qkv, keep[routes]))


@pytest.mark.parametrize("kernel", ["exact", "aligned"])
def test_mask_token_for_token(kernel):
  """Equal logits and one-hot values: the output itself lists the kept keys of every row."""
  head_masks = [masks.HeadMask((7, 5, 9), 64, temporal) for temporal in (False, True)]
  plan, keep = svg_plan(kernel, head_masks, 128, 64)
  S = head_masks[0].num_tokens
  zero = jnp.zeros((2, S, 128), jnp.bfloat16)
  got = np.zeros((2, S, S), bool)
  for start in range(0, S, 128):
    one_hot = jnp.eye(S, 128, -start, jnp.bfloat16)
    share = np.asarray(run(zero, zero, jnp.broadcast_to(one_hot, (2, S, 128)), jnp.array([0, 1]), plan=plan), np.float32)
    counts = share * keep.sum(-1)[..., None]
    assert (np.abs(counts - np.round(counts)) < 0.02).all() and counts.max() < 1.1
    got[:, :, start : start + 128] = np.round(counts)[:, :, : S - start].astype(bool)
  assert (got == keep).all()


def test_density_one_equals_dense():
  head_masks = [masks.HeadMask((3, 6, 10), masks.half_width(1.0, 180), t) for t in (False, True)]
  qkv = make_qkv(2, 180)
  dense = run(*qkv, plan=steps.dense_plan(180, 180, 128, 64, CHUNK))
  for kernel in ("exact", "aligned"):
    plan, _ = svg_plan(kernel, head_masks, 128, 64)
    np.testing.assert_array_equal(run(*qkv, jnp.array([0, 1]), plan=plan), dense)


def ramp(S, growth, seed=1):
  """Logits that grow by about `growth` (log2) along the keys."""
  q, k, v = (np.array(x, np.float32) for x in make_qkv(1, S, seed=seed))
  q[..., 0], k[..., 0] = 12.0, np.arange(S) / S * growth / (12.0 * 128**-0.5 * np.log2(np.e))
  return tuple(jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))


@pytest.mark.parametrize("case", ["wild", "rising", "far below zero"])
def test_logits_that_jump_by_more_than_100(case):
  """Steps that leave float32's range are done again, in unmasked and in masked tiles."""
  if case == "wild":
    qkv = make_qkv(1, 300, gain=12.0)
  else:
    qkv = ramp(300, {"rising": 1500.0, "far below zero": -4000.0}[case])
  plan = steps.dense_plan(300, 300, 128, 64, CHUNK)
  expected = reference(*qkv, np.ones((1, 300, 300), bool))
  out = np.asarray(run(*qkv, plan=plan), np.float64)
  # bfloat16 rounding of q at these gains moves single weights; most rows must agree closely and all must be finite.
  assert np.isfinite(out).all()
  assert np.sqrt(((out - expected) ** 2).mean()) <= 0.05 * np.sqrt((expected**2).mean())


@pytest.mark.parametrize("kernel,sink_frames", [("exact", 1), ("exact", 0)])
def test_masked_keys_may_have_any_logit(kernel, sink_frames):
  """Keys outside a row's mask tower 1,000 above the kept ones or lie as far below; the reference must not see them.

  Without a sink a narrow band leaves query tiles whose first keys belong to none or some of their rows.
  """
  head_masks = [masks.HeadMask((5, 4, 15), 20, temporal, sink_frames) for temporal in (False, True)]
  plan, keep = svg_plan(kernel, head_masks, 128, 64)
  assert plan.probe_masked == (sink_frames == 0)
  q, k, v = (jnp.repeat(x, 2, 0) for x in ramp(300, 3000.0))
  for qkv in ((q, k, v), (-q, k, v)):
    out = np.asarray(run(*qkv, jnp.array([0, 1]), plan=plan), np.float64)
    expected = reference(*qkv, keep)
    assert np.isfinite(out).all()
    assert np.sqrt(((out - expected) ** 2).mean()) <= 0.05 * np.sqrt((expected**2).mean())


def test_arbitrary_tile_list_a_head():
  """Any table will do, one a head; a query tile without tiles gives 0."""
  tables = np.random.default_rng(3).integers(0, 2, (3, 3, 5)) * steps.FULL
  tables[1, 1] = steps.EMPTY
  plan = steps.plan_steps(tables, 300, 310, 128, 64,  probe=16)
  qkv = make_qkv(3, 300, 310)
  keep = np.repeat(np.repeat(tables != 0, 128, 1), 64, 2)[:, :300, :310]
  out = run(*qkv, jnp.arange(3), plan=plan)
  assert_close(out, reference(*qkv, keep))
  assert not np.asarray(out[1, 128:256]).any()


def test_not_a_number_beyond_the_sequence_is_never_read():
  """Interpret mode fills blocks past the end with NaN: ragged queries, keys and values together."""
  qkv = make_qkv(1, 140, 150)
  plan = steps.dense_plan(140, 150, 128, 128, 64)
  assert_close(run(*qkv, plan=plan), reference(*qkv, np.ones((1, 140, 150), bool)))


def test_wrong_shapes_are_refused():
  q, k, v = make_qkv(1, 128)
  with pytest.raises(ValueError, match="plan is for 256 queries"):
    block_sparse_attention(q, k, v, steps.dense_plan(256, 128, 128, 64))
  with pytest.raises(ValueError, match="multiple of 128"):
    steps.dense_plan(256, 256, 100, 64)
  with pytest.raises(ValueError, match="larger tiles"):
    steps.dense_plan(302_400, 302_400, 256, 256)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["dense", "aligned", "exact"])
def test_production_tiles(kernel):
  """Production tile sizes and flags on a short clip: 2 query tiles x 2 key tiles, one of each ragged."""
  tiling = KernelTiling(chunk=1200)
  grid = (2, 36, 50)
  head_masks = [masks.HeadMask(grid, 1100, temporal) for temporal in (False, True)]
  qkv = make_qkv(2, 3600)
  if kernel == "dense":
    plan, keep = steps.dense_plan(3600, 3600, 3328, 3024, 512), np.ones((2, 3600, 3600), bool)
  else:
    plan, keep = svg_plan(kernel, head_masks, 3328, 1808, 512, tiling.probe)
  routes = None if kernel == "dense" else jnp.array([0, 1])
  assert_close(run(*qkv, routes, plan=plan, tiling=tiling), reference(*qkv, keep))


def test_launch_is_flat_and_hardly_idle():
  """720p at s = .35, 10 heads, 3,328 x 3,600 tiles: at most 2,500 grid steps, at most 2 % idle, whatever the routes."""
  head_masks = [masks.HeadMask((21, 45, 80), masks.half_width(0.35, 75_600), t) for t in (False, True)]
  tables = np.stack([tiles.aligned_table(m, 3328, 3600, False) for m in head_masks])
  plan = steps.plan_steps(tables, 75_600, 75_600, 3328, 3600)
  assert plan.num_steps * 10 <= 2500
  assert not plan.any_masked  # 3,600 divides the sequence: nothing is padded
  for pattern in (0, 1):
    counts = plan.counts(pattern)
    assert counts["steps"] - counts["active"] <= 0.02 * counts["steps"]
    assert counts["active"] == np.count_nonzero(tables[pattern])
  blocks, flags = block_sparse.launch_steps(plan, jnp.array([0, 1]), 2)
  head, row, col = (np.asarray(x) for x in steps.unpack_block(blocks))
  active = (np.asarray(flags) & steps.ACTIVE) != 0
  for h in (0, 1):
    got = np.zeros_like(tables[h])
    got[row[active & (head == h)], col[active & (head == h)]] = steps.FULL
    np.testing.assert_array_equal(got, tables[h])
  # An idle step repeats the block before it, so the pipeline fetches nothing.
  idle = np.flatnonzero(~active)
  np.testing.assert_array_equal(np.asarray(blocks)[idle], np.asarray(blocks)[idle - 1])
