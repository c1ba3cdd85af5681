"""Sparse VideoGen attention on one page: route → lay out → attend → restore.

Every head is either spatial (near frames) or temporal (near positions, all frames). `route` finds out which, for each
call, batch element and head; `lay_out` puts the tokens of temporal heads into position-major order, which turns both
masks into a sink and a band (masks.py); `attend_laid_out` visits the tiles that the mask keeps (tiles.py) and nothing
else; `restore` puts the outputs back. Routes are data: they change no shape and cause no compilation.

Source: Sparse VideoGen, arXiv 2502.01776. Ours keeps the true first frame as the sink of temporal heads too, samples
queries over the whole sequence, and scores the mask that runs.

Legend: B batch, S tokens, N heads, D head dim, grid = (F, H, W) with S = F·H·W, frame-major.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from MaxText.attention import Attention, Grid
from MaxText.attention.dot_product import (
  ACCELERATOR_BLOCKS,
  CPU_BLOCKS,
  dot_product_attention,
  even_block,
  heads_first,
  per_platform,
  tokens_first,
)
from MaxText.attention.svg import accounting, layout, routing, tiles
from MaxText.attention.svg.masks import HeadMask, key_order, query_order
from MaxText.attention.tiled import TilePlan, make_plan, tiled_attention

CHOICES = {
  "kernel": tuple(tiles.TABLES),
  "layout": ("head_local", "pre_exchange", "in_kernel"),
  "routing": ("dynamic", "spatial", "temporal"),
  "backend": ("xla", "pallas"),
}
# Short sequences get tiles that still split them this often, so that a rounded mask keeps its shape.
TILES_A_SIDE, SMALLEST_TILE = 6, 64


@dataclasses.dataclass(frozen=True)
class SvgAttention:
  """Sparse self-attention over a video's tokens. Hashable and static: one compiled program for each `half_width`.

  Attributes:
    half_width: of the band, in tokens (masks.half_width gives it for a density); S - 1 and more keeps everything.
    sink_frames, sink: frames in the sink, and which keys these are: 'frame' or 'prefix' (masks.py).
    num_sampled_queries: rows that routing looks at.
    routing: 'dynamic', or 'spatial' and 'temporal' to make every head one kind.
    kernel: 'exact' keeps the mask to the token; 'aligned' rounds it to tiles with the same number of pairs; 'naive' is
      exact and evaluates the mask in every visited tile.
    layout: where tokens are permuted: 'head_local' and 'pre_exchange' by `lay_out`, after or before the caller's exchange
      between devices; 'in_kernel' inside the attention of each head. All give the same result.
    block_q, block_kv: tile sizes; 0 takes what suits the platform.
    backend: 'xla' or 'pallas' (TPU; no gradient yet).
    chip: whose tuned tiles 'pallas' takes, such as 'v6e'; empty means the device here.
    dense: used for cross-attention, which is never sparse.
  """

  half_width: int
  sink_frames: int = 1
  sink: str = "frame"
  num_sampled_queries: int = 64
  routing: str = "dynamic"
  kernel: str = "aligned"
  layout: str = "head_local"
  block_q: int = 0
  block_kv: int = 0
  backend: str = "xla"
  chip: str = ""
  dense: Attention = dot_product_attention

  def __post_init__(self):
    for field, allowed in CHOICES.items():
      if getattr(self, field) not in allowed:
        raise ValueError(f"svg_{field}={getattr(self, field)!r} is not one of {', '.join(allowed)}.")

  def describe(self) -> str:
    return (f"svg ({self.kernel}, half-width {self.half_width} tokens, sink {self.sink_frames} × {self.sink}, "
            f"routing {self.routing}, {self.backend})")

  def counts(self, grid: Grid, platform: str) -> dict:
    """Kept pairs and visited tiles of this attention on a grid and platform, exact; accounting.mask_counts says which."""
    return accounting.mask_counts(
      self.masks(grid), self.kernel, *self.blocks(grid, CPU_BLOCKS if platform == "cpu" else ACCELERATOR_BLOCKS))

  def masks(self, grid: Grid) -> tuple[HeadMask, HeadMask]:
    """The masks of a spatial and of a temporal head."""
    return tuple(HeadMask(grid, self.half_width, temporal, self.sink_frames, self.sink) for temporal in (False, True))

  def blocks(self, grid: Grid, default: tuple[int, int]) -> tuple[int, int]:
    """Tile sizes on a grid: those asked for, else the tuned ones of the chip or the platform's default, made to fit."""
    num_tokens = grid[0] * grid[1] * grid[2]
    if self.backend == "pallas":
      from MaxText.attention import kernels  # Pallas takes a while to import, and only a TPU needs it
      tuned = kernels.tuned_tiles(
        self.chip or kernels.this_chip(), self.kernel, num_tokens, num_tokens, self.block_q, self.block_kv)
      return tuned.block_q, tuned.block_kv
    finest = max(SMALLEST_TILE, num_tokens // TILES_A_SIDE)
    chosen = (even_block(num_tokens, min(block, finest)) for block in default)
    asked = (min(block, num_tokens) for block in (self.block_q, self.block_kv))
    return tuple(block or fallback for block, fallback in zip(asked, chosen, strict=True))

  def __call__(self, q_BSND: jax.Array, k_BSND: jax.Array, v_BSND: jax.Array, grid: Grid | None) -> jax.Array:
    """Self-attention, or dense cross-attention where grid is None; [B, S, N, D] in q's dtype."""
    if grid is None:
      return self.dense(q_BSND, k_BSND, v_BSND, None)
    return self.with_routes(q_BSND, k_BSND, v_BSND, grid)[0]

  def with_routes(self, q_BSND, k_BSND, v_BSND, grid: Grid) -> tuple[jax.Array, jax.Array]:
    """The output, and the routes temporal_BN (bool) that it used."""
    temporal_BN = self.route(q_BSND, k_BSND, v_BSND, grid)
    return self.attend(q_BSND, k_BSND, v_BSND, grid, temporal_BN), temporal_BN

  def route(self, q_BSND, k_BSND, v_BSND, grid: Grid) -> jax.Array:
    """temporal_BN, bool: which heads are temporal. No gradient flows through the decision."""
    B, _, N, _ = q_BSND.shape
    if self.routing != "dynamic":
      return jnp.full((B, N), self.routing == "temporal")

    def route(q_BSND, k_BSND, v_BSND, blocks, heads_at_once):
      block_q, block_kv = self.blocks(grid, blocks)
      return routing.route(
        q_BSND, k_BSND, v_BSND, *self.masks(grid), num_sampled_queries=self.num_sampled_queries, kernel=self.kernel,
        block_q=block_q, block_kv=block_kv, chunk=blocks[1], backend=self.backend)

    return self._per_platform(route, *map(lax.stop_gradient, (q_BSND, k_BSND, v_BSND)), num_heads=B * N)

  def attend(self, q_BSND, k_BSND, v_BSND, grid: Grid, temporal_BN: jax.Array) -> jax.Array:
    """Sparse attention along given routes."""
    if self.backend == "pallas" and self.layout == "head_local":
      from MaxText.attention.svg import layout_kernel  # see `blocks`
      if layout_kernel.block_width(grid[0], grid[1] * grid[2]):
        return self._attend_by_kernels(layout_kernel.permute, q_BSND, k_BSND, v_BSND, grid, temporal_BN)
    q, k, v = self.lay_out(q_BSND, k_BSND, v_BSND, grid, temporal_BN)
    return self.restore(self.attend_laid_out(q, k, v, grid, temporal_BN), grid, temporal_BN)

  def _attend_by_kernels(self, permute, q_BSND, k_BSND, v_BSND, grid: Grid, temporal_BN) -> jax.Array:
    """`attend` on a TPU, heads first throughout: permutations are kernels too, which move each byte once."""
    temporal_H, sunk = temporal_BN.reshape(-1), self.masks(grid)[1].leading_frames
    with jax.named_scope("svg_lay_out"):
      q, k, v = (permute(heads_first(x), temporal_H, grid, s) for x, s in ((q_BSND, 0), (k_BSND, sunk), (v_BSND, sunk)))
    with jax.named_scope("svg_attend"):
      out_HSD = self._sparse_kernel(grid)(q, k, v, temporal_H)
    with jax.named_scope("svg_restore"):
      return tokens_first(permute(out_HSD, temporal_H, grid, back=True), len(q_BSND))

  def _sparse_kernel(self, grid: Grid):
    from MaxText.attention import kernels  # see `blocks`
    return functools.partial(
      kernels.svg_attention, mask=self.masks(grid)[0], kernel=self.kernel, chip=self.chip or None, block_q=self.block_q,
      block_kv=self.block_kv)

  # The three parts of `attend`. A caller that permutes before an exchange between devices calls them one by one.

  def lay_out(self, q_BSND, k_BSND, v_BSND, grid: Grid, temporal_BN) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q, k and v with each head in its own order of tokens."""
    if self.layout == "in_kernel" or self.routing == "spatial":
      return q_BSND, k_BSND, v_BSND
    with jax.named_scope("svg_lay_out"):
      temporal = self.masks(grid)[1]
      permuted = (layout.to_position_major(q_BSND, grid[0]),
                  *(layout.to_key_order(x, temporal) for x in (k_BSND, v_BSND)))
      return tuple(self._select(temporal_BN, p, x) for p, x in zip(permuted, (q_BSND, k_BSND, v_BSND), strict=True))

  def restore(self, out_BSND, grid: Grid, temporal_BN) -> jax.Array:
    """Outputs back in frame-major order."""
    if self.layout == "in_kernel" or self.routing == "spatial":
      return out_BSND
    with jax.named_scope("svg_restore"):
      return self._select(temporal_BN, layout.to_frame_major(out_BSND, grid[0]), out_BSND)

  def _select(self, temporal_BN, permuted_BSND, x_BSND):
    return permuted_BSND if self.routing == "temporal" else layout.select_heads(temporal_BN, permuted_BSND, x_BSND)

  def attend_laid_out(self, q_BSND, k_BSND, v_BSND, grid: Grid, temporal_BN) -> jax.Array:
    """Attention over the kept tiles, tokens in and out in the order that `lay_out` gives."""

    def attend(q_HSD, k_HSD, v_HSD, kind_H, blocks, heads_at_once):
      if self.backend == "pallas":
        sparse = self._sparse_kernel(grid)
      else:
        plan = tile_plan(self.masks(grid), self.kernel, *self.blocks(grid, blocks))
        sparse = functools.partial(tiled_attention, plan=plan, heads_at_once=heads_at_once)
      if self.layout == "in_kernel":
        return _permuted_inside(sparse, q_HSD, k_HSD, v_HSD, kind_H, self.masks(grid))
      return sparse(q_HSD, k_HSD, v_HSD, kind_H)

    with jax.named_scope("svg_attend"):
      arrays = heads_first(q_BSND), heads_first(k_BSND), heads_first(v_BSND), temporal_BN.reshape(-1).astype(jnp.int32)
      return tokens_first(self._per_platform(attend, *arrays, num_heads=temporal_BN.size), len(q_BSND))

  def _per_platform(self, function, *arrays, num_heads: int) -> jax.Array:
    if self.backend == "pallas":
      return function(*arrays, blocks=ACCELERATOR_BLOCKS, heads_at_once=1)
    return per_platform(function, *arrays, num_heads=num_heads)


@functools.lru_cache(maxsize=64)
def tile_plan(masks: tuple[HeadMask, HeadMask], kernel: str, block_q: int, block_kv: int) -> TilePlan:
  """What the tiled loop visits for kinds 0 (spatial) and 1 (temporal)."""
  tables = [tiles.TABLES[kernel](mask, block_q, block_kv, ragged_queries=False) for mask in masks]
  sinks, starts, stops = zip(*(tiles.intervals(mask, kernel, block_q, block_kv) for mask in masks), strict=True)
  return make_plan(tables, block_q, block_kv, sinks[0], np.stack(starts), np.stack(stops))


def _permuted_inside(sparse, q_HSD, k_HSD, v_HSD, kind_H, masks: tuple[HeadMask, HeadMask]) -> jax.Array:
  """Heads one after the other, each gathering its tokens into its own order and its outputs back out of it."""
  query_orders, key_orders = (
    jnp.asarray(np.stack([order(mask) for mask in masks]), jnp.int32) for order in (query_order, key_order))

  def head(args):
    q_SD, k_SD, v_SD, kind = args
    query_S, key_S = query_orders[kind], key_orders[kind]
    out = sparse(q_SD[query_S][None], k_SD[key_S][None], v_SD[key_S][None], kind[None])[0]
    return jnp.zeros_like(out).at[query_S].set(out, unique_indices=True)

  return lax.map(head, (q_HSD, k_HSD, v_HSD, kind_H))
