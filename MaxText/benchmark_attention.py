"""Times every attention kernel on the shape of a model.

  python -m MaxText.benchmark_attention configs/video.yml model_name=wan2.1-t2v-14b compile_topology=v6e:2x4

On a TPU the kernels are measured. Elsewhere, or with compile_topology, they are compiled for that chip and their time is
an AOT estimate (bundles of the final schedule × executions ÷ clock; waits for memory are not seen); every row says which.
One device's share is timed: num_heads ÷ ici_context_parallelism heads. The table goes to the screen, and as JSON to
{base_output_directory}/{run_name}/benchmark_attention.json.

Rows: B0 dense, B1 naive, B2 exact, B3 aligned; aligned with temporal and mixed heads; the redo of steps whose logits
jump, at 1 and 100 % of steps; exact at the published sweep's query tiles; then the tiles that a search ranks best.
"""

import dataclasses
import json
import pathlib
import statistics
import sys
import time

from MaxText import pyconfig
from MaxText.pyconfig import Config, ConfigError

SWEEP = (1024, 3328, 4864)  # query tiles of the published sweep
DEFAULT_DENSITY = 0.35


@dataclasses.dataclass(frozen=True)
class Row:
  """One line of the table; `how` is "AOT estimate …" or "measured …"."""

  name: str
  kernel: str
  block_q: int
  block_kv: int
  routes: str
  milliseconds: float
  steps: int
  idle_steps: int
  visited_tile_share: float
  masked_tile_share: float
  kept_pair_share: float
  mxu_busy: float | None
  how: str


def shape_of(config: Config, chip: str):
  """The case of the dense kernel for one device's share of the heads."""
  from MaxText.attention.aot_estimate.case import KernelCase
  from MaxText.attention.svg.masks import half_width

  shards = max(config.ici_context_parallelism, 1)
  if config.num_heads % shards:
    raise ConfigError(f"ici_context_parallelism={shards}: does not divide num_heads={config.num_heads}")
  density = config.svg_density[0] if isinstance(config.svg_density, tuple) else config.svg_density
  S = config.num_tokens
  width = config.svg_band_width
  return KernelCase(
      chip=chip, kernel="dense", grid=config.token_grid, heads=config.num_heads // shards, block_q=128, block_kv=16,
      head_dim=config.head_dim, sink_frames=config.svg_sink_frames, sink=config.svg_sink,
      half_width=min(width, S - 1) if width is not None else half_width(density or DEFAULT_DENSITY, S),
  )  # fmt: skip


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
  """Times cases, on the device or ahead of time; compiles each case once."""

  def __init__(self, on_device: bool):
    self.on_device = on_device
    self._compiled = {}

  def row(self, name: str, case, routes: str = "spatial", redone: float = 0.0) -> Row:
    from MaxText.attention.svg import tiles
    from MaxText.attention.svg.masks import HeadMask

    patterns = {"spatial": [0] * case.heads, "temporal": [1] * case.heads,
                "mixed": [h % 2 for h in range(case.heads)]}[routes]  # fmt: skip
    plan = case.plan()
    counts = [plan.counts(p) for p in patterns]
    total = {key: sum(c[key] for c in counts) for key in counts[0]}
    S = case.num_tokens
    kept = 1.0
    if case.kernel != "dense":
      pairs = []
      for pattern in patterns:
        mask = HeadMask(case.grid, case.half_width, bool(pattern), case.sink_frames, case.sink)
        table = tiles.TABLES[case.kernel](mask, case.block_q, case.block_kv, False)
        pairs.append(tiles.table_pairs(table, S, case.block_q, case.block_kv) if case.kernel == "aligned"
                     else tiles.kept_pairs(mask))
      kept = sum(pairs) / len(pairs) / S**2
    milliseconds, mxu_busy, how = self._time(case, patterns, redone)
    grid_tiles = case.heads * -(-S // case.block_q) * -(-S // case.block_kv)
    return Row(
        name, case.kernel, case.block_q, case.block_kv, routes, milliseconds, total["steps"],
        total["steps"] - total["active"], total["active"] / grid_tiles,
        (total["one_edge"] + total["both_edges"]) / total["active"], kept, mxu_busy, how,
    )  # fmt: skip

  def _time(self, case, patterns, redone):
    if self.on_device:
      return measure(case, patterns), None, f"measured on {device_kind()}"
    from MaxText.attention.aot_estimate import estimate

    if case not in self._compiled:
      self._compiled[case] = estimate.compile_parts(case)
    result = estimate.evaluate(case, self._compiled[case], patterns, redone)
    return result.milliseconds, result.mxu_busy, f"{result.label}, {case.chip}"


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


def time_layouts(case, on_device: bool) -> dict[str, str]:
  """What each layout adds to one launch, in words: permuting once a launch, or gathering inside every head."""
  from MaxText.attention.aot_estimate import layouts
  from MaxText.attention.aot_estimate.estimate import EstimateError, layout_milliseconds

  found = {}
  for layout in layouts.LAYOUTS:
    if on_device:
      function, args, times = layouts.layout_work(case, layout)
      found[layout] = f"{median_milliseconds(function, args) * times:.2f} ms, measured on {device_kind()}"
      continue
    try:
      found[layout] = f"{layout_milliseconds(case, layout):.2f} ms, AOT estimate, {case.chip} (XLA's cycles, pessimistic)"
    except EstimateError as error:
      found[layout] = f"no estimate: {error}"
  return found


def median_milliseconds(function, args, repeats: int = 7) -> float:
  """Median time of a jitted function on zeros of the given shapes (arrays are used as they are)."""
  import jax
  import jax.numpy as jnp

  arrays = [a if isinstance(a, jax.Array) else jnp.zeros(a.shape, a.dtype) for a in args]
  run = jax.jit(function)
  jax.block_until_ready(run(*arrays))
  seconds = []
  for _ in range(repeats):
    began = time.perf_counter()
    jax.block_until_ready(run(*arrays))
    seconds.append(time.perf_counter() - began)
  return statistics.median(seconds) * 1e3


def jobs(case, config: Config, on_device: bool):
  """(name, case, routes, share of steps done again) of every row."""
  cases = {kernel: with_tiles(case, kernel, config) for kernel in ("dense", "naive", "exact", "aligned")}
  for label, kernel in (("B0", "dense"), ("B1", "naive"), ("B2", "exact"), ("B3", "aligned")):
    yield f"{label} {kernel}", cases[kernel], "spatial", 0.0
  yield "B3 aligned", cases["aligned"], "temporal", 0.0
  yield "B3 aligned", cases["aligned"], "mixed", 0.0
  if not on_device:
    yield "B3, 1 % of steps redone", cases["aligned"], "spatial", 0.01
    yield "B3, all steps redone", cases["aligned"], "spatial", 1.0
  if config.svg_block_q is None:
    for block_q in SWEEP:
      if block_q != cases["exact"].block_q and block_q < case.num_tokens:
        yield f"B2, q tile {block_q}", with_tiles(case, "exact", config, block_q), "spatial", 0.0


def format_table(rows: list[Row]) -> str:
  head = (f"{'kernel':26s} {'tiles':>13s} {'heads':9s} {'ms':>9s} {'steps':>7s} {'idle':>5s} {'visited':>8s} "
          f"{'masked':>7s} {'pairs':>7s} {'MXU':>6s}  how")
  lines = [head, "-" * len(head)]
  for r in rows:
    busy = "" if r.mxu_busy is None else f"{r.mxu_busy:.1%}"
    lines.append(
        f"{r.name:26s} {f'{r.block_q} x {r.block_kv}':>13s} {r.routes:9s} {r.milliseconds:9.2f} {r.steps:7d} "
        f"{r.idle_steps:5d} {r.visited_tile_share:8.2%} {r.masked_tile_share:7.2%} {r.kept_pair_share:7.2%} {busy:>6s}  "
        f"{r.how}")
  return "\n".join(lines)


@pyconfig.run_main
def main(argv: list[str]) -> None:
  config = pyconfig.initialize(argv, "benchmark_attention")
  # --- which chip, measured or estimated
  import jax

  from MaxText.attention.aot_estimate import search
  from MaxText.attention.aot_estimate.case import CHIPS
  from MaxText.attention.kernels.tuned import this_chip

  on_device = config.compile_topology is None and jax.default_backend() == "tpu"
  chip = this_chip() if config.compile_topology is None else config.compile_topology.split(":")[0]
  if chip not in CHIPS:
    raise ConfigError(f"compile_topology={config.compile_topology}: estimates exist for {', '.join(CHIPS)}")
  case = shape_of(config, chip)
  shape = (f"grid {' x '.join(map(str, case.grid))} = {case.num_tokens} tokens, {case.heads} heads of {case.head_dim}, "
           f"half-width {case.half_width} (density {DEFAULT_DENSITY} unless svg_density or svg_band_width says else)")
  print(f"{shape}, {'measured on ' + device_kind() if on_device else 'AOT estimate for ' + chip}", flush=True)
  # --- every kernel
  timer, rows, failures = Timer(on_device), [], []
  from MaxText.attention.aot_estimate.estimate import EstimateError

  for name, job, routes, redone in jobs(case, config, on_device):
    try:
      rows.append(timer.row(name, job, routes, redone))
    except EstimateError as error:
      failures.append(f"{name}: {error}")
      print(f"failed: {failures[-1]}", flush=True)
      continue
    print(f"{name} ({routes}): {rows[-1].milliseconds:.2f} ms, {rows[-1].how}", flush=True)
  # --- tiles that a search predicts best
  ranked = {}
  for kernel in ("dense", "aligned"):
    best = search.candidates(with_tiles(case, kernel, config))[:5]
    ranked[kernel] = [(c.block_q, c.block_kv, search.predicted_cycles(c) / CHIPS[chip].clock_hz * 1e3) for c in best]
  layout_times = time_layouts(with_tiles(case, "aligned", config), on_device)
  # --- report
  print("\n" + format_table(rows))
  for kernel, entries in ranked.items():
    sizes = ", ".join(f"{q} x {kv}" for q, kv, _ in entries)
    print(f"tiles that fit and rank best for {kernel} (model of the matrix unit, not timed): {sizes}")
  for layout, words in layout_times.items():
    print(f"layout {layout} adds {words}")
  folder = pathlib.Path(config.base_output_directory).expanduser() / config.run_name
  folder.mkdir(parents=True, exist_ok=True)
  path = folder / "benchmark_attention.json"
  path.write_text(json.dumps({
      "shape": dataclasses.asdict(case) | {"num_tokens": case.num_tokens},
      "rows": [dataclasses.asdict(row) for row in rows],
      "failures": failures,
      "layouts": layout_times,
      "tile_search": {
          kernel: [{"block_q": q, "block_kv": kv, "predicted_ms": ms} for q, kv, ms in entries]
          for kernel, entries in ranked.items()
      },
  }, indent=2))
  print(f"written to {path}")
  if not rows:
    raise ConfigError(f"no kernel could be timed: {failures[0]}")


if __name__ == "__main__":
  sys.exit(main())
