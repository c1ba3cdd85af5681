"""Puts the weights of a folder into their places, shard by shard.

A tensor is read once, only the part that this host needs and already in the target type. A leaf of its own goes straight
to its sharding. A layer of a stacked leaf goes to the sharding of one layer and is written into the stacked array on the
devices by a compiled update that reuses the array's memory, so no host ever holds a stack. The layout is changed by that
program too, on the devices.

Memory on the host beyond the placed arrays: the tensor being read, one block of the file, and at most IN_FLIGHT_BYTES of
tensors whose transfer has not finished.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from MaxText.checkpoints import names, tensor_files
from MaxText.checkpoints.tensor_files import StoredTensor

IN_FLIGHT_BYTES = 512 << 20

Progress = Callable[[int, int], None]


def read_into(
  rows: tuple[names.Tensor, ...],
  stored: Mapping[names.Tensor, StoredTensor],
  targets: Mapping[str, jax.ShapeDtypeStruct],
  progress: Progress | None = None,
) -> dict[str, jax.Array]:
  """Reads `stored` tensors into the leaves that `targets` describes.

  Args:
    rows: the table of names of the component.
    stored: where the numbers of each row lie.
    targets: path -> shape, type and sharding (None: the first local device). It may be a part of the component (the
      decoder of a VAE, say); only that part is read.
    progress: called with (bytes done, bytes in all), counted as they lie in the files.

  Returns:
    path -> array, for the paths of `targets`.
  """
  # Files are read front to back.
  wanted = sorted((row for row in rows if row.path in targets), key=lambda row: (stored[row].file, stored[row].offset))
  total = sum(stored[row].nbytes for row in wanted)
  arrays = _zeros({path: targets[path] for path in dict.fromkeys(row.path for row in wanted if row.layer is not None)})
  done = pending = 0
  for row in wanted:
    target = targets[row.path]
    sharding = _sharding(target)
    if row.layer is None:
      array = arrays[row.path] = _read_alone(row, stored[row], target.dtype, sharding)
    else:
      array = _read_part(row.shape, stored[row], target.dtype, _their_sharding(row, sharding))
      write = _layer_writer(row.order, row.our_shape, sharding)
      arrays[row.path] = write(arrays[row.path], array, np.int32(row.layer))
    pending += array.nbytes
    if pending > IN_FLIGHT_BYTES:
      jax.block_until_ready(list(arrays.values()))
      pending = 0
    done += stored[row].nbytes
    if progress is not None:
      progress(done, total)
  return arrays


def _sharding(target: jax.ShapeDtypeStruct) -> jax.sharding.Sharding:
  return target.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def _their_sharding(row: names.Tensor, sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
  """Sharding of one layer in its file's layout, such that changing the layout moves nothing between devices."""
  if not isinstance(sharding, jax.sharding.NamedSharding):
    return sharding
  spec = tuple(sharding.spec)
  spec = (spec + (None,) * (1 + len(row.our_shape) - len(spec)))[1:]
  theirs = [None] * len(row.shape)
  if len(row.our_shape) == len(row.shape):
    for ours, axis in enumerate(row.order):
      theirs[axis] = spec[ours]
  else:  # [1, 6, E] -> [6, E]
    theirs[len(row.shape) - len(spec) :] = spec
  return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*theirs), memory_kind=sharding.memory_kind)


def _read_part(shape, stored: StoredTensor, dtype, sharding: jax.sharding.Sharding) -> jax.Array:
  """Reads what this host's devices need of a tensor, once, and shares it out among them."""
  bounds = [
    [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
    for index in sharding.addressable_devices_indices_map(tuple(shape)).values()
  ]
  box = tuple(slice(min(b[d][0] for b in bounds), max(b[d][1] for b in bounds)) for d in range(len(shape)))
  part = tensor_files.read(stored, box, dtype)

  def shard(index):
    starts_stops = [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
    return part[tuple(slice(a - b.start, z - b.start) for (a, z), b in zip(starts_stops, box, strict=True))]

  return jax.make_array_from_callback(tuple(shape), sharding, shard)


def _read_alone(row: names.Tensor, stored: StoredTensor, dtype, sharding: jax.sharding.Sharding) -> jax.Array:
  """Reads a tensor that is a leaf by itself. Such shapes are many, so the layout is changed here; nothing is compiled."""
  if row.shape == row.our_shape and row.order == tuple(range(len(row.shape))):
    return _read_part(row.shape, stored, dtype, sharding)
  ours = np.ascontiguousarray(row.to_ours(tensor_files.read(stored, None, dtype)))
  return jax.make_array_from_callback(row.our_shape, sharding, lambda index: ours[index])


def _zeros(targets: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
  """Allocates the stacked leaves, all with one program."""
  make = jax.jit(
    lambda: {path: jnp.zeros(target.shape, target.dtype) for path, target in targets.items()},
    out_shardings={path: _sharding(target) for path, target in targets.items()},
  )
  return make()


@functools.lru_cache(maxsize=256)
def _layer_writer(order: tuple[int, ...], our_shape: tuple[int, ...], sharding: jax.sharding.Sharding):
  """Compiled (stack, tensor in its file's layout, layer) -> stack, in the stack's own memory."""

  def write(stack, tensor, layer):
    return jax.lax.dynamic_update_index_in_dim(stack, tensor.transpose(order).reshape(our_shape), layer, 0)

  return jax.jit(write, donate_argnums=0, out_shardings=sharding)
