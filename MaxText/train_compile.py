"""Compiles the training step for a TPU slice, without a TPU: train's own command, and compile_topology=v6e:4x4 added.

What is compiled is exactly what train runs: the same template, recipe and jitted step, on a mesh of the slice's devices.
Only shapes stand in for weights, optimizer and batches; nothing is loaded, run or written. Reads top to bottom:
configuration → the slice's mesh → shapes → one compiled step for every size of clips → its account.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from MaxText import pyconfig
from MaxText.config_types import RunError
from MaxText.reporter import Reporter, seconds_in_words

if TYPE_CHECKING:
  from MaxText.parallel.topology import Account


@pyconfig.run_main
def main(argv: list[str]) -> None:
  config = pyconfig.initialize(argv, "train_compile")
  reporter = Reporter(config.log_format)
  if config.log_format == "text":
    config.print_config()
  import jax  # only once the configuration is right

  from MaxText.parallel import memory, sharding, topology
  from MaxText.parallel import mesh as mesh_lib
  from MaxText.training import batches, metrics, state, step

  # --- the slice
  with pyconfig.input_errors():
    devices = topology.topology_devices(config.compile_topology)
    placement = sharding.Placement(mesh_lib.make_mesh(config, devices), sharding.parse_rules(config.logical_axis_rules))
    batches.check_mesh(config, placement)
    recipe = step.make_recipe(config, placement)
  mesh, device_kind = placement.mesh, placement.mesh.devices.flat[0].device_kind
  reporter.info(mesh_lib.describe(mesh))

  # --- what train would hold
  template, optimizer = state.make_template(config, placement), state.make_optimizer(config)
  if config.debug_sharding:
    reporter.info(sharding.debug_sharding(template.abstract_state(template.variables)))
  with pyconfig.input_errors():
    sharding.check_sharded_enough(template.abstract_state(template.variables), placement, config.sharding_tolerance)
  if config.train_target != "vae":
    reporter.info(f"attention: {recipe.objective.attention.describe()}")
  abstract, kept = state.make_abstract_state(config, template, optimizer, placement), template.abstract(template.kept)
  empty = batches.abstract_empty_prompt(config, placement)
  train_step = step.jit_train_step(template, optimizer, recipe, abstract, placement)

  # --- one program for every size
  too_large = []
  for batch in batches.abstract_batches(config, placement):
    size = ", ".join(f"{name} {list(value.shape)}" for name, value in batch.items())
    reporter.info(f"compiling for {config.compile_topology}: {size} …")
    began = time.perf_counter()
    try:
      with jax.set_mesh(mesh):
        program = train_step.lower(abstract, kept, batch, empty).compile()
    except jax.errors.JaxRuntimeError as error:
      refusal = refused(error)
      if "hbm" not in refusal:
        raise RunError(f"the compiler refuses this step: {refusal}") from error
      reporter.info(f"does not fit: {refusal}")
      too_large.append(size)
      continue
    seconds, found = time.perf_counter() - began, topology.account(program)
    parts = {"weights": (abstract.weights, kept), "optimizer": abstract.optimizer, "EMA": abstract.ema, "batch": batch}
    reporter.info(f"compiled in {seconds_in_words(seconds)}; nothing was run: what follows is the compiler's account")
    for line in describe(found, {name: memory.device_bytes(part) for name, part in parts.items()}, device_kind):
      reporter.info(line)
    reporter.info(describe_flops(metrics.batch_flops(config, batch) / mesh.size, device_kind))
    if found.peak > metrics.HBM_GIB.get(device_kind, math.inf) * memory.GIB:
      too_large.append(size)
  if too_large:
    raise RunError(f"the step does not fit a device's memory for {'; '.join(too_large)}: lower global_batch_size, raise "
                   "gradient_accumulation_steps, set remat_policy=full, or spread one video over "
                   "ici_context_parallelism, weights over ici_fsdp_parallelism, or all over a larger slice")


def describe(found: Account, parts: Mapping[str, int], device_kind: str) -> Iterator[str]:
  """Lines on memory, kernels and collectives of a compiled step.

  Args:
    parts: name → bytes of a device's share of the arguments.
  """
  from MaxText.parallel import hlo
  from MaxText.parallel.memory import GIB
  from MaxText.training.metrics import HBM_GIB

  memory, peak = HBM_GIB.get(device_kind), found.peak / GIB
  verdict = (f"how much a {device_kind} has is not known here" if memory is None else
             f"{'fits' if peak <= memory else 'does not fit'}: a device of {device_kind} has {memory:g}")
  yield f"memory a device: peak {peak:.2f} GiB ({verdict})"
  named = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items() if size)
  yield f"  arguments {found.arguments / GIB:.2f} GiB (without the layout's padding: {named})"
  yield f"  temporary {found.temporary / GIB:.2f} GiB: activations, gradients and gathered weights"
  yield f"Pallas kernels: {', '.join(found.kernels) or 'none'}"
  counts = hlo.count(hlo.collectives(found.text))
  collectives = ", ".join(f"{number} {kind}" for kind, number in sorted(counts.items()))
  yield f"collectives: {collectives or 'none'}" + (" (one in a loop over layers counts once)" if counts else "")


def describe_flops(flops: float, device_kind: str) -> str:
  """flops: of a device and step, by our count."""
  from MaxText.training.metrics import PEAK_TFLOPS

  line = f"TFLOP a device and step: {flops / 1e12:.4g} (our count, without what remat computes again)"
  peak = PEAK_TFLOPS.get(device_kind)
  if peak is not None:
    line += f"; at least {seconds_in_words(flops / peak / 1e12)} a step at the chip's {peak:g} TFLOP/s"
  return line


def refused(error: Exception) -> str:
  """What the compiler says, without the list of its buffers."""
  lines = [line.strip() for line in str(error).splitlines() if line.strip()]
  return " ".join(lines[:2])[:400]


if __name__ == "__main__":
  sys.exit(main())
