"""The masks against literal 0/1 matrices, and exact counts against published figures."""

import itertools
import time

import numpy as np
import pytest

from MaxText.attention.svg import accounting, tiles
from MaxText.attention.svg.masks import (
  SINKS,
  HeadMask,
  half_width,
  key_order,
  literal_mask,
  own_keys,
  query_order,
  row_intervals,
)

GRID_720P, GRID_1080P, GRID_1440P = (21, 45, 80), (21, 68, 120), (21, 90, 160)
GRIDS = [(3, 2, 4), (1, 3, 3), (4, 3, 5), (5, 1, 1), (6, 9, 8)]


def num_tokens(grid):
  return int(np.prod(grid))


def every_mask(grid):
  S = num_tokens(grid)
  for w, temporal, frames, sink in itertools.product((0, 1, 7, 50, S - 1, S + 5), (False, True), (0, 1, 2, 9), SINKS):
    yield HeadMask(grid, w, temporal, frames, sink)


def from_intervals(sink, start_S, stop_S):
  key = np.arange(len(start_S))
  return (key < sink) | ((key >= start_S[:, None]) & (key < stop_S[:, None]))


# 3 frames of 2 tokens, band of 1. Frame-major token f·2 + p has position-major index p·3 + f: 0 3 1 4 2 5.
WRITTEN_OUT = {
  (False, "frame", 1): "110000 111000 111100 111110 110111 110011",
  (False, "prefix", 1): "110000 111000 111100 111110 110111 110011",
  (True, "frame", 1): "111000 110110 111010 110101 111010 110101",
  (True, "prefix", 1): "101000 111110 101010 111101 111010 101101",
  (False, "frame", 0): "110000 111000 011100 001110 000111 000011",
  (True, "frame", 0): "101000 010110 101010 010101 011010 000101",
}


@pytest.mark.parametrize("temporal,sink,frames", WRITTEN_OUT)
def test_masks_written_out(temporal, sink, frames):
  mask = literal_mask(HeadMask((3, 1, 2), 1, temporal, frames, sink))
  assert " ".join("".join("01"[int(x)] for x in row) for row in mask) == WRITTEN_OUT[temporal, sink, frames]


@pytest.mark.parametrize("grid", GRIDS)
def test_intervals_orders_and_counts_equal_the_rule(grid):
  for mask in every_mask(grid):
    literal, queries, keys = literal_mask(mask), query_order(mask), key_order(mask)
    assert (from_intervals(*row_intervals(mask)) == literal[queries][:, keys]).all(), mask
    assert (keys[own_keys(mask)] == queries).all(), mask
    assert tiles.kept_pairs(mask) == literal.sum(), mask


@pytest.mark.parametrize("grid", GRIDS)
def test_tiles_equal_the_rule(grid):
  S = num_tokens(grid)
  for mask, (bq, bkv) in itertools.product(every_mask(grid), ((4, 3), (8, 16), (100, 7), (500, 500))):
    literal = literal_mask(mask)[query_order(mask)][:, key_order(mask)]
    pairs, area = tiles.tile_pairs(mask, bq, bkv), tiles.tile_areas(S, bq, bkv)
    padded = np.zeros((pairs.shape[0] * bq, pairs.shape[1] * bkv), int)
    padded[:S, :S] = literal
    assert (padded.reshape(pairs.shape[0], bq, pairs.shape[1], bkv).sum((1, 3)) == pairs).all()
    exact = tiles.exact_table(mask, bq, bkv, ragged_queries=False)
    assert ((exact == tiles.EMPTY) == (pairs == 0)).all()
    whole = pairs == area
    if S % bkv:
      whole[:, -1] = False
    assert ((exact == tiles.FULL) == whole).all()
    aligned = tiles.aligned_table(mask, bq, bkv, ragged_queries=False)
    kept = np.kron(aligned != tiles.EMPTY, np.ones((bq, bkv), bool))[:S, :S]
    assert kept[:, : mask.num_sink].all() and kept[np.arange(S), own_keys(mask)].all(), "a sink or an own key was dropped"
    assert (from_intervals(*tiles.aligned_intervals(mask, bq, bkv)) == kept).all(), mask
    assert kept.sum() == tiles.table_pairs(aligned, S, bq, bkv)


@pytest.mark.parametrize("density,width,spatial,temporal", [
  (0.20, 8_064, 1_390_964_040, 1_371_508_800),
  (0.25, 10_240, 1_672_309_960, 1_646_917_871),
  (0.30, 12_416, 1_944_185_928, 1_913_307_935),
  (0.35, 14_720, 2_221_732_680, 2_185_537_600),
  (0.50, 22_144, 3_043_829_320, 2_993_940_500),
])
def test_kept_pairs_at_720p(density, width, spatial, temporal):
  S = num_tokens(GRID_720P)
  assert half_width(density, S) == width
  assert tiles.kept_pairs(HeadMask(GRID_720P, width, False)) == spatial
  assert tiles.kept_pairs(HeadMask(GRID_720P, width, True)) == temporal
  assert tiles.kept_pairs(HeadMask(GRID_720P, width, True, sink="prefix")) == spatial


def test_tiles_of_the_case_study():
  S, mask = num_tokens(GRID_720P), HeadMask(GRID_720P, 14_720, False)
  table = tiles.exact_table(mask, 3328, 1536)
  assert table.size == 1150
  assert [(table != tiles.EMPTY).sum(), (table == tiles.FULL).sum(), (table == tiles.BOUNDARY).sum()] == [509, 363, 146]
  for block_q, percent in ((3328, 27.5537), (1024, 16.9497), (4864, 33.6001)):
    for of in (mask, HeadMask(GRID_720P, 14_720, True, sink="prefix")):
      assert round(100 * tiles.boundary_share(tiles.exact_table(of, block_q, 1536), S, block_q, 1536), 4) == percent
  assert (tiles.aligned_table(mask, 3328, 1536) != tiles.EMPTY).sum() == 442


@pytest.mark.parametrize("grid", [GRID_720P, GRID_1080P, GRID_1440P])
@pytest.mark.parametrize("blocks", [(3328, 1536), (3328, 3600), (1024, 1024)])
def test_rounding_keeps_the_pair_budget(grid, blocks):
  S = num_tokens(grid)
  for density, temporal in itertools.product((0.2, 0.35, 0.5), (False, True)):
    mask = HeadMask(grid, half_width(density, S), temporal)
    table = tiles.aligned_table(mask, *blocks)
    assert abs(tiles.table_pairs(table, S, *blocks) / tiles.kept_pairs(mask) - 1) < 0.005, (density, temporal)
    assert (table[:, : tiles.num_tiles(mask.num_sink, blocks[1])] != tiles.EMPTY).all()


def test_1440p_counts_within_a_second():
  start = time.process_time()
  masks = tuple(HeadMask(GRID_1440P, 58_881, temporal) for temporal in (False, True))  # a width no other test has cached
  counts = accounting.mask_counts(masks, "aligned", 3328, 3600)
  assert time.process_time() - start < 1.0
  assert counts["executed_fraction_spatial"] == pytest.approx(counts["kept_fraction_spatial"], rel=0.005)


def test_flat_steps_cover_the_table_once():
  table = tiles.exact_table(HeadMask((4, 3, 5), 7, True), 8, 16)
  steps = tiles.flat_steps(table)
  rebuilt = np.zeros_like(table)
  rebuilt[steps.q_tile, steps.kv_tile] = np.where(steps.flags & tiles.MASKED, tiles.BOUNDARY, tiles.FULL)
  assert (rebuilt == table).all() and len(steps) == (table != tiles.EMPTY).sum()
  assert ((steps.flags & tiles.FIRST) != 0).sum() == ((steps.flags & tiles.LAST) != 0).sum() == len(table)
  with pytest.raises(ValueError, match="keeps no key tile"):
    tiles.flat_steps(np.array([[2, 0], [0, 0]], np.uint8))


@pytest.mark.parametrize("make,message", [
  (lambda: half_width(0.0, 100), r"svg_density=0.0 must lie in \(0, 1\]"),
  (lambda: HeadMask((1, 1, 1), -1, False), "svg_band_width=-1 must be >= 0"),
  (lambda: HeadMask((1, 1, 1), 0, False, sink_frames=-1), "svg_sink_frames=-1"),
  (lambda: HeadMask((1, 1, 1), 0, False, sink="first"), "svg_sink='first' is not one of frame, prefix"),
])
def test_refusals(make, message):
  with pytest.raises(ValueError, match=message):
    make()


def test_full_density_keeps_every_pair():
  for S in (1, 100, 5376):
    assert half_width(1.0, S) == S - 1
  assert literal_mask(HeadMask((2, 3, 5), half_width(1.0, 30), True)).all()
