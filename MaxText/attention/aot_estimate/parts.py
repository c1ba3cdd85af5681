"""Which region of a compiled kernel's schedule is which part of its source, and how often a launch runs each part."""

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
