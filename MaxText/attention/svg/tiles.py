"""Which tiles of the attention matrix a mask touches, and how many pairs it keeps: exact integer arithmetic in numpy.

A tile is block_q queries × block_kv keys in the orders of masks.query_order and masks.key_order. Everything here is
static: made once a mask, cached, and independent of which head turns out to be spatial or temporal.

Legend: S tokens, nq × nk tiles. Tables are uint8 [nq, nk] of EMPTY, BOUNDARY, FULL.
"""

import dataclasses
import functools

import numpy as np

from MaxText.attention.svg.masks import HeadMask, own_keys, row_intervals

EMPTY, BOUNDARY, FULL = 0, 1, 2

# Bits of Steps.flags.
FIRST, LAST, MASKED = 1, 2, 4


def num_tiles(num_tokens: int, block: int) -> int:
  return -(-num_tokens // block)


def tile_edges(num_tokens: int, block: int) -> np.ndarray:
  """Edges of the tiles clipped to the sequence, int64 [tiles + 1]."""
  return np.minimum(np.arange(num_tiles(num_tokens, block) + 1, dtype=np.int64) * block, num_tokens)


def _sum_of_minima(values_S: np.ndarray, row_edges: np.ndarray, key_edges: np.ndarray) -> np.ndarray:
  """[nq, nk + 1]: for each query tile and key edge e the sum over the tile's rows of min(value, e); values ascend."""
  prefix = np.concatenate([[0], np.cumsum(values_S)])
  low, high = row_edges[:-1, None], row_edges[1:, None]
  split = np.clip(np.searchsorted(values_S, key_edges, side="right")[None], low, high)
  return prefix[split] - prefix[low] + key_edges[None] * (high - split)


@functools.lru_cache(maxsize=64)
def kept_pairs(mask: HeadMask) -> int:
  """Exact number of (query, key) pairs that the mask keeps."""
  sink, start, stop = row_intervals(mask)
  return sink * mask.num_tokens + int((stop - start).sum())


def tile_areas(num_tokens: int, block_q: int, block_kv: int) -> np.ndarray:
  """Pairs in each tile, clipped to the sequence, int64 [nq, nk]."""
  return np.diff(tile_edges(num_tokens, block_q))[:, None] * np.diff(tile_edges(num_tokens, block_kv))[None]


@functools.lru_cache(maxsize=64)
def tile_pairs(mask: HeadMask, block_q: int, block_kv: int) -> np.ndarray:
  """Exact number of kept pairs in each tile, int64 [nq, nk], in O(S + nq·nk)."""
  sink, start, stop = row_intervals(mask)
  rows, keys = tile_edges(mask.num_tokens, block_q), tile_edges(mask.num_tokens, block_kv)
  before = np.diff(rows)[:, None] * np.minimum(keys, sink)[None]
  before = before + _sum_of_minima(stop, rows, keys) - _sum_of_minima(start, rows, keys)
  return _frozen(np.diff(before, axis=1))


def _frozen(array: np.ndarray) -> np.ndarray:
  array.setflags(write=False)  # cached results are shared
  return array


def _mark(keep: np.ndarray, full: np.ndarray, mask: HeadMask, blocks: tuple[int, int], ragged_queries: bool):
  """Table of kept tiles; a tile that reaches past the sequence is BOUNDARY because its padding has to be masked."""
  table = np.where(keep, np.where(full, FULL, BOUNDARY), EMPTY).astype(np.uint8)
  if mask.num_tokens % blocks[1]:
    table[:, -1] = np.minimum(table[:, -1], BOUNDARY)
  if ragged_queries and mask.num_tokens % blocks[0]:
    table[-1] = np.minimum(table[-1], BOUNDARY)
  return _frozen(table)


@functools.lru_cache(maxsize=64)
def exact_table(mask: HeadMask, block_q: int, block_kv: int, ragged_queries: bool = True) -> np.ndarray:
  """Tiles that the exact mask touches, classified from token coordinates, uint8 [nq, nk].

  Args:
    ragged_queries: count tiles that reach past the last query as BOUNDARY, as published figures do. A kernel that drops
      the padded rows of its output needs no mask for them and passes False.
  """
  pairs = tile_pairs(mask, block_q, block_kv)
  full = pairs == tile_areas(mask.num_tokens, block_q, block_kv)
  return _mark(pairs > 0, full, mask, (block_q, block_kv), ragged_queries)


def _own_tiles(mask: HeadMask, block_q: int, block_kv: int) -> np.ndarray:
  """Tiles that hold some row's own key outside the sink, bool [nq, nk]; one run of neighbours in each query tile."""
  own = np.zeros((num_tiles(mask.num_tokens, block_q), num_tiles(mask.num_tokens, block_kv)), bool)
  row, key = np.arange(mask.num_tokens), own_keys(mask)
  outside = key >= mask.num_sink
  own[row[outside] // block_q, key[outside] // block_kv] = True
  return own


@functools.lru_cache(maxsize=64)
def aligned_table(mask: HeadMask, block_q: int, block_kv: int, ragged_queries: bool = True) -> np.ndarray:
  """The mask rounded to whole tiles with its pair budget kept, uint8 [nq, nk]; BOUNDARY only where padding is masked.

  Full tiles stay, and so do tiles with sink keys or with a row's own key. The other touched tiles enter in the order of
  their kept share, as many as bring the number of pairs nearest to the exact count. Where the tiles that must stay exceed
  the budget by themselves (few, large tiles) no other tile enters.

  A query tile's kept tiles are those of the sink and one run around its own keys: away from these the kept share never
  rises, and among equals the nearer tile enters first. `aligned_intervals` relies on that.
  """
  pairs, area = tile_pairs(mask, block_q, block_kv), tile_areas(mask.num_tokens, block_q, block_kv)
  own = _own_tiles(mask, block_q, block_kv)
  keep = (pairs == area) | own
  keep[:, : num_tiles(mask.num_sink, block_kv)] = True
  candidates = np.flatnonzero((pairs > 0) & ~keep)
  # Distance to the middle of the own keys' run. Without any (all in the sink) every touched tile holds sink keys.
  column = np.arange(own.shape[1])
  middle = (own * column).sum(1, keepdims=True) / np.maximum(own.sum(1, keepdims=True), 1)
  distance = np.abs(column - middle).flat[candidates]
  candidates = candidates[np.lexsort((distance, -(pairs / area).flat[candidates]))]
  total = np.concatenate([[0], np.cumsum(area.flat[candidates])]) + int(area[keep].sum())
  keep.flat[candidates[: int(np.argmin(np.abs(total - kept_pairs(mask))))]] = True
  return _mark(keep, keep, mask, (block_q, block_kv), ragged_queries)


@functools.lru_cache(maxsize=64)
def naive_table(mask: HeadMask, block_q: int, block_kv: int, ragged_queries: bool = True) -> np.ndarray:
  """The exact mask's tiles, every one BOUNDARY: the mask is evaluated wherever a tile is visited, uint8 [nq, nk]."""
  return _frozen(np.minimum(exact_table(mask, block_q, block_kv, ragged_queries), BOUNDARY))


TABLES = {"naive": naive_table, "exact": exact_table, "aligned": aligned_table}


def intervals(mask: HeadMask, kernel: str, block_q: int, block_kv: int) -> tuple[int, np.ndarray, np.ndarray]:
  """The mask that a kernel runs, in the form of masks.row_intervals: (sink, start [S], stop [S])."""
  return aligned_intervals(mask, block_q, block_kv) if kernel == "aligned" else row_intervals(mask)


@functools.lru_cache(maxsize=64)
def aligned_intervals(mask: HeadMask, block_q: int, block_kv: int) -> tuple[int, np.ndarray, np.ndarray]:
  """The rounded mask of `aligned_table` row by row: (sink, start [S], stop [S]); the sink is whole tiles too."""
  tokens, sink_tiles = mask.num_tokens, num_tiles(mask.num_sink, block_kv)
  band = aligned_table(mask, block_q, block_kv)[:, sink_tiles:] != EMPTY
  first = sink_tiles + (np.cumsum(band, axis=1) == 0).sum(1)
  rows = np.minimum(block_q, tokens - block_q * np.arange(len(band)))
  start, stop = (
    _frozen(np.repeat(np.minimum(tile * block_kv, tokens), rows)) for tile in (first, first + band.sum(1)))
  return min(sink_tiles * block_kv, tokens), start, stop


def table_pairs(table: np.ndarray, num_tokens: int, block_q: int, block_kv: int) -> int:
  """Pairs inside the table's tiles, clipped to the sequence: what an `aligned` kernel keeps."""
  return int(tile_areas(num_tokens, block_q, block_kv)[table != EMPTY].sum())


def boundary_share(table: np.ndarray, num_tokens: int, block_q: int, block_kv: int) -> float:
  """Share of the visited area (tiles clipped to the sequence) that lies in BOUNDARY tiles."""
  area = tile_areas(num_tokens, block_q, block_kv)
  visited = int(area[table != EMPTY].sum())
  return int(area[table == BOUNDARY].sum()) / visited if visited else 0.0


@dataclasses.dataclass(frozen=True)
class Steps:
  """Kept tiles of a table as a flat list, query tile by query tile; int32 arrays of one length.

  flags: FIRST and LAST step of a query tile, MASKED where the tile needs a mask (BOUNDARY).
  """

  q_tile: np.ndarray
  kv_tile: np.ndarray
  flags: np.ndarray

  def __len__(self) -> int:
    return len(self.q_tile)


def flat_steps(table: np.ndarray) -> Steps:
  """The kept tiles of any table in row-major order. Every query tile must keep at least one tile."""
  q_tile, kv_tile = np.nonzero(table)
  if len(np.unique(q_tile)) != len(table):
    raise ValueError("A query tile keeps no key tile; attention over no keys is undefined. Keep at least one a row.")
  change = np.diff(q_tile) != 0
  flags = np.where(np.concatenate([[True], change]), FIRST, 0) | np.where(np.concatenate([change, [True]]), LAST, 0)
  flags |= np.where(table[q_tile, kv_tile] == BOUNDARY, MASKED, 0)
  return Steps(*(a.astype(np.int32) for a in (q_tile, kv_tile, flags)))
