r"""Compiles the attention kernels ahead of time for chips x resolutions with their tuned tiles, and prints one table.

  python -m MaxText.attention.aot_estimate [chips=v6e,v5e] [resolutions=720p] [kernels=dense,aligned] \
      [heads=10] [folder=outputs/aot_estimates]

Everything is compiled by default: s = .35, 81 frames, head dim 128. What is compiled is kept in the folder, so that the
next run, or benchmark_attention with the same output directory, goes on from there. Exit status 1 when anything does not
compile.
"""

import pathlib
import sys

from MaxText.attention.aot_estimate.case import CHIPS, KERNELS, KernelCase
from MaxText.attention.aot_estimate.estimate import EstimateError, compile_parts, evaluate, stored_parts
from MaxText.attention.aot_estimate.progress import aloud, three_digits
from MaxText.attention.kernels.tuned import tuned_tiles
from MaxText.attention.svg.masks import half_width

GRIDS = {"480p": (21, 30, 52), "720p": (21, 45, 80), "1080p": (21, 68, 120), "1440p": (21, 90, 160)}
DEFAULTS = {"chips": ",".join(CHIPS), "resolutions": "720p,1080p,1440p", "kernels": "dense,aligned,exact", "heads": "10",
            "folder": "outputs/aot_estimates"}  # fmt: skip
ROUTES = {"spatial": (0, 0), "temporal": (1, 1), "mixed": (0, 1)}  # patterns of even and odd heads


def main(argv: list[str]) -> int:
  if argv and argv[0] in ("-h", "--help"):
    print(__doc__)
    return 0
  given = dict(arg.split("=", 1) if "=" in arg else (arg, "") for arg in argv)
  if unknown := (set(given) - set(DEFAULTS)):
    print(f"error: {', '.join(sorted(unknown))}: the arguments are {'=, '.join(DEFAULTS)}=", file=sys.stderr)
    return 2
  options = DEFAULTS | given
  chips, resolutions, kernels = (options[key].split(",") for key in ("chips", "resolutions", "kernels"))
  for key, values, known in (("chips", chips, CHIPS), ("resolutions", resolutions, GRIDS), ("kernels", kernels, KERNELS)):
    if wrong := [v for v in values if v not in known]:
      print(f"error: {key}={','.join(wrong)}: known are {', '.join(known)}", file=sys.stderr)
      return 2
  heads, folder = int(options["heads"]), pathlib.Path(options["folder"]).expanduser()
  asked = [(resolution, tuned_case(chip, resolution, kernel, heads))
           for chip in chips for resolution in resolutions for kernel in kernels]  # fmt: skip
  lines, failures = [], []
  for resolution, case in asked:
    what = f"{case.chip} {resolution} {case.kernel} {case.block_q} x {case.block_kv}"
    try:
      with aloud(f"{'found' if stored_parts(case, folder) else 'compiling'} {what}"):
        compiled = compile_parts(case, folder)
    except EstimateError as error:
      failures.append(f"FAILED {what}: {error}")
      continue
    lines += table_lines(resolution, case, compiled)
  head = (f"{'chip':6s} {'video':6s} {'kernel':8s} {'heads':9s} {'tiles':>12s} {'ms':>8s} {'MXU':>6s} {'steps':>7s} "
          f"{'idle':>5s} {'compiled':>9s}")
  print(f"\nAOT estimates (not measured): {heads} heads of 128, bfloat16, 81 frames, density .35, one core of a chip")
  print("\n".join([head, "-" * len(head), *lines, *failures]))
  return 1 if failures else 0


def tuned_case(chip: str, resolution: str, kernel: str, heads: int) -> KernelCase:
  """A kernel with its tuned tiles at one of GRIDS."""
  grid = GRIDS[resolution]
  S = grid[0] * grid[1] * grid[2]
  tiles = tuned_tiles(chip, kernel, S, S)
  return KernelCase(chip, kernel, grid, heads, tiles.block_q, tiles.block_kv, tiles.tiling.chunk, tiles.masked_chunk,
                    tiles.tiling.unroll, half_width=half_width(0.35, S))  # fmt: skip


def table_lines(resolution: str, case: KernelCase, compiled: dict) -> list[str]:
  """The table's lines of one compiled case, one for each kind of routing."""
  lines = []
  for name, patterns in ROUTES.items():
    if case.kernel == "dense" and name != "spatial":
      continue
    result = evaluate(case, compiled, [patterns[h % 2] for h in range(case.heads)])
    busy = "" if result.mxu_busy is None else f"{result.mxu_busy:.1%}"
    lines.append(
        f"{case.chip:6s} {resolution:6s} {case.kernel:8s} {'-' if case.kernel == 'dense' else name:9s} "
        f"{f'{case.block_q} x {case.block_kv}':>12s} {three_digits(result.milliseconds):>8s} {busy:>6s} "
        f"{result.steps:7d} {result.idle_steps:5d} {result.compile_seconds:7.0f} s")
  return lines


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
