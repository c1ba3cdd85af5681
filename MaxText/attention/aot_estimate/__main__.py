"""Compiles the attention kernels ahead of time for chips x resolutions with their tuned tiles, one line each.

  python -m MaxText.attention.aot_estimate [chips=v6e,v5e] [resolutions=720p] [kernels=dense,aligned] [heads=10]

Everything is compiled by default: s = .35, 81 frames, head dim 128. Exit status 1 when anything does not compile.
"""

import sys

from MaxText.attention.aot_estimate.case import CHIPS, KERNELS, KernelCase
from MaxText.attention.aot_estimate.estimate import EstimateError, compile_parts, evaluate
from MaxText.attention.kernels.tuned import tuned_tiles
from MaxText.attention.svg.masks import half_width

GRIDS = {"480p": (21, 30, 52), "720p": (21, 45, 80), "1080p": (21, 68, 120), "1440p": (21, 90, 160)}
DEFAULTS = {"chips": ",".join(CHIPS), "resolutions": "720p,1080p,1440p", "kernels": "dense,aligned,exact", "heads": "10"}
ROUTES = {"spatial": (0, 0), "temporal": (1, 1), "mixed": (0, 1)}  # patterns of even and odd heads


def main(argv: list[str]) -> int:
  given = dict(arg.split("=", 1) for arg in argv)
  if unknown := (set(given) - set(DEFAULTS)):
    print(f"error: {', '.join(sorted(unknown))}: the arguments are {', '.join(DEFAULTS)}", file=sys.stderr)
    return 2
  options = DEFAULTS | given
  chips, resolutions, kernels = (options[key].split(",") for key in ("chips", "resolutions", "kernels"))
  for key, values, known in (("chips", chips, CHIPS), ("resolutions", resolutions, GRIDS), ("kernels", kernels, KERNELS)):
    if wrong := [v for v in values if v not in known]:
      print(f"error: {key}={','.join(wrong)}: known are {', '.join(known)}", file=sys.stderr)
      return 2
  heads, failed = int(options["heads"]), 0
  for chip in chips:
    for resolution in resolutions:
      for kernel in kernels:
        failed += not compile_one(chip, resolution, kernel, heads)
  return 1 if failed else 0


def compile_one(chip: str, resolution: str, kernel: str, heads: int) -> bool:
  grid = GRIDS[resolution]
  S = grid[0] * grid[1] * grid[2]
  tiles = tuned_tiles(chip, kernel, S, S)
  case = KernelCase(chip, kernel, grid, heads, tiles.block_q, tiles.block_kv, tiles.tiling.chunk, tiles.masked_chunk,
                    tiles.tiling.unroll, half_width=half_width(0.35, S))  # fmt: skip
  try:
    compiled = compile_parts(case)
  except EstimateError as error:
    print(f"FAILED {chip} {resolution} {error}", flush=True)
    return False
  for name, patterns in ROUTES.items():
    if kernel == "dense" and name != "spatial":
      continue
    result = evaluate(case, compiled, [patterns[h % 2] for h in range(heads)])
    busy = "" if result.mxu_busy is None else f", MXU {result.mxu_busy:.1%} busy"
    print(f"{result.label} {chip} {resolution} {kernel} {name} {case.block_q} x {case.block_kv}: "
          f"{result.milliseconds:.2f} ms{busy}, {result.steps} steps, {result.idle_steps} idle, "
          f"compiled in {result.compile_seconds:.0f} s", flush=True)
  return True


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
