"""Tile search: candidates that fit the chip's vector memory, ranked by a model of the matrix unit's work.

The model counts what cannot be scheduled away: rows that stream through the MXU, padded to its depth and width, plus the
cycles that a step and a query tile cost beside that. It only ranks; an AOT estimate or a measurement decides.
"""

import dataclasses

from MaxText.attention.aot_estimate.case import CHIPS, MIB, KernelCase
from MaxText.attention.svg.masks import HeadMask
from MaxText.attention.svg.tiles import kept_pairs

# Cycles beside the matrix work on v6e: AOT estimates of five tile sizes agree within 100.
STEP_CYCLES, QUERY_TILE_CYCLES_PER_ROW = 920, 0.7


def predicted_cycles(case: KernelCase) -> float:
  """MXU cycles of a launch of unmasked tiles plus overheads, in v6e cycles (other chips: a rank, not a time)."""
  side = 256 if CHIPS[case.chip].reference_in_mxu else 128
  columns = -(-case.block_q // side)
  sizes = [min(case.chunk, case.block_kv - i) for i in range(0, case.block_kv, case.chunk)]
  passes = sum(-(-size // side) for size in sizes)
  scale = (256 / side) ** 2 / 4  # two MXUs that take two rows a cycle
  tile = columns * (case.block_kv + passes * 128) * scale * (side / 256)
  S, query_tiles = case.num_tokens, -(-case.num_tokens // case.block_q)
  share = 1.0
  if case.kernel != "dense":
    share = kept_pairs(HeadMask(case.grid, case.half_width, False, case.sink_frames, case.sink)) / S**2
  steps = share * query_tiles * -(-S // case.block_kv)
  return case.heads * (steps * (tile + STEP_CYCLES) + query_tiles * case.block_q * QUERY_TILE_CYCLES_PER_ROW)


def candidates(case: KernelCase) -> list[KernelCase]:
  """Cases with other tiles that fit vector memory, best predicted first; key tiles divide the keys where any does."""
  S, limit = case.num_tokens, CHIPS[case.chip].vmem_bytes - 16 * MIB
  frame = case.grid[1] * case.grid[2]
  sides = range(1024, min(10_240, -(-S // 256) * 256) + 1, 256)
  keys = [n for n in range(1008, min(5120, S) + 1, 16) if S % n == 0]
  if case.kernel != "dense":
    keys = [n for n in keys if frame % n == 0] or keys
  found = []
  for block_kv in keys or [min(2048, -(-S // 16) * 16)]:
    for block_q in sides or [-(-S // 128) * 128]:
      chunk = min(1024, block_kv)
      other = dataclasses.replace(case, block_q=block_q, block_kv=block_kv, chunk=chunk)
      if other.vmem_bytes() <= limit and max(-(-S // block_q), -(-S // block_kv)) < 1024:
        found.append((predicted_cycles(other), other))
  return [other for _, other in sorted(found, key=lambda pair: pair[0])]
