"""Compiles a configuration's denoising steps for a TPU topology, without a TPU: dry_run=true compile_topology=v6e:2x4.

What is lowered is exactly what decode runs, `pipeline.denoise` with its kernels, on a mesh of the topology's devices;
only shapes stand in for the arrays. It shows that a recipe compiles, and what a device must hold.
"""

import dataclasses
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from MaxText.parallel import sharding
from MaxText.parallel.memory import GIB
from MaxText.parallel.topology import account


@dataclasses.dataclass(frozen=True)
class CompiledStep:
  """One program of the loop. Bytes are those of one device, by the compiler's own account.

  Attributes:
    kind: 'dense', or 'density 0.35'.
    arguments: weights, latents and the text's keys and values. peak: the most that is alive at once.
    kernels: names of the Pallas kernels inside.
  """

  kind: str
  seconds: float
  arguments: int
  peak: int
  kernels: tuple[str, ...]


def compile_steps(pipeline) -> Iterator[CompiledStep]:
  """Compiles one program for dense steps and one a density, each as the first step of its kind would run it."""
  chosen = {}
  for step in pipeline.steps:
    chosen.setdefault((step.guided, step.sparse and step.sparse.half_width), step)
  for step in chosen.values():
    yield _compile(pipeline, step)


def _compile(pipeline, step) -> CompiledStep:
  config, placement = pipeline.config, pipeline.placement
  graphdef, abstract = nnx.split(nnx.eval_shape(pipeline._make_expert))
  weights = sharding.sharded_abstract(abstract, placement)
  noise = jax.ShapeDtypeStruct((config.batch_size, *config.latent_grid, config.in_channels), jnp.float32)
  state = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placement.replicated),
    jax.eval_shape(pipeline.solver.init, noise))
  texts = config.batch_size * (1 + step.guided)
  text = jax.ShapeDtypeStruct((texts, config.text_length, config.text_dim), jnp.float32)
  layers = np.zeros(config.num_layers, bool)
  arguments = (weights, state, pipeline.solver.row(step.index), np.float32(step.timestep), np.float32(step.guidance),
               pipeline.abstract_text_keys_values(graphdef, weights, text), layers)
  key = pipeline._program_key(graphdef, step, None, config.batch_size)
  seconds = pipeline._compile(key, step, arguments)
  found = account(pipeline._programs[key])
  return CompiledStep(
    kind="dense" if step.sparse is None else f"density {step.sparse.density}",
    seconds=seconds, arguments=found.arguments, peak=found.peak, kernels=found.kernels)


def describe(compiled: Iterable[CompiledStep], topology: str) -> Iterator[str]:
  """Lines for a dry run, each as soon as its step is compiled."""
  for c in compiled:
    yield (f"compiled for {topology} in {c.seconds:.0f} s, not run: denoising step ({c.kind}), peak memory a device "
           f"{c.peak / GIB:.2f} GiB, of it {c.arguments / GIB:.2f} weights, latents and text (the compiler's account); "
           f"Pallas kernels: {', '.join(c.kernels) or 'none'}")
  yield "dry run: nothing was loaded or written"
