"""Times every attention kernel on the shape of a model, and the work beside it.

  python -m MaxText.benchmark_attention configs/video.yml model_name=wan2.1-t2v-14b compile_topology=v6e:2x4

On a TPU the kernels are measured. Elsewhere, or with compile_topology, they are compiled for that chip and their time is
an AOT estimate (bundles of the final schedule × executions ÷ clock; waits for memory are not seen); the header and every
row of the JSON say which. One device's share is timed: num_heads ÷ ici_context_parallelism heads. The table goes to the
screen, and as JSON to {base_output_directory}/{run_name}/benchmark_attention.json. Compiled kernels are kept in
{base_output_directory}/aot_estimates: a run that was stopped, or asks for the same tiles again, compiles only the rest.

Rows: B0 dense, B1 naive, B2 exact, B3 aligned; aligned with temporal and mixed heads; the redo of steps whose logits
jump, at 1 and 100 % of steps; exact at the published sweep's query tiles; routing and layout; then the ablation of
layouts, and the tiles that a search ranks best.
"""

import dataclasses
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator

from MaxText import pyconfig
from MaxText.pyconfig import Config, ConfigError

SWEEP = (1024, 3328, 4864)  # query tiles of the published sweep
DEFAULT_DENSITY = 0.35
ROUTES = {"spatial": (0, 0), "temporal": (1, 1), "mixed": (0, 1)}  # patterns of even and odd heads


@dataclasses.dataclass(frozen=True)
class Row:
  """One kernel launch; `how` is "AOT estimate …" or "measured …". masked_area_share is of the visited area."""

  name: str
  kernel: str
  block_q: int
  block_kv: int
  routes: str
  milliseconds: float
  steps: int
  idle_steps: int
  visited_tile_share: float
  masked_area_share: float
  kept_pair_share: float
  mxu_busy: float | None
  how: str


@dataclasses.dataclass(frozen=True)
class BesideRow:
  """Work beside the kernel (aot_estimate/beside.py). No milliseconds where nothing gives them: `note` says why.

  Attributes:
    share_of_aligned: milliseconds ÷ those of the aligned kernel.
    bytes_moved: through HBM, each array read and written as often as the work needs it.
  """

  name: str
  milliseconds: float | None
  share_of_aligned: float | None
  bytes_moved: int
  note: str
  how: str


def shape_of(config: Config, chip: str):
  """The case of the dense kernel for one device's share of the heads."""
  from MaxText.attention.aot_estimate.case import KernelCase
  from MaxText.attention.svg.masks import half_width

  shards = max(config.ici_context_parallelism, 1)
  if config.num_heads % shards:
    raise ConfigError(f"ici_context_parallelism={shards}: does not divide num_heads={config.num_heads}")
  S = config.num_tokens
  width = config.svg_band_width
  return KernelCase(
      chip=chip, kernel="dense", grid=config.token_grid, heads=config.num_heads // shards, block_q=128, block_kv=16,
      head_dim=config.head_dim, sink_frames=config.svg_sink_frames, sink=config.svg_sink,
      half_width=min(width, S - 1) if width is not None else half_width(density_of(config) or DEFAULT_DENSITY, S),
  )  # fmt: skip


def density_of(config: Config) -> float | None:
  return config.svg_density[0] if isinstance(config.svg_density, tuple) else config.svg_density


def with_tiles(case, kernel: str, config: Config, block_q: int = 0):
  """The case with the tiles that the configuration asks for, else the tuned ones."""
  from MaxText.attention.kernels.tuned import tuned_tiles

  flash, svg = (config.flash_block_q, config.flash_block_kv), (config.svg_block_q, config.svg_block_kv)
  asked = flash if kernel == "dense" else svg
  S = case.num_tokens
  tiles = tuned_tiles(case.chip, kernel, S, S, block_q or asked[0] or 0, asked[1] or 0)
  return dataclasses.replace(case, kernel=kernel, block_q=tiles.block_q, block_kv=tiles.block_kv,
                             masked_chunk=tiles.masked_chunk, chunk=tiles.tiling.chunk, unroll=tiles.tiling.unroll)


class Timer:
  """Times cases, on the device or ahead of time; compiles each case once, and keeps what it compiled in a folder."""

  def __init__(self, on_device: bool, folder: pathlib.Path | None = None):
    self.on_device, self.folder = on_device, folder
    self._compiled = {}

  def row(self, name: str, case, routes: str = "spatial", redone: float = 0.0) -> Row:
    """Raises EstimateError where the case does not compile."""
    from MaxText.attention.svg import tiles
    from MaxText.attention.svg.masks import HeadMask

    patterns = [ROUTES[routes][h % 2] for h in range(case.heads)]
    plan = case.plan()
    counts = [plan.counts(p) for p in patterns]
    total = {key: sum(c[key] for c in counts) for key in counts[0]}
    S, kept, masked = case.num_tokens, 1.0, 0.0
    if case.kernel == "dense":
      masked = S % case.block_kv / S if plan.has_tail else 0.0
    else:
      pairs, shares = [], []
      for pattern in patterns:
        mask = HeadMask(case.grid, case.half_width, bool(pattern), case.sink_frames, case.sink)
        table = tiles.TABLES[case.kernel](mask, case.block_q, case.block_kv, False)
        pairs.append(tiles.table_pairs(table, S, case.block_q, case.block_kv) if case.kernel == "aligned"
                     else tiles.kept_pairs(mask))
        shares.append(tiles.boundary_share(table, S, case.block_q, case.block_kv))
      kept, masked = sum(pairs) / len(pairs) / S**2, sum(shares) / len(shares)
    milliseconds, mxu_busy, how = self._time(name, case, patterns, redone)
    grid_tiles = case.heads * -(-S // case.block_q) * -(-S // case.block_kv)
    return Row(
        name, case.kernel, case.block_q, case.block_kv, routes, milliseconds, total["steps"],
        total["steps"] - total["active"], total["active"] / grid_tiles, masked, kept, mxu_busy, how,
    )  # fmt: skip

  def _time(self, name, case, patterns, redone):
    from MaxText.attention.aot_estimate import estimate
    from MaxText.attention.aot_estimate.progress import aloud

    what = f"{name}, {case.block_q} x {case.block_kv}"
    if self.on_device:
      with aloud(f"measuring {what}"):
        return measure(case, patterns), None, f"measured on {device_kind()}"
    if case not in self._compiled:
      with aloud(f"{'found' if estimate.stored_parts(case, self.folder) else 'compiling'} {what} for {case.chip}"):
        self._compiled[case] = estimate.compile_parts(case, self.folder)
    result = estimate.evaluate(case, self._compiled[case], patterns, redone)
    return result.milliseconds, result.mxu_busy, f"{result.label}, {case.chip}"

  def beside(self, case, name: str, num_sampled_queries: int, aligned_ms: float | None) -> BesideRow:
    """The row of one of beside.WORKS; what cannot be timed becomes a row that says why."""
    from MaxText.attention.aot_estimate import beside, estimate
    from MaxText.attention.aot_estimate.progress import aloud

    how = f"measured on {device_kind()}" if self.on_device else f"AOT estimate, {case.chip}"
    found, moved, note = None, 0, ""
    try:
      work = beside.work_of(case, name, num_sampled_queries)
      moved = work.bytes_moved
      if work.no_estimate and not self.on_device:
        note = f"{work.no_estimate}; {beside.milliseconds(case, work, 0):.3g} ms at least, its bytes at HBM bandwidth"
      else:
        with aloud(f"measuring {name}" if self.on_device else f"compiling {name} for {case.chip}"):
          found = (median_milliseconds(work.function, work.args) * work.times if self.on_device else
                   beside.milliseconds(case, work, estimate.work_cycles(case, name, num_sampled_queries)))
    except estimate.EstimateError as error:
      note = str(error)
    return BesideRow(name, found, found / aligned_ms if found and aligned_ms else None, moved, note, how)


def device_kind() -> str:
  import jax

  return jax.devices()[0].device_kind


def measure(case, patterns: list[int]) -> float:
  """Median milliseconds of one launch on the device here, random inputs, compilation and first run excluded."""
  import jax
  import jax.numpy as jnp

  from MaxText.attention.kernels import block_sparse_attention

  plan, tiling, keys = case.plan(), case.tiling(), jax.random.split(jax.random.key(0), 3)
  shape = (case.heads, case.num_tokens, case.head_dim)
  qkv = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys]
  pattern_H = jnp.asarray(patterns, jnp.int32)
  return median_milliseconds(
      lambda q, k, v, p: block_sparse_attention(q, k, v, plan, p, tiling=tiling), [*qkv, pattern_H])


def median_milliseconds(function, args, repeats: int = 7) -> float:
  """Median time of a jitted function on zeros of the given shapes, or ones for flags (arrays are used as they are)."""
  import jax
  import jax.numpy as jnp

  arrays = [a if isinstance(a, jax.Array) else jnp.full(a.shape, a.dtype == bool, a.dtype) for a in args]
  run = jax.jit(function)
  jax.block_until_ready(run(*arrays))
  seconds = []
  for _ in range(repeats):
    began = time.perf_counter()
    jax.block_until_ready(run(*arrays))
    seconds.append(time.perf_counter() - began)
  return statistics.median(seconds) * 1e3


def jobs(case, config: Config, on_device: bool) -> Iterator[tuple]:
  """(name, case, routes, share of steps done again) of every kernel row."""
  cases = {kernel: with_tiles(case, kernel, config) for kernel in ("dense", "naive", "exact", "aligned")}
  for label, kernel in (("B0", "dense"), ("B1", "naive"), ("B2", "exact"), ("B3", "aligned")):
    yield f"{label} {kernel}", cases[kernel], "spatial", 0.0
  yield "B3 aligned", cases["aligned"], "temporal", 0.0
  yield "B3 aligned", cases["aligned"], "mixed", 0.0
  if not on_device:
    yield "B3, 1 % of steps redone", cases["aligned"], "spatial", 0.01
    yield "B3, all steps redone", cases["aligned"], "spatial", 1.0
  for block_q in SWEEP:
    if block_q != cases["exact"].block_q and block_q < case.num_tokens:
      yield f"B2, q tile {block_q}", with_tiles(case, "exact", config, block_q), "spatial", 0.0


def header(case, config: Config, on_device: bool) -> str:
  """What is timed, on what, and how: every number below it is of this kind."""
  from MaxText.attention.aot_estimate.case import CHIPS

  clock = "" if on_device else f" at {CHIPS[case.chip].clock_hz / 1e9:.2f} GHz"
  how = f"measured on {device_kind()}" if on_device else "AOT estimate, not measured: bundles of the final schedule"
  if config.svg_band_width is not None:
    density = "svg_band_width"
  else:
    density = f"svg_density {density_of(config)}" if density_of(config) else f"density {DEFAULT_DENSITY} by default"
  tiles = (f"{kernel} {c.block_q} x {c.block_kv}" for kernel in ("dense", "aligned", "exact", "naive")
           for c in (with_tiles(case, kernel, config),))  # fmt: skip
  return (f"one core of a {case.chip}{clock}, {how}\n"
          f"grid {' x '.join(map(str, case.grid))} = {case.num_tokens} tokens, {case.heads} heads of {case.head_dim}, "
          f"bfloat16\n"
          f"mask: half-width {case.half_width} tokens ({density}), sink {case.sink_frames} x {case.sink}\n"
          f"tiles (queries x keys): {', '.join(tiles)}")


def format_table(rows: list[Row], beside: list[BesideRow], failures: list[str]) -> str:
  from MaxText.attention.aot_estimate.progress import three_digits

  head = (f"{'kernel':24s} {'tiles':>12s} {'heads':9s} {'ms':>6s} {'steps':>6s} {'idle':>5s} {'visited':>8s} "
          f"{'masked':>7s} {'pairs':>7s} {'MXU':>6s}")
  lines = [head, "-" * len(head)]
  for r in rows:
    busy = "" if r.mxu_busy is None else f"{r.mxu_busy:.1%}"
    lines.append(
        f"{r.name:24s} {f'{r.block_q} x {r.block_kv}':>12s} {r.routes if r.kernel != 'dense' else '-':9s} "
        f"{three_digits(r.milliseconds):>6s} {r.steps:6d} {r.idle_steps:5d} {r.visited_tile_share:8.2%} "
        f"{r.masked_area_share:7.2%} {r.kept_pair_share:7.2%} {busy:>6s}")
  for b in beside:
    time_ = "-" if b.milliseconds is None else three_digits(b.milliseconds)
    share = "" if b.share_of_aligned is None else f"{b.share_of_aligned:.1%} of B3; "
    moved = f"{b.bytes_moved / 1e9:.3g} GB through HBM" if b.bytes_moved else ""
    note = "; ".join(x for x in (share + moved, b.note) if x)
    lines.append(f"{b.name:24s} {'':12s} {'':9s} {time_:>6s} {note}")
  return "\n".join([*lines, *(f"failed: {f}" for f in failures)])


def layout_ablation(rows: list[Row], beside: list[BesideRow], case, ways: int) -> dict[str, str]:
  """In words, B3 of temporal heads with its permutation in each layout; what cannot be said in milliseconds, why not."""
  from MaxText.attention.aot_estimate.beside import exchanged_bytes
  from MaxText.attention.aot_estimate.progress import three_digits

  found = {b.name: b for b in beside}
  alone = next((r.milliseconds for r in rows if r.kernel == "aligned" and r.routes == "temporal"), None)
  words = {}
  for name, label in (("layout", "head_local"), ("select", "head_local by XLA's select"), ("in_kernel", "in_kernel")):
    row = found.get(name)
    if row is None or alone is None:
      words[label] = "no time: see the failures above"
    elif row.milliseconds is None:
      words[label] = row.note
    else:
      words[label] = f"{three_digits(alone + row.milliseconds)} ms, {three_digits(row.milliseconds)} of them permuting"
  if ways > 1:
    local, before = (x / 1e9 for x in exchanged_bytes(case, ways))
    words["pre_exchange"] = (
        f"no time: XLA estimates no cycles for collectives; a device receives at least {before:.3g} GB over the "
        f"interconnect, {local:.3g} GB with head_local ({ways} devices)")
  else:
    words["pre_exchange"] = "nothing is exchanged on one device; ici_context_parallelism=4 compares it"
  return words


@pyconfig.run_main
def main(argv: list[str]) -> None:
  config = pyconfig.initialize(argv, "benchmark_attention")
  # --- which chip, measured or estimated
  import jax

  from MaxText.attention.aot_estimate import search
  from MaxText.attention.aot_estimate.beside import WORKS
  from MaxText.attention.aot_estimate.case import CHIPS
  from MaxText.attention.aot_estimate.parts import EstimateError
  from MaxText.attention.kernels.tuned import this_chip

  on_device = config.compile_topology is None and jax.default_backend() == "tpu"
  chip = this_chip() if config.compile_topology is None else config.compile_topology.split(":")[0]
  if chip not in CHIPS:
    raise ConfigError(f"compile_topology={config.compile_topology}: estimates exist for {', '.join(CHIPS)}")
  case = shape_of(config, chip)
  title = header(case, config, on_device)
  print(title, flush=True)
  # --- every kernel
  outputs = pathlib.Path(config.base_output_directory).expanduser()
  timer, rows, failures = Timer(on_device, outputs / "aot_estimates"), [], []
  for name, job, routes, redone in jobs(case, config, on_device):
    try:
      rows.append(timer.row(name, job, routes, redone))
    except EstimateError as error:
      failures.append(f"{name}, {job.block_q} x {job.block_kv}, {routes} heads: {error}")
  # --- the work beside them
  aligned = with_tiles(case, "aligned", config)
  aligned_ms = next((r.milliseconds for r in rows if r.kernel == "aligned"), None)
  beside = [timer.beside(aligned, name, config.svg_num_sampled_queries, aligned_ms) for name in WORKS]
  layouts = layout_ablation(rows, beside, aligned, max(config.ici_context_parallelism, 1))
  # --- tiles that a search predicts best
  ranked = {}
  for kernel in ("dense", "aligned"):
    best = search.candidates(with_tiles(case, kernel, config))[:5]
    ranked[kernel] = [(c.block_q, c.block_kv, search.predicted_cycles(c) / CHIPS[chip].clock_hz * 1e3) for c in best]
  # --- report
  print(f"\n{title}\n\n{format_table(rows, beside, failures)}\n\nB3 of temporal heads by svg_layout:")
  for layout, words in layouts.items():
    print(f"  {layout}: {words}")
  for kernel, entries in ranked.items():
    sizes = ", ".join(f"{q} x {kv}" for q, kv, _ in entries)
    print(f"tiles that fit and rank best for {kernel} (model of the matrix unit, not timed): {sizes}")
  folder = outputs / config.run_name
  folder.mkdir(parents=True, exist_ok=True)
  path = folder / "benchmark_attention.json"
  path.write_text(json.dumps({
      "header": title,
      "shape": dataclasses.asdict(case) | {"num_tokens": case.num_tokens},
      "rows": [dataclasses.asdict(row) for row in rows],
      "beside": [dataclasses.asdict(row) for row in beside],
      "layouts": layouts,
      "failures": failures,
      "tile_search": {
          kernel: [{"block_q": q, "block_kv": kv, "predicted_ms": ms} for q, kv, ms in entries]
          for kernel, entries in ranked.items()
      },
  }, indent=2))
  print(f"written to {path}")
  if not rows:
    raise ConfigError(f"no kernel could be timed: {failures[0]}")


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
