"""What sparse attention keeps and saves, counted exactly: pairs, tiles, transformer FLOPs.

Legend: S tokens, T text tokens, E width, L layers, S² the pairs of dense attention.
"""

from collections.abc import Sequence

from MaxText.attention import Grid
from MaxText.attention.svg import tiles
from MaxText.attention.svg.masks import HeadMask
from MaxText.attention.svg.schedule import StepPlan


def mask_counts(masks: tuple[HeadMask, HeadMask], kernel: str, block_q: int, block_kv: int) -> dict:
  """Counts of one layer's spatial and temporal masks and of the tiles that a kernel visits for them, ready for JSON.

  band_density is the share of all pairs inside the band. For each kind of head: kept_pairs and kept_fraction are the
  exact mask's, sink included; executed_pairs and executed_fraction are those inside visited tiles, which is what an
  aligned kernel keeps; executed_tile_fraction counts tiles; boundary_share is the share of the visited area whose tiles
  need a mask.
  """
  S, width = masks[0].num_tokens, min(masks[0].half_width, masks[0].num_tokens - 1)
  counts = {
    "half_width": width,
    "band_density": (S * (2 * width + 1) - width * (width + 1)) / S**2,
    "kernel": kernel,
    "block_q": block_q,
    "block_kv": block_kv,
  }
  for kind, mask in zip(("spatial", "temporal"), masks, strict=True):
    table = tiles.TABLES[kernel](mask, block_q, block_kv, ragged_queries=False)
    executed = tiles.table_pairs(table, S, block_q, block_kv)
    visited = int((table != tiles.EMPTY).sum())
    counts |= {
      f"kept_pairs_{kind}": tiles.kept_pairs(mask),
      f"kept_fraction_{kind}": tiles.kept_pairs(mask) / S**2,
      f"executed_pairs_{kind}": executed,
      f"executed_fraction_{kind}": executed / S**2,
      f"executed_tiles_{kind}": visited,
      f"masked_tiles_{kind}": int((table == tiles.BOUNDARY).sum()),
      f"executed_tile_fraction_{kind}": visited / table.size,
      f"boundary_share_{kind}": tiles.boundary_share(table, S, block_q, block_kv),
    }
  return counts


def layer_flops(num_tokens: int, text_tokens: int, width: int, ffn_width: int) -> tuple[int, int]:
  """(self-attention's products with all pairs, everything else) of one layer and one sample; a multiply-add is 2 FLOPs.

  Everything else is the eight projections of self- and cross-attention, cross-attention's products and the MLP. Keys and
  values of the text are counted although a run computes them once; norms and activations are left out.
  """
  S, T, E = num_tokens, text_tokens, width
  self_attention = 4 * S * S * E
  projections = 2 * E * E * (4 * S + 2 * S + 2 * T)
  return self_attention, projections + 4 * S * T * E + 4 * S * E * ffn_width


def flops_saved(
  plans: Sequence[StepPlan], grid: Grid, *, num_layers: int, text_tokens: int, width: int, ffn_width: int,
  sink_frames: int = 1, sink: str = "frame", temporal_share: float = 0.0,
) -> float:
  """Share of all layers' FLOPs over all steps that sparse attention saves, sink included (embeddings left out).

  Args:
    plans: one a step.
    temporal_share: of the sparse heads; a temporal head with a frame sink keeps a little less than a spatial one.
  """
  S = grid[0] * grid[1] * grid[2]
  attention, other = layer_flops(S, text_tokens, width, ffn_width)
  saved = 0.0
  for plan in plans:
    if plan.half_width is None:
      continue
    spatial, temporal = (
      tiles.kept_pairs(HeadMask(grid, plan.half_width, kind, sink_frames, sink)) / S**2 for kind in (False, True))
    kept = spatial + (temporal - spatial) * temporal_share
    saved += (plan.layer_end - plan.layer_start) * attention * (1.0 - kept)
  return saved / (len(plans) * num_layers * (attention + other))
