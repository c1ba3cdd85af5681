"""Step plans of Sparse VideoGen heads: pattern 0 is a spatial head, pattern 1 a temporal one.

Legend: F H W the token grid, S = F·H·W tokens.
"""

import functools

import numpy as np

from MaxText.attention.kernels.steps import StepPlan, dense_plan, plan_steps
from MaxText.attention.svg import tiles
from MaxText.attention.svg.masks import HeadMask, row_intervals

SPATIAL, TEMPORAL = 0, 1


@functools.lru_cache(maxsize=64)
def svg_plan(
    mask: HeadMask, kernel: str, block_q: int, block_kv: int, masked_chunk: int = 512, probe: int = 128
) -> StepPlan:
  """The launch for heads that are spatial or temporal, whichever their traced flag says.

  Args:
    mask: the mask of one kind of head; the other kind's differs in `temporal` alone.
    kernel: naive (exact mask in every visited tile), exact (only where a tile needs it), aligned (mask rounded to tiles).
    block_q, block_kv, masked_chunk, probe: as in `plan_steps`.

  Raises:
    ValueError: an unknown kernel, or tiles that do not fit the step words.
  """
  if kernel not in tiles.TABLES:
    raise ValueError(f"svg_kernel={kernel!r} is not one of {', '.join(tiles.TABLES)}.")
  S = mask.num_tokens
  both = tuple(HeadMask(mask.grid, mask.half_width, t, mask.sink_frames, mask.sink) for t in (False, True))
  tables = np.stack([tiles.TABLES[kernel](m, block_q, block_kv, False) for m in both])
  intervals = None if kernel == "aligned" else [row_intervals(m)[1:] for m in both]
  return plan_steps(tables, S, S, block_q, block_kv, intervals=intervals, sink=mask.num_sink,
                    masked_chunk=masked_chunk, probe=probe, shortcuts=kernel != "naive",
                    kernel_name=f"svg_{kernel}_attention")


@functools.lru_cache(maxsize=64)
def cached_dense_plan(num_queries: int, num_keys: int, block_q: int, block_kv: int, masked_chunk: int = 512) -> StepPlan:
  """`dense_plan`, made once a shape."""
  return dense_plan(num_queries, num_keys, block_q, block_kv, masked_chunk)
