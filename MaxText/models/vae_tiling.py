"""Cuts a picture into overlapping tiles of one size and says how to blend them again.

All tiles have the same shape, so one compiled program serves them all: they are spread evenly from border to border and
overlap by at least what was asked. Inside an overlap the weights rise and fall linearly, and at every position they sum
to one.

Dimensions: H W size in latent positions, h w size of one tile.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np


@dataclasses.dataclass(frozen=True)
class Tile:
  """One tile: where it lies in latent positions, and the spans of all tiles of its row and column to blend with.

  Attributes:
    row, column: which span of `row_spans` and `column_spans` it is.
    row_spans, column_spans: (start, stop) of every tile along the height and along the width, in latent positions.
  """

  row: int
  column: int
  row_spans: tuple[tuple[int, int], ...]
  column_spans: tuple[tuple[int, int], ...]

  @property
  def rows(self) -> slice:
    return slice(*self.row_spans[self.row])

  @property
  def columns(self) -> slice:
    return slice(*self.column_spans[self.column])

  def window(self, stride: int) -> tuple[slice, slice]:
    """Rows and columns in a picture with `stride` pixels a latent position."""
    return tuple(slice(s.start * stride, s.stop * stride) for s in (self.rows, self.columns))

  def weight(self, stride: int) -> np.ndarray:
    """Blending weights [h · stride, w · stride] float32."""
    down, across = (blend_weights([(a * stride, b * stride) for a, b in spans])[index]
                    for spans, index in ((self.row_spans, self.row), (self.column_spans, self.column)))
    return down[:, None] * across[None, :]


def spread(length: int, size: int, overlap: int) -> tuple[tuple[int, int], ...]:
  """(start, stop) of the fewest tiles of `size` that cover `length` and overlap by at least `overlap`, evenly spread."""
  if length <= size:
    return ((0, length),)
  count = -(-(length - overlap) // (size - overlap))
  starts = [round(i * (length - size) / (count - 1)) for i in range(count)]
  return tuple((start, start + size) for start in starts)


def blend_weights(spans) -> list[np.ndarray]:
  """A weight for every position of every span, float32: linear ramps in the overlaps, one elsewhere, summing to one.

  In an overlap of n positions the later span's weights are (0.5, 1.5, … n − 0.5) / n.
  """
  total = np.zeros(spans[-1][1])
  weights = []
  for i, (start, stop) in enumerate(spans):
    position = np.arange(start, stop) + 0.5
    weight = np.ones(stop - start)
    if i > 0:
      weight = np.minimum(weight, (position - start) / (spans[i - 1][1] - start))
    if i + 1 < len(spans):
      weight = np.minimum(weight, (stop - position) / (stop - spans[i + 1][0]))
    weights.append(weight)
    total[start:stop] += weight
  return [(weight / total[start:stop]).astype(np.float32) for weight, (start, stop) in zip(weights, spans, strict=True)]


def plan(height: int, width: int, tile_size: int | None, tile_overlap: int, stride: int) -> list[Tile] | None:
  """The tiles of a picture, row by row, or None if one tile (or no tiling) covers it.

  Args:
    height, width: in latent positions.
    tile_size, tile_overlap: in pixels.
    stride: pixels a latent position.

  Raises:
    ValueError: sizes that the stride does not divide, or an overlap of more than half a tile.
  """
  if not tile_size:
    return None
  if tile_size < 0 or tile_size % stride or tile_overlap % stride:
    raise ValueError(f"tile_size={tile_size}, tile_overlap={tile_overlap}: both must be multiples of {stride} pixels")
  if not 0 < 2 * tile_overlap <= tile_size:
    raise ValueError(f"tile_overlap={tile_overlap} must be positive and at most half of tile_size={tile_size}")
  size, overlap = tile_size // stride, tile_overlap // stride
  row_spans, column_spans = spread(height, size, overlap), spread(width, size, overlap)
  if len(row_spans) == len(column_spans) == 1:
    return None
  return [Tile(row, column, row_spans, column_spans)
          for row, column in itertools.product(range(len(row_spans)), range(len(column_spans)))]
