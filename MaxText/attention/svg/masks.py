"""The masks of Sparse VideoGen attention: which (query, key) pairs a head keeps.

One rule, in the order of tokens that the kind of head uses: keep (q, k) if |q - k| <= half_width, or if k is in the sink.

  spatial head   frame-major order, index f·P + p, the model's own
  temporal head  position-major order, index p·F + f
  sink "frame"   the keys of the first latent frame(s), for both kinds
  sink "prefix"  the first keys in the head's own order (what the original code does; for a spatial head the same thing)

Legend: F frames, H W rows and columns of tokens, P = H·W tokens a frame, S = F·P tokens.
Source: Sparse VideoGen, arXiv 2502.01776.
"""

import dataclasses
import functools
import math

import numpy as np

from MaxText.attention import Grid

SINKS = ("frame", "prefix")


def half_width(density: float, num_tokens: int) -> int:
  """Half-width in tokens of the band that keeps about `density` of the S² pairs (the sink comes on top).

  Rounded up to a multiple of 128 as the original does, and at most S - 1, which keeps every pair.
  """
  if not 0.0 < density <= 1.0:
    raise ValueError(f"svg_density={density} must lie in (0, 1]: it is the share of query-key pairs inside the band. "
                     "Use svg_density=1.0 for all pairs.")
  return min(math.ceil(num_tokens * (1.0 - math.sqrt(1.0 - density)) / 128) * 128, num_tokens - 1)


@dataclasses.dataclass(frozen=True)
class HeadMask:
  """The mask of one kind of head on one grid. Static and hashable: tables made from it are cached by it."""

  grid: Grid
  half_width: int
  temporal: bool
  sink_frames: int = 1
  sink: str = "frame"

  def __post_init__(self):
    if self.sink not in SINKS:
      raise ValueError(f"svg_sink={self.sink!r} is not one of {', '.join(SINKS)}.")
    if self.half_width < 0:
      raise ValueError(f"svg_band_width={self.half_width} must be >= 0 (half-width of the band in tokens).")
    if self.sink_frames < 0:
      raise ValueError(f"svg_sink_frames={self.sink_frames} must be >= 0 (latent frames that every query keeps).")

  @property
  def frame_tokens(self) -> int:
    return self.grid[1] * self.grid[2]

  @property
  def num_tokens(self) -> int:
    return self.grid[0] * self.frame_tokens

  @property
  def num_sink(self) -> int:
    """Keys in the sink; they are the first keys of `key_order`."""
    return min(self.sink_frames, self.grid[0]) * self.frame_tokens

  @property
  def sink_first(self) -> bool:
    """Whether keys lie in sink-first position-major order: a temporal head that keeps true first frames."""
    return self.temporal and self.sink == "frame" and self.sink_frames > 0

  @property
  def leading_frames(self) -> int:
    """Frames that stay in front of the keys, frame-major."""
    return min(self.sink_frames, self.grid[0]) if self.sink_first else 0


def query_order(mask: HeadMask) -> np.ndarray:
  """Frame-major token index at each position of the head's query (and output) order, [S]."""
  tokens = np.arange(mask.num_tokens)
  return tokens.reshape(mask.grid[0], -1).T.reshape(-1) if mask.temporal else tokens


def key_order(mask: HeadMask) -> np.ndarray:
  """Frame-major token index at each position of the head's key order, [S]: the sink first, then the head's own order."""
  if not mask.sink_first:
    return query_order(mask)
  tokens, sink = np.arange(mask.num_tokens), mask.num_sink
  rest = tokens[sink:].reshape(-1, mask.frame_tokens).T.reshape(-1)
  return np.concatenate([tokens[:sink], rest])


@functools.lru_cache(maxsize=64)
def row_intervals(mask: HeadMask) -> tuple[int, np.ndarray, np.ndarray]:
  """The kept keys of every query row as the sink and one interval, in positions of `query_order` and `key_order`.

  Query row i keeps the key positions [0, sink) and [start[i], stop[i]), where start[i] >= sink.

  Returns:
    (sink, start [S], stop [S]); start and stop never decrease along the rows, which the counting in tiles.py uses.
  """
  row, sink, w = np.arange(mask.num_tokens, dtype=np.int64), mask.num_sink, mask.half_width
  low, high = np.maximum(row - w, 0), np.minimum(row + w + 1, mask.num_tokens)
  if mask.sink_first:
    # Position-major index x -> number of keys outside the sink frames with a smaller index. Where w is no multiple of F
    # the width of [start, stop) differs by one between rows, so edges cannot come from a constant half-width.
    frames = mask.grid[0]
    sunk = mask.leading_frames
    low, high = (sink + x // frames * (frames - sunk) + np.maximum(x % frames - sunk, 0) for x in (low, high))
  start = np.maximum(low, sink)
  stop = np.maximum(high, start)
  for array in (start, stop):
    array.setflags(write=False)
  return sink, start, stop


def own_keys(mask: HeadMask) -> np.ndarray:
  """Position in `key_order` of the key of the same token as each query row, [S]."""
  row = np.arange(mask.num_tokens)
  if not mask.sink_first:
    return row
  frames, sunk = mask.grid[0], mask.leading_frames
  position, frame = row // frames, row % frames
  in_sink = frame * mask.frame_tokens + position
  return np.where(frame < sunk, in_sink, mask.num_sink + position * (frames - sunk) + frame - sunk)


def literal_mask(mask: HeadMask) -> np.ndarray:
  """The rule itself as a boolean [S, S] matrix over frame-major tokens (rows are queries). For tests on small grids."""
  token = np.arange(mask.num_tokens)
  frame, position = token // mask.frame_tokens, token % mask.frame_tokens
  index = position * mask.grid[0] + frame if mask.temporal else token
  sink = frame < mask.sink_frames if mask.sink == "frame" else index < mask.num_sink
  return (np.abs(index[:, None] - index[None, :]) <= mask.half_width) | sink[None, :]
