"""The work beside the kernel that brings a temporal head's tokens into its order: two ways, for the layout ablation.

  head_local  permute q, k and v once (a transposition and a select), restore the output: svg_layout=head_local
  in_kernel   every head gathers its rows by index and scatters its output: svg_layout=in_kernel

Measured on a TPU. Ahead of time XLA's own `estimated_cycles` are added up: for plain memory traffic they are
pessimistic (about 2.5 times what HBM bandwidth gives on v6e), and for gathers there are none: an error here, not a zero.

Legend: S tokens, N heads, D head dim; arrays are [1, S, N, D], of one head [S, D].
"""

import json
import re
import sys

LAYOUTS = ("head_local", "in_kernel")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


def layout_work(case, layout_name: str):
  """(function, shapes of its arguments, how often one launch runs it) for a KernelCase."""
  import jax
  import jax.numpy as jnp
  import numpy as np

  from MaxText.attention.svg import layout
  from MaxText.attention.svg.masks import HeadMask, key_order, query_order

  S, frames, bf16 = case.num_tokens, case.grid[0], jnp.bfloat16
  mask = HeadMask(case.grid, case.half_width, True, case.sink_frames, case.sink)

  def permute(q, k, v, out, temporal_BN):
    laid_out = layout.to_position_major(q, frames), layout.to_key_order(k, mask), layout.to_key_order(v, mask)
    chosen = (layout.select_heads(temporal_BN, p, x) for p, x in zip(laid_out, (q, k, v), strict=True))
    return *chosen, layout.select_heads(temporal_BN, layout.to_frame_major(out, frames), out)

  def gather(q, k, v, out, kind, query_2S, key_2S):
    rows, keys = query_2S[kind], key_2S[kind]
    return q[rows], k[keys], v[keys], jnp.zeros_like(out).at[rows].set(out, unique_indices=True)

  if layout_name == "head_local":
    every = jax.ShapeDtypeStruct((1, S, case.heads, case.head_dim), bf16)
    return permute, (every,) * 4 + (jax.ShapeDtypeStruct((1, case.heads), jnp.bool_),), 1
  one = jax.ShapeDtypeStruct((S, case.head_dim), bf16)
  orders = (jnp.asarray(np.stack([np.arange(S), order(mask)]), jnp.int32) for order in (query_order, key_order))
  return gather, (one,) * 4 + (jax.ShapeDtypeStruct((), jnp.int32), *orders), case.heads


def estimated_cycles(hlo: str) -> int:
  """Sum of XLA's cycles over the scheduled operations.

  Raises:
    ValueError: a gather or scatter, which XLA gives no cycles.
  """
  if re.search(r"\b(gather|scatter)\(", hlo):
    raise ValueError("XLA estimates no cycles for gathers and scatters: measure this on a TPU")
  return sum(int(n) for n in _CYCLES.findall(hlo))


def main(argv: list[str]) -> None:
  """Child process: compiles one layout for the case's chip, prints its cycles."""
  import jax
  from jax.experimental import topologies
  from jax.sharding import SingleDeviceSharding

  from MaxText.attention.aot_estimate.case import CHIPS, KernelCase

  request = json.loads(argv[0])
  name, request["grid"] = request.pop("layout"), tuple(request["grid"])
  case = KernelCase(**request)
  function, args, times = layout_work(case, name)
  topology = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[case.chip].topology)
  sharding = SingleDeviceSharding(topology.devices[0])
  shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args]
  run = jax.jit(function, in_shardings=sharding, out_shardings=sharding)
  print(json.dumps(estimated_cycles(run.lower(*shapes).compile().as_text()) * times))


if __name__ == "__main__":
  main(sys.argv[1:])
