"""Child process of an estimate: compiles one case for its topology and prints the kernel's parts as JSON.

  python -m MaxText.attention.aot_estimate.compile '{"chip": "v6e", ...}' DUMP_FOLDER

A process of its own, because libtpu reads LIBTPU_INIT_ARGS once, when it is loaded.
"""

import json
import os
import pathlib
import sys
import time

FLAGS = "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_bundles"


def compile_case(case, dump: pathlib.Path) -> dict:
  """Compiles, and returns {"seconds", "parts", "temp_bytes"}; needs libtpu's flags in the environment."""
  import jax
  import jax.numpy as jnp
  from jax.experimental import topologies
  from jax.sharding import SingleDeviceSharding

  from MaxText.attention.aot_estimate.case import CHIPS
  from MaxText.attention.aot_estimate.parts import kernel_parts
  from MaxText.attention.aot_estimate.schedule import read_schedule
  from MaxText.attention.kernels.block_sparse import block_sparse_attention

  plan, tiling = case.plan(), case.tiling()
  topology = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[case.chip].topology)
  sharding = SingleDeviceSharding(topology.devices[0])
  qkv = jax.ShapeDtypeStruct((case.heads, case.num_tokens, case.head_dim), jnp.bfloat16)
  pattern_H = jax.ShapeDtypeStruct((case.heads,), jnp.int32)
  began = time.time()
  run = jax.jit(
      lambda q, k, v, p: block_sparse_attention(q, k, v, plan, p, tiling=tiling),
      in_shardings=sharding, out_shardings=sharding,
  )  # fmt: skip
  executable = run.lower(qkv, qkv, qkv, pattern_H).compile()
  seconds = time.time() - began
  files = [f for f in dump.rglob(f"*{plan.kernel_name}*final_bundles.txt") if "schedule-analysis" not in f.name]
  if not files:
    raise ValueError(f"libtpu dumped no schedule named {plan.kernel_name!r} into {dump}; its dump flags may have changed")
  root = read_schedule(max(files, key=lambda f: f.stat().st_size))
  memory = executable.memory_analysis()
  return {
      "seconds": seconds,
      "parts": kernel_parts(root, plan, tiling),
      "temp_bytes": int(memory.temp_size_in_bytes) if memory else None,
  }


def main(argv: list[str]) -> None:
  request, dump = json.loads(argv[0]), pathlib.Path(argv[1])
  os.environ["LIBTPU_INIT_ARGS"] = FLAGS.format(dump)
  from MaxText.attention.aot_estimate.case import KernelCase

  request["grid"] = tuple(request["grid"])
  print(json.dumps(compile_case(KernelCase(**request), dump)))


if __name__ == "__main__":
  main(sys.argv[1:])
