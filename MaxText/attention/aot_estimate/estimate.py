"""Cycles of a compiled kernel: bundles of each part x how often the launched step list runs it / the chip's clock."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from MaxText.attention.aot_estimate.case import CHIPS, KernelCase
from MaxText.attention.aot_estimate.schedule import Region
from MaxText.attention.kernels.block_sparse import KernelTiling
from MaxText.attention.kernels.steps import StepPlan, leading_equal, split

# A region that is matched to no part (address arithmetic, copies that the pipeline starts and waits for) is counted as
# often as the region around it. A larger one is an error: something in the kernel would be counted wrongly.
SMALL_REGION = 160


class EstimateError(ValueError):
  """A schedule that does not fit the kernel's source, or a compiler that failed."""


def kernel_parts(root: Region, plan: StepPlan, tiling: KernelTiling) -> list[dict]:
  """The kernel's regions with the part of the source each belongs to, in program order.

  Parts: step (every grid step), start and finish (every query tile), full, one_edge (+ _chunks) and again (+ _chunks):
  the bodies of a tile without a mask, with one edge, and with the whole mask or done again.

  Raises:
    EstimateError: a region without a place, or a part without a region.
  """
  loops = [r for r in root.children if r.kind == "loop" and any(x.ops["matmul"] for x in r.walk())]
  if len(loops) != 1:
    raise EstimateError(f"{len(loops)} loops with matrix products at the top of the kernel: one, the grid's, is expected")
  grid = loops[0]
  names: dict[int, str] = {}
  bodies = []
  for region in grid.walk():
    if region.ops["matmul"] and region.ops["exp"]:
      bodies.append(region)
    elif region.ops["matmul"]:
      names[id(region)] = "start"
    elif region.ops["reciprocal"]:
      names[id(region)] = "finish"
  bodies.sort(key=lambda r: r.start)
  expected = []
  if plan.any_full:
    sizes = split(plan.block_kv, tiling.chunk)
    looped = 0 if tiling.unroll else leading_equal(sizes)
    expected += (["full_chunks"] if looped else []) + (["full"] if looped < len(sizes) else [])
  expected += ["one_edge_chunks"] if plan.any_one_edge else []
  expected += ["again_chunks"]
  if len(bodies) != len(expected) or sorted(names.values()) != ["finish", "start"]:
    raise EstimateError(
        f"the schedule has {len(bodies)} attention bodies and parts {sorted(names.values())}; "
        f"expected {expected}, one start and one finish")
  names |= {id(r): n for r, n in zip(bodies, expected, strict=True)}

  parts = []
  def visit(region: Region, inherited: str) -> None:
    inside = {names[id(r)] for r in region.walk() if id(r) in names}
    if id(region) in names:
      name = names[id(region)]
    elif inside and all(n.startswith("again") for n in inside):
      name = "again"
    elif inside and all(n.startswith(("one_edge", "full")) for n in inside) and len({n[:4] for n in inside}) == 1:
      name = "one_edge" if inside == {"one_edge_chunks"} else "full"
    else:
      name = inherited
      if not inside and region.bundles > SMALL_REGION:
        raise EstimateError(f"a region of {region.bundles} bundles under {inherited!r} belongs to no part of the kernel")
    parts.append({"part": name, "bundles": region.bundles, "matmul": region.ops["matmul"]})
    for child in region.children:
      visit(child, name)

  visit(grid, "step")
  outside = root.bundles + sum(r.bundles for c in root.children if c is not grid for r in c.walk())
  parts.append({"part": "launch", "bundles": outside, "matmul": 0})
  return parts


def executions(plan: StepPlan, patterns: list[int], tiling: KernelTiling, redone: float = 0.0) -> dict[str, float]:
  """How often each part runs when the heads follow `patterns` and a share `redone` of the active steps runs again."""
  total: dict[str, float] = {}
  for pattern in patterns:
    for name, n in plan.counts(pattern).items():
      total[name] = total.get(name, 0) + n
  chunks = -(-plan.block_kv // plan.masked_chunk)
  return {
      "launch": 1,
      "step": total["steps"],
      "start": total["query_tiles"],
      "finish": total["query_tiles"],
      "full": total["full"],
      "full_chunks": total["full"] * leading_equal(split(plan.block_kv, tiling.chunk)),
      "one_edge": total["one_edge"],
      "one_edge_chunks": total["one_edge_chunks"],
      "again": total["both_edges"] + redone * total["active"],
      "again_chunks": total["both_edges_chunks"] + redone * total["active"] * chunks,
  }


@dataclasses.dataclass(frozen=True)
class Estimate:
  """Time of one launch as the compiler's schedule has it. `label` belongs beside every number taken from here."""

  milliseconds: float
  hbm_milliseconds: float
  mxu_busy: float | None
  steps: int
  idle_steps: int
  cycles_of_parts: dict[str, float]
  compile_seconds: float
  label: str = "AOT estimate"


def compile_parts(case: KernelCase, timeout_s: float = 3600) -> dict:
  """Compiles the case in a child process; {"seconds", "parts", "temp_bytes"}.

  Raises:
    EstimateError: libtpu is missing, refuses the kernel, or its schedule does not match.
  """
  with tempfile.TemporaryDirectory(prefix="aot_estimate_") as dump:
    what = f"{case.kernel} with tiles of {case.block_q} x {case.block_kv} for {case.chip}"
    return _child("compile", [json.dumps(dataclasses.asdict(case)), dump], what, timeout_s)


def layout_milliseconds(case: KernelCase, layout: str, timeout_s: float = 3600) -> float:
  """Time that `layout` (layouts.LAYOUTS) adds to one launch by XLA's cycle counts."""
  request = json.dumps(dataclasses.asdict(case) | {"layout": layout})
  return _child("layouts", [request], f"layout {layout}", timeout_s) / CHIPS[case.chip].clock_hz * 1e3


def _child(module: str, arguments: list[str], what: str, timeout_s: float):
  """Runs a module of this package in a process of its own, and reads the JSON of its last line."""
  environment = os.environ | {
      "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
      "TPU_STDERR_LOG_LEVEL": "3", "TF_CPP_MIN_LOG_LEVEL": "3",
  }  # fmt: skip
  command = [sys.executable, "-m", f"MaxText.attention.aot_estimate.{module}", *arguments]
  root = pathlib.Path(__file__).resolve().parents[3]
  child = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root, timeout=timeout_s)
  if child.returncode:
    lines = [line for line in child.stderr.strip().splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line or "EXHAUSTED" in line]
    raise EstimateError(f"{what}: {(telling or lines or ['no message'])[-1][:600]}")
  return json.loads(child.stdout.strip().splitlines()[-1])


def evaluate(case: KernelCase, compiled: dict, patterns: list[int] | None = None, redone: float = 0.0) -> Estimate:
  """Turns compiled parts into time for heads that follow `patterns` (default: all pattern 0)."""
  plan, chip = case.plan(), CHIPS[case.chip]
  patterns = [0] * case.heads if patterns is None else patterns
  runs = executions(plan, patterns, case.tiling(), redone)
  cycles: dict[str, float] = {}
  matmuls = 0.0
  for part in compiled["parts"]:
    cycles[part["part"]] = cycles.get(part["part"], 0.0) + part["bundles"] * runs[part["part"]]
    matmuls += part["matmul"] * runs[part["part"]]
  total = sum(cycles.values())
  counts = [plan.counts(p) for p in patterns]
  active = sum(c["active"] for c in counts)
  moved = active * 2 * case.block_kv * 128 * 2 + 2 * case.heads * case.num_tokens * 128 * 2
  hbm = moved / chip.hbm_bytes_per_s
  return Estimate(
      milliseconds=max(total / chip.clock_hz, hbm) * 1e3,
      hbm_milliseconds=hbm * 1e3,
      mxu_busy=None if chip.mxu_cycles is None else matmuls * chip.mxu_cycles / total,
      steps=sum(c["steps"] for c in counts),
      idle_steps=sum(c["steps"] - c["active"] for c in counts),
      cycles_of_parts=cycles,
      compile_seconds=compiled["seconds"],
  )


def estimate(case: KernelCase, patterns: list[int] | None = None, redone: float = 0.0) -> Estimate:
  """Compiles and evaluates one case."""
  return evaluate(case, compile_parts(case), patterns, redone)
