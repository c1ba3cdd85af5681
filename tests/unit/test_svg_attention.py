"""Sparse attention on the XLA path: equal to the masked formula, routed right, the same in every layout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.attention import dot_product_attention
from MaxText.attention.svg import SvgAttention, layout, layout_kernel, routing, routing_kernel, tile_plan, tiles
from MaxText.attention.svg.masks import HeadMask, key_order, literal_mask, query_order
from MaxText.attention.tiled import tiled_attention
from tests.unit.test_attention import largest_array, output_and_gradients, plain, random_qkv

GRID = (5, 6, 7)
ROUTES = np.array([[False, True, True], [True, False, False]])


def executed_mask(svg, mask, grid):
  """The mask that runs over frame-major tokens, [S, S]."""
  if svg.kernel != "aligned":
    return literal_mask(mask)
  sink, start_S, stop_S = tiles.aligned_intervals(mask, *svg.blocks(grid, (1344, 384)))
  key = np.arange(mask.num_tokens)
  ordered = (key < sink) | ((key >= start_S[:, None]) & (key < stop_S[:, None]))
  result = np.zeros_like(ordered)
  result[np.ix_(query_order(mask), key_order(mask))] = ordered
  return result


def masked_formula(svg, grid, temporal_BN):
  spatial, temporal = (executed_mask(svg, mask, grid) for mask in svg.masks(grid))
  mask_BNST = np.where(temporal_BN[:, :, None, None], temporal, spatial)
  return lambda q, k, v, xp=np: plain(q, k, v, mask_BNST, xp)


WITH_GRADIENTS = {
  "exact": (GRID, SvgAttention(30, kernel="exact", block_q=16, block_kv=24)),
  "aligned": (GRID, SvgAttention(30, kernel="aligned", layout="pre_exchange", block_q=16, block_kv=14)),
  "in_kernel": (GRID, SvgAttention(30, kernel="exact", layout="in_kernel", block_q=16, block_kv=24)),
}
CASES = {
  "naive": (GRID, SvgAttention(31, kernel="naive", block_q=40, block_kv=16)),
  "aligned, ragged": (GRID, SvgAttention(50, sink_frames=2, kernel="aligned", block_q=48, block_kv=40)),
  "prefix sink": (GRID, SvgAttention(20, sink="prefix", kernel="exact", block_q=24, block_kv=24)),
  "no sink": (GRID, SvgAttention(20, sink_frames=0, kernel="exact", block_q=24, block_kv=24)),
  "one frame": ((1, 6, 7), SvgAttention(5, kernel="exact", block_q=16, block_kv=16)),
  "shorter than a tile": ((2, 3, 4), SvgAttention(3, kernel="aligned")),
  "wider than the sequence": (GRID, SvgAttention(10_000, kernel="exact", block_q=64, block_kv=64)),
  "all frames in the sink": (GRID, SvgAttention(3, sink_frames=9, kernel="exact", block_q=64, block_kv=64)),
  "own key only": (GRID, SvgAttention(0, sink_frames=0, kernel="exact", block_q=32, block_kv=16)),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_masked_formula(name):
  grid, svg = CASES[name]
  q, k, v = random_qkv(2, int(np.prod(grid)), int(np.prod(grid)), 3, 8)
  out = jax.jit(lambda *qkv: svg.attend(*qkv, grid, ROUTES))(q, k, v)
  np.testing.assert_allclose(out, masked_formula(svg, grid, ROUTES)(q, k, v), atol=3e-6)


@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_equals_the_masked_formula_with_gradients(name):
  grid, svg = WITH_GRADIENTS[name]
  qkv = random_qkv(2, int(np.prod(grid)), int(np.prod(grid)), 3, 8)
  ours = output_and_gradients(lambda *qkv: svg.attend(*qkv, grid, ROUTES), *qkv)
  expected = functools.partial(masked_formula(svg, grid, ROUTES), xp=jnp)
  for a, b in zip(ours, output_and_gradients(expected, *qkv), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("kernel", ["exact", "aligned"])
def test_full_density_equals_dot_product(kernel):
  S = int(np.prod(GRID))
  q, k, v = random_qkv(2, S, S, 3, 8)
  svg = SvgAttention(S - 1, kernel=kernel, block_q=48, block_kv=40)
  out, temporal_BN = jax.jit(lambda *qkv: svg.with_routes(*qkv, GRID))(q, k, v)
  np.testing.assert_allclose(out, jax.jit(lambda *qkv: dot_product_attention(*qkv, GRID))(q, k, v), atol=1e-5)
  assert not temporal_BN.any(), "ties are spatial"


def test_cross_attention_is_dense():
  q, k, v = random_qkv(1, 30, 5, 2, 8)
  out = jax.jit(lambda *qkv: SvgAttention(1)(*qkv, None))(q, k, v)
  np.testing.assert_allclose(out, plain(q, k, v), atol=2e-6)


def test_new_routes_compile_nothing():
  S = int(np.prod(GRID))
  q, k, v = random_qkv(2, S, S, 3, 8)
  attend = jax.jit(lambda q, k, v, temporal: SvgAttention(30, block_q=32, block_kv=32).attend(q, k, v, GRID, temporal))
  for temporal_BN in (ROUTES, ~ROUTES, np.zeros_like(ROUTES)):
    attend(q, k, v, temporal_BN)
  assert attend._cache_size() == 1


def test_heads_side_by_side_give_the_same():
  svg, S = SvgAttention(30, kernel="exact"), int(np.prod(GRID))
  plan = tile_plan(svg.masks(GRID), "exact", 16, 24)
  q, k, v = random_qkv(4, S, S, 1, 8)
  q, k, v, kind_H = q[:, :, 0], k[:, :, 0], v[:, :, 0], np.array([0, 1, 1, 0])
  one, all_at_once = (
    jax.jit(lambda q, k, v, n=n: tiled_attention(q, k, v, kind_H, plan, n))(q, k, v) for n in (1, 4))
  np.testing.assert_allclose(one, all_at_once, atol=1e-6)


@pytest.mark.parametrize("kernel", ["exact", "aligned"])
def test_memory_at_720p_is_bounded(kernel):
  S, svg = 75_600, SvgAttention(14_720, kernel=kernel)
  shapes = [jax.ShapeDtypeStruct((1, S, 4, 64), jnp.float32)] * 3
  for function in (svg, jax.grad(lambda *args: svg(*args).sum(), (0, 1, 2))):
    jaxpr = jax.make_jaxpr(function, static_argnums=3)(*shapes, (21, 45, 80)).jaxpr
    assert largest_array(jaxpr) < 4 * S * 4 * 64


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_layout_kernel_moves_tokens_as_the_select_does(dtype, monkeypatch):
  monkeypatch.setattr(layout_kernel, "BLOCK_BYTES", 16 * 3 * 128 * 4)
  grid, flags = (3, 6, 8), np.array([True, False, True])
  x = random_qkv(3, 144, 1, 1, 16)[0][:, :, 0].astype(dtype)
  assert layout_kernel.block_width(3, 48) == 16
  for sunk in (0, 1, 3):
    temporal = layout.to_key_order(jnp.asarray(x), HeadMask(grid, 5, True, sunk), axis=1)
    moved = layout_kernel.permute(jnp.asarray(x), flags, grid, sunk, interpret=True)
    np.testing.assert_array_equal(moved, np.where(flags[:, None, None], temporal, x))
  there = layout_kernel.permute(jnp.asarray(x), flags, grid, interpret=True)
  np.testing.assert_array_equal(layout_kernel.permute(there, flags, grid, back=True, interpret=True), x)
  with pytest.raises(ValueError, match="no aligned blocks of 49 positions"):
    layout_kernel.permute(jnp.zeros((1, 147, 16)), flags[:1], (3, 7, 7))


# --- routing

ROUTING_GRID = (12, 6, 8)  # 576 tokens


def planted(kinds_BN, seed, first_frame=0, strength=6.0, noise=0.5, D=16):
  """q, k, v whose heads look at their own frame (0) or their own position in all frames (1), from first_frame on."""
  F, H, W = ROUTING_GRID
  rng = np.random.default_rng(seed)
  B, N = kinds_BN.shape
  frame, position = np.divmod(np.arange(F * H * W), H * W)
  marks = rng.standard_normal((B, N, max(F, H * W), D))
  marks /= np.linalg.norm(marks, axis=-1, keepdims=True)
  index_BNS = np.where(kinds_BN[:, :, None], position, frame)
  signal = np.take_along_axis(marks, index_BNS[..., None], axis=2) * strength * (frame >= first_frame)[:, None]
  q, k = (np.moveaxis(signal + noise * rng.standard_normal(signal.shape), 1, 2) for _ in range(2))
  v = rng.standard_normal(q.shape)
  return tuple(np.asarray(x, np.float32) for x in (q, k, v))


def routing_svg(**values):
  return SvgAttention(60, block_q=48, block_kv=24, **values)


@pytest.mark.parametrize("kernel", ["exact", "aligned"])
@pytest.mark.parametrize("first_frame", [0, 8])
def test_planted_heads_are_routed_right(kernel, first_frame):
  kinds = np.random.default_rng(1).integers(0, 2, (4, 100)).astype(bool)
  q, k, v = planted(kinds, 2, first_frame)
  svg = routing_svg(kernel=kernel)
  temporal_BN = jax.jit(lambda *qkv: svg.route(*qkv, ROUTING_GRID))(q, k, v)
  assert (np.asarray(temporal_BN) == kinds).mean() >= 0.99


@pytest.mark.parametrize("svg", [
  routing_svg(kernel="exact"), routing_svg(kernel="aligned"), routing_svg(kernel="aligned", sink="prefix"),
  routing_svg(kernel="exact", sink_frames=0)])
def test_routing_scores_the_mask_that_runs(svg):
  q, k, v = random_qkv(2, 576, 576, 20, 8)
  rows = routing.sampled_rows(ROUTING_GRID, svg.num_sampled_queries)
  dense, *sparse = (
    plain(q[:, rows], k, v, mask)
    for mask in (None, *(executed_mask(svg, mask, ROUTING_GRID)[rows] for mask in svg.masks(ROUTING_GRID))))
  spatial, temporal = (np.square(out - dense).mean((1, 3)) for out in sparse)
  got = jax.jit(lambda *qkv: svg.route(*qkv, ROUTING_GRID))(q, k, v)
  clear = np.abs(spatial - temporal) > 1e-6 * spatial
  assert clear.mean() > 0.9 and 0 < np.mean(got) < 1
  np.testing.assert_array_equal(np.asarray(got)[clear], (temporal < spatial)[clear])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_routing_kernel_decides_the_same(dtype, monkeypatch):
  """The Pallas kernel in interpret mode against the XLA path, with a ragged last chunk."""
  monkeypatch.setattr(routing_kernel, "CHUNK", 256)
  svg = routing_svg(kernel="aligned", num_sampled_queries=40)
  kinds = np.random.default_rng(4).integers(0, 2, (1, 6)).astype(bool)
  q, k, v = (x.astype(dtype) for x in planted(kinds, 4, noise=2.0))

  def errors(backend):
    return jax.jit(lambda q, k, v: routing.errors(
      q, k, v, *svg.masks(ROUTING_GRID), num_sampled_queries=40, kernel="aligned", block_q=48, block_kv=24, chunk=128,
      backend=backend, interpret=True))(q, k, v)

  np.testing.assert_allclose(errors("pallas"), errors("xla"), rtol=1e-4 if dtype == jnp.float32 else 2e-2)


def test_routing_survives_masked_rows_that_weigh_nothing():
  """A row whose every heavy key is outside a mask: no NaN, and that mask loses."""
  q, k, v = planted(np.array([[True, False]]), 3, strength=200.0)
  svg = routing_svg(kernel="exact", sink_frames=0)
  np.testing.assert_array_equal(jax.jit(lambda *qkv: svg.route(*qkv, ROUTING_GRID))(q, k, v), [[True, False]])


@pytest.mark.parametrize("routing_key,temporal", [("spatial", False), ("temporal", True)])
def test_fixed_routing(routing_key, temporal):
  svg = routing_svg(kernel="exact", routing=routing_key)
  q, k, v = random_qkv(1, 576, 576, 2, 8)
  out, temporal_BN = jax.jit(lambda *qkv: svg.with_routes(*qkv, ROUTING_GRID))(q, k, v)
  assert (temporal_BN == temporal).all()
  np.testing.assert_allclose(out, masked_formula(svg, ROUTING_GRID, np.full((1, 2), temporal))(q, k, v), atol=3e-6)


def test_routed_beats_other_routings():
  kinds = np.array([[True, False, True, False, False, True]])
  q, k, v = planted(kinds, 5, noise=1.0)
  svg = routing_svg(kernel="aligned")
  dense = plain(q, k, v)
  attend = jax.jit(lambda temporal: jnp.square(svg.attend(q, k, v, ROUTING_GRID, temporal) - dense).mean())
  temporal_BN = np.asarray(jax.jit(lambda *qkv: svg.route(*qkv, ROUTING_GRID))(q, k, v))
  routed = attend(temporal_BN)
  for other in (np.zeros_like(temporal_BN), np.ones_like(temporal_BN), ~temporal_BN):
    assert routed < 0.8 * attend(other)


def test_samples_cover_all_frames_evenly():
  rows = routing.sampled_rows((21, 45, 80), 64)
  assert len(set(rows)) == 64 and rows.max() < 75_600
  per_frame = np.bincount(rows // 3600, minlength=21)
  assert per_frame.min() >= 3 and per_frame.max() <= 4
  picture = np.histogram2d(rows % 3600 // 80, rows % 80, bins=(2, 2))[0]
  assert picture.min() >= 12, "every quarter of the picture is sampled"
  assert (routing.sampled_rows((2, 3, 4), 64) == np.arange(24)).all()


def test_refused_choices():
  with pytest.raises(ValueError, match="svg_kernel='fast' is not one of naive, exact, aligned"):
    SvgAttention(1, kernel="fast")


def test_counts_for_the_record():
  counts = SvgAttention(14_720).counts((21, 45, 80), "cpu")
  assert counts["kept_pairs_spatial"] == 2_221_732_680 and round(counts["kept_fraction_temporal"], 5) == 0.38240
  assert counts["executed_fraction_spatial"] == pytest.approx(counts["kept_fraction_spatial"], rel=0.005)
  assert 0.35 < counts["band_density"] < 0.353
