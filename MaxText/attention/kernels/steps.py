"""The static step lists that the attention kernel walks: which tiles, in which order, with which flags. Plain numpy.

A step is one (query tile, key tile) of one head. Two int32 words describe it, so that the lists of a 1440p launch fit
the scalar memory of every chip:

  block   head << 20 | query tile << 10 | key tile
  flags   FIRST | LAST | MASKED | ACTIVE | pattern << 4 | first chunk << 8 | end chunk << 16 | LOWER | UPPER

Legend: P patterns, L steps of one head, R query tiles, C key tiles, S query tokens, T key tokens.
"""

import dataclasses

import numpy as np

# Classes of a tile in a table.
EMPTY, BOUNDARY, FULL = 0, 1, 2
# Bits of a step's flags.
FIRST, LAST, MASKED, ACTIVE = 1, 2, 4, 8
LOWER, UPPER = 1 << 24, 1 << 25  # a masked tile that only the band's start, or only its end, crosses: half the mask

MAX_HEADS, MAX_TILES, MAX_PATTERNS, MAX_CHUNKS = 1 << 11, 1 << 10, 1 << 4, 1 << 7
MAX_STEPS = 120_000  # of a launch: two words each in 1 MiB of scalar memory, with room for the compiler's own


def unpack_block(block):
  """(head, query tile, key tile) of a block word."""
  return block >> 20, (block >> 10) & 1023, block & 1023


def pack_head(head):
  return head << 20


def unpack_pattern(flags):
  return (flags >> 4) & 15


def pack_pattern(pattern):
  return pattern << 4


def unpack_chunks(flags):
  """Chunks [first, end) of the tile that hold keys any of its rows keeps."""
  return (flags >> 8) & 255, (flags >> 16) & 255


def split(length: int, chunk: int) -> list[int]:
  """Chunk sizes that cover `length`: equal ones, then a remainder (merged into its neighbour when tiny)."""
  if length <= chunk:
    return [length]
  sizes = [chunk] * (length // chunk)
  rest = length % chunk
  if rest:
    sizes = sizes[:-1] + [chunk + rest] if rest < min(128, chunk) else sizes + [rest]
  return sizes


def leading_equal(sizes: list[int]) -> int:
  """How many sizes at the start are the same: the chunks that one loop can cover."""
  return next((i for i, size in enumerate(sizes) if size != sizes[0]), len(sizes))


@dataclasses.dataclass(frozen=True, eq=False)
class StepPlan:
  """Everything static about one launch. Built by `plan_steps` or `dense_plan`.

  Attributes:
    blocks_PL, flags_PL: int32 step lists, one row a pattern, padded with idle steps to one length.
    edges_P3S: int32 start, stop and -stop of each row's band (padded to whole query tiles), or None: only padding is
      masked.
    sink: the first keys, kept by every row whatever its band.
    masked_chunk: keys of a chunk that the flags count in.
    num_steps_P: steps of each pattern before padding.
  """

  blocks_PL: np.ndarray
  flags_PL: np.ndarray
  edges_P3S: np.ndarray | None
  sink: int
  num_queries: int
  num_keys: int
  block_q: int
  block_kv: int
  masked_chunk: int
  num_steps_P: tuple[int, ...]
  kernel_name: str
  probe_not_covered: bool = False

  @property
  def num_steps(self) -> int:
    """Grid steps of one head, idle ones included."""
    return self.blocks_PL.shape[1]

  @property
  def has_tail(self) -> bool:
    return self.num_keys % self.block_kv != 0

  @property
  def any_idle(self) -> bool:
    return bool(((self.flags_PL & ACTIVE) == 0).any())

  @property
  def any_masked(self) -> bool:
    return bool((self.flags_PL & MASKED).any())

  @property
  def any_full(self) -> bool:
    active = self.flags_PL[(self.flags_PL & ACTIVE) != 0]
    return bool(((active & MASKED) == 0).any())

  @property
  def any_one_edge(self) -> bool:
    return bool((self.flags_PL & (LOWER | UPPER)).any())

  @property
  def any_both_edges(self) -> bool:
    return bool((((self.flags_PL & MASKED) != 0) & ((self.flags_PL & (LOWER | UPPER)) == 0)).any())

  @property
  def probe_masked(self) -> bool:
    """Whether some query tile starts in a tile whose first keys are not kept by all rows, as far as tables tell."""
    return self.edges_P3S is not None and self.probe_not_covered

  def counts(self, pattern: int) -> dict[str, int]:
    """Executions of each part of the kernel for one head that follows `pattern` (what an estimate multiplies)."""
    flags = self.flags_PL[pattern]
    active = (flags & ACTIVE) != 0
    masked = active & ((flags & MASKED) != 0)
    one_edge = (flags & (LOWER | UPPER)) != 0
    first, end = unpack_chunks(flags)
    chunks = end - first
    return {
        "steps": len(flags),
        "active": int(active.sum()),
        "full": int((active & ~masked).sum()),
        "one_edge": int(one_edge.sum()),
        "one_edge_chunks": int(chunks[one_edge].sum()),
        "both_edges": int((masked & ~one_edge).sum()),
        "both_edges_chunks": int(chunks[masked & ~one_edge].sum()),
        "query_tiles": int(((flags & FIRST) != 0).sum()),
    }


def plan_steps(
    tables_PRC: np.ndarray,
    num_queries: int,
    num_keys: int,
    block_q: int,
    block_kv: int,
    *,
    intervals: list[tuple[np.ndarray, np.ndarray]] | None = None,
    sink: int = 0,
    masked_chunk: int = 512,
    probe: int = 128,
    shortcuts: bool = True,
    kernel_name: str = "block_sparse_attention",
) -> StepPlan:
  """Turns tile tables into the step lists of one launch.

  Args:
    tables_PRC: EMPTY / BOUNDARY / FULL, one table a pattern. Any table will do: bands, or an arbitrary list of tiles.
      BOUNDARY tiles get the mask; without `intervals` that masks only the padding of the last key tile.
    intervals: for each pattern (start [S], stop [S]): row i keeps keys [0, sink) and [start[i], stop[i]).
    masked_chunk: keys of one pass over a masked tile, also the unit in which it skips keys that no row keeps.
    probe: as in KernelTiling.
    shortcuts: False evaluates the whole mask on every key of a masked tile, as a naive kernel does.

  Raises:
    ValueError: more tiles than a step word can hold, tables of the wrong shape, or key chunks beyond the flags.
  """
  tables_PRC = np.asarray(tables_PRC)
  R, C = -(-num_queries // block_q), -(-num_keys // block_kv)
  if tables_PRC.shape[1:] != (R, C):
    raise ValueError(f"tables of shape {tables_PRC.shape[1:]}: {num_queries} x {num_keys} tokens in tiles of "
                     f"{block_q} x {block_kv} need {(R, C)}")
  if max(R, C) > MAX_TILES or len(tables_PRC) > MAX_PATTERNS:
    raise ValueError(f"{R} x {C} tiles and {len(tables_PRC)} patterns: at most {MAX_TILES} tiles a side and "
                     f"{MAX_PATTERNS} patterns; choose larger tiles")
  if block_q % 128 or block_kv % 16:
    raise ValueError(f"tiles of {block_q} x {block_kv}: block_q must be a multiple of 128 and block_kv of 16")
  masked_chunk = min(masked_chunk, block_kv)
  if -(-block_kv // masked_chunk) > MAX_CHUNKS:
    raise ValueError(f"block_kv={block_kv} in chunks of {masked_chunk}: at most {MAX_CHUNKS} chunks a tile")
  sink_covers_probe = min(sink, num_keys) >= min(probe, block_kv, num_keys)
  lists, covered = [], True
  for p, table in enumerate(tables_PRC):
    if intervals is None or not shortcuts:
      keys = np.minimum(block_kv, num_keys - np.arange(C) * block_kv)
      words = np.broadcast_to(-(-keys // masked_chunk) << 16, (R, C))
    else:
      words = _mask_words(intervals[p], sink, num_queries, num_keys, block_q, block_kv, masked_chunk)
    words_of_steps, ok = _one_list(table, words, num_keys % block_kv != 0, sink_covers_probe)
    lists.append(words_of_steps)
    covered &= ok
  length = max(len(b) for b, _ in lists)
  def pad(x, fill):
    return np.concatenate([x, np.full(length - len(x), fill, np.int32)])
  edges = None
  if intervals is not None:
    edges = np.zeros((len(intervals), 3, R * block_q), np.int32)
    for p, pair in enumerate(intervals):
      start, stop = pair
      edges[p, :, :num_queries] = start, stop, -np.asarray(stop)
  return StepPlan(
      blocks_PL=np.stack([pad(b, b[-1]) for b, _ in lists]),  # an idle step repeats the last block: nothing is fetched
      flags_PL=np.stack([pad(f, 0) for _, f in lists]),
      edges_P3S=edges,
      sink=sink,
      num_queries=num_queries,
      num_keys=num_keys,
      block_q=block_q,
      block_kv=block_kv,
      masked_chunk=masked_chunk,
      num_steps_P=tuple(len(b) for b, _ in lists),
      kernel_name=kernel_name,
      probe_not_covered=not covered,
  )


def dense_plan(num_queries: int, num_keys: int, block_q: int, block_kv: int, masked_chunk: int = 512) -> StepPlan:
  """Every tile; only the padding of the last key tile is masked."""
  table = np.full((-(-num_queries // block_q), -(-num_keys // block_kv)), FULL, np.uint8)
  return plan_steps(table[None], num_queries, num_keys, block_q, block_kv, masked_chunk=masked_chunk,
                    kernel_name="dense_attention")


def _mask_words(interval, sink, num_queries, num_keys, block_q, block_kv, chunk):
  """int [R, C]: the chunks of each tile with keys that some row keeps, and which single edge crosses it (if one does)."""
  R, C = -(-num_queries // block_q), -(-num_keys // block_kv)
  start, stop = (np.asarray(x, np.int64) for x in interval)
  tiles = [slice(r * block_q, min((r + 1) * block_q, num_queries)) for r in range(R)]
  start_min, start_max, stop_min, stop_max = (
      np.array([pick(edge[t]) for t in tiles])[:, None] for edge in (start, stop) for pick in (np.min, np.max)
  )
  key = np.arange(C)[None] * block_kv
  key_end = np.minimum(key + block_kv, num_keys)
  first, end = (np.clip(x - key, 0, block_kv) for x in (start_min, stop_max))
  sunk = np.clip(sink - key, 0, block_kv)
  in_band = first < end
  first = np.where(in_band & (sunk == 0), first, 0)  # a tile with sink keys starts at its first chunk
  end = np.where(in_band, np.maximum(end, sunk), sunk)
  reaches_past = key + block_kv > num_keys
  above_start = (start_max <= key) & (sunk == 0)  # no row's start lies inside, no sink key either
  below_stop = (stop_min >= key_end) & ~reaches_past
  stops_everywhere = (start < stop).all()
  upper = above_start & ~below_stop & (sunk == 0) & stops_everywhere
  lower = below_stop & ~above_start & (sunk == 0) & stops_everywhere
  return (first // chunk) << 8 | -(-end // chunk) << 16 | np.where(lower, LOWER, 0) | np.where(upper, UPPER, 0)


def _one_list(table, words_RC, has_tail, sink_covers_probe):
  """((blocks, flags) of one pattern's steps, whether every query tile's probe sees only keys that all its rows keep)."""
  blocks, flags, covered = [], [], True
  for r, classes in enumerate(table):
    columns = np.flatnonzero(classes)
    if not len(columns):  # no key at all: the output is 0, no tile is computed
      blocks.append(r << 10)
      flags.append(FIRST | LAST)
      continue
    masked = (classes[columns] == BOUNDARY) | (has_tail & (columns == table.shape[1] - 1))
    # The first step gives the reference: the sink, else a full tile, else whatever there is.
    sink_first = sink_covers_probe and columns[0] == 0
    if not sink_first and masked[0] and not masked.all():
      n = int(np.argmin(masked))
      columns, masked = (np.concatenate([x[n : n + 1], x[:n], x[n + 1 :]]) for x in (columns, masked))
    covered &= sink_first or not masked[0]
    for i, (c, is_masked) in enumerate(zip(columns.tolist(), masked, strict=True)):
      word = int(words_RC[r, c]) if is_masked else int(words_RC[r, c]) & ~(LOWER | UPPER)
      word |= ACTIVE | (FIRST if i == 0 else 0) | (LAST if i == len(columns) - 1 else 0) | (MASKED if is_masked else 0)
      blocks.append(r << 10 | c)
      flags.append(word)
  return (np.array(blocks, np.int32), np.array(flags, np.int32)), covered
