"""The work beside the attention kernel: routing the heads, and bringing the tokens of temporal heads into their order.

  routing        64 sampled queries of every head under no mask and under both masks (svg/routing_kernel.py)
  layout         svg_layout=head_local: q, k and v permuted and the output restored, each by one kernel (layout_kernel.py)
  select         the same by XLA's transposition and select, for frames that the kernel cannot split
  in_kernel      svg_layout=in_kernel: every head gathers its rows by index and scatters its output
  pre_exchange   svg_layout=pre_exchange: the same order before the exchange between devices: tokens cross devices

Measured on a TPU, all but the last (`exchanged_bytes`), which needs several chips. Ahead of time: the bundles of Pallas
kernels at every grid step (bodies that only some steps run included: an upper bound), XLA's own `estimated_cycles` for
the rest (pessimistic for plain memory traffic), and never less than the bytes that must move take at HBM bandwidth. XLA
has no cycles for gathers and collectives: those works get no time, only the bytes that they move.

All arrays come heads first, [B, N, S, D], as attention kernels want them: bringing them into that form is not counted.

Legend: B batch (1), S tokens, N heads, D head dim.
"""

import dataclasses
import json
import os
import pathlib
import re
import sys
from collections.abc import Callable

from MaxText.attention.aot_estimate.case import CHIPS, KernelCase
from MaxText.attention.aot_estimate.compile import FLAGS
from MaxText.attention.aot_estimate.parts import EstimateError
from MaxText.attention.aot_estimate.schedule import read_schedule

WORKS = ("routing", "layout", "select", "in_kernel")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Work:
  """A jittable function on one device, and what an estimate has to know of it.

  Attributes:
    args: shapes of the arguments (or arrays).
    times: how often one launch of attention runs it.
    bytes_moved: HBM traffic of all of it: each array is read and written this often and no oftener.
    kernels: Pallas kernels by name: (launches, grid steps of each).
    no_estimate: why nothing estimates its time ahead of time; empty where something does.
  """

  function: Callable
  args: tuple
  times: int
  bytes_moved: int
  kernels: dict[str, tuple[int, int]]
  no_estimate: str = ""


def work_of(case: KernelCase, name: str, num_sampled_queries: int = 64) -> Work:
  """The work called `name` (one of WORKS) beside the launch `case`; routing looks at that many queries of a head.

  Raises:
    EstimateError: the layout kernel cannot split these frames.
  """
  import jax
  import jax.numpy as jnp

  from MaxText.attention.svg.masks import HeadMask

  every = jax.ShapeDtypeStruct((case.heads, case.num_tokens, case.head_dim), jnp.bfloat16)
  flags = jax.ShapeDtypeStruct((case.heads,), jnp.bool_)
  mask = HeadMask(case.grid, case.half_width, True, case.sink_frames, case.sink)
  array_bytes = 2 * case.heads * case.num_tokens * case.head_dim
  if name == "routing":
    return _routing(case, every, array_bytes, num_sampled_queries)
  return {"layout": _layout, "select": _select, "in_kernel": _in_kernel}[name](
      case, mask, every, flags, array_bytes)


def _routing(case, every, array_bytes, num_sampled_queries) -> Work:
  from MaxText.attention.svg import SvgAttention, routing_kernel

  svg = SvgAttention(
      case.half_width, case.sink_frames, case.sink, num_sampled_queries, kernel=case.kernel, block_q=case.block_q,
      block_kv=case.block_kv, backend="pallas", chip=case.chip)  # fmt: skip

  def route(*qkv_HSD):
    return svg.route(*(x[None].transpose(0, 2, 1, 3) for x in qkv_HSD), case.grid)

  chunk = min(routing_kernel.CHUNK, -(-case.num_tokens // routing_kernel.LANES) * routing_kernel.LANES)
  steps = case.heads * -(-case.num_tokens // chunk)
  return Work(route, (every,) * 3, 1, 2 * array_bytes, {"svg_route": (1, steps)})  # keys and values once


def _layout(case, mask, every, flags, array_bytes) -> Work:
  from MaxText.attention.svg import layout_kernel

  frames, sunk, positions = case.grid[0], mask.leading_frames, case.grid[1] * case.grid[2]
  width = layout_kernel.block_width(frames, positions)
  if not width:
    raise EstimateError(f"{positions} positions have no aligned block, so XLA's select does this work")

  def permute(q, k, v, out, temporal):
    moved = (layout_kernel.permute(x, temporal, case.grid, s) for x, s in ((q, 0), (k, sunk), (v, sunk)))
    return *moved, layout_kernel.permute(out, temporal, case.grid, back=True)

  launches = (4, case.heads * (positions // width))
  return Work(permute, (every,) * 4 + (flags,), 1, 8 * array_bytes, {"svg_permute": launches})


def _select(case, mask, every, flags, array_bytes) -> Work:
  import jax.numpy as jnp

  from MaxText.attention.svg import layout

  def select(q, k, v, out, temporal):
    permuted = (layout.to_position_major(q, case.grid[0]), *(layout.to_key_order(x, mask) for x in (k, v)),
                layout.to_frame_major(out, case.grid[0]))  # fmt: skip
    return tuple(jnp.where(temporal[:, None, None], p, x) for p, x in zip(permuted, (q, k, v, out), strict=True))

  # Heads are the leading axis here, where `layout` expects samples.
  return Work(select, (every,) * 4 + (flags,), 1, 12 * array_bytes, {})


def _in_kernel(case, mask, every, flags, array_bytes) -> Work:
  import jax
  import jax.numpy as jnp
  import numpy as np

  from MaxText.attention.svg.masks import key_order, query_order

  def gather(q, k, v, out, kind, query_2S, key_2S):
    rows, keys = query_2S[kind], key_2S[kind]
    return q[rows], k[keys], v[keys], jnp.zeros_like(out).at[rows].set(out, unique_indices=True)

  one = jax.ShapeDtypeStruct((case.num_tokens, case.head_dim), jnp.bfloat16)
  orders = (jnp.asarray(np.stack([np.arange(case.num_tokens), order(mask)]), jnp.int32)
            for order in (query_order, key_order))  # fmt: skip
  arguments = (one,) * 4 + (jax.ShapeDtypeStruct((), jnp.int32), *orders)
  return Work(gather, arguments, case.heads, 9 * array_bytes, {},  # the scatter's zeros are a write more
              no_estimate="XLA estimates no cycles for gathers and scatters, measure this on a TPU")


def estimated_cycles(hlo: str) -> int:
  """Sum of XLA's cycles over the scheduled operations."""
  return sum(int(n) for n in _CYCLES.findall(hlo))


def exchanged_bytes(case: KernelCase, ways: int) -> tuple[int, int]:
  """Bytes that a device receives over the interconnect for one attention, with head_local and with pre_exchange.

  head_local exchanges q, k, v and the output once. pre_exchange has to exchange q, k and v for the routes first, and each
  of the four permutations brings a device tokens of all frames, at least (ways - 1) / ways of them from other devices.
  """
  away = 2 * case.heads * case.num_tokens * case.head_dim * (ways - 1) // ways  # of one array
  return 4 * away, (4 + 3 + 4) * away


def kernel_cycles(dump: pathlib.Path, kernels: dict[str, tuple[int, int]]) -> int:
  """Cycles of the named Pallas kernels when every grid step runs all of the body: an upper bound.

  Raises:
    EstimateError: a kernel without a schedule, or with a loop inside the grid's, whose trips nothing here knows.
  """
  total = 0
  for name, (launches, steps) in kernels.items():
    files = [f for f in dump.rglob(f"*{name}*final_bundles.txt") if "schedule-analysis" not in f.name]
    if not files:
      raise EstimateError(f"libtpu dumped no schedule named {name!r}")
    total += launches * max(_launch_cycles(read_schedule(f), steps, name) for f in files)
  return total


def _launch_cycles(root, steps: int, name: str) -> int:
  loops = [r for r in root.children if r.kind == "loop"]
  if len(loops) != 1 or any(r.kind == "loop" for r in loops[0].walk() if r is not loops[0]):
    raise EstimateError(f"the schedule of {name} is not one loop over the grid without loops inside")
  inside = sum(r.bundles for r in loops[0].walk())
  return steps * inside + sum(r.bundles for r in root.walk()) - inside


def milliseconds(case: KernelCase, work: Work, cycles: int) -> float:
  """Time of the work: its cycles, but no less than its bytes take."""
  chip = CHIPS[case.chip]
  return max(cycles / chip.clock_hz, work.bytes_moved / chip.hbm_bytes_per_s) * 1e3


def compile_work(case: KernelCase, name: str, num_sampled_queries: int, dump: pathlib.Path) -> int:
  """Cycles of a work for the case's chip; in the child process, with libtpu's flags in the environment."""
  import jax
  from jax.experimental import topologies
  from jax.sharding import SingleDeviceSharding

  work = work_of(case, name, num_sampled_queries)
  topology = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[case.chip].topology)
  sharding = SingleDeviceSharding(topology.devices[0])
  shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in work.args]
  hlo = jax.jit(work.function, in_shardings=sharding, out_shardings=sharding).lower(*shapes).compile().as_text()
  return work.times * estimated_cycles(hlo) + kernel_cycles(dump, work.kernels)


def main(argv: list[str]) -> None:
  """Child process: compiles one work for the case's chip, prints its cycles."""
  request, dump = json.loads(argv[0]), pathlib.Path(argv[1])
  os.environ["LIBTPU_INIT_ARGS"] = FLAGS.format(dump)
  name, samples, request["grid"] = request.pop("work"), request.pop("num_sampled_queries"), tuple(request["grid"])
  print(json.dumps(compile_work(KernelCase(**request), name, samples, dump)))


if __name__ == "__main__":
  main(sys.argv[1:])
