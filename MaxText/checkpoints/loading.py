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
from flax import nnx

from MaxText.checkpoints import names, tensor_files
from MaxText.checkpoints.tensor_files import StoredTensor

IN_FLIGHT_BYTES = 512 << 20

Progress = Callable[[int, int], None]


def place(
  rows: tuple[names.Tensor, ...],
  stored: Mapping[names.Tensor, StoredTensor],
  abstract_state: nnx.State,
  progress: Progress | None = None,
) -> nnx.State:
  """Reads `stored` tensors into a state like `abstract_state`.

  Args:
    rows: the table of names of the component.
    stored: where the numbers of each row lie.
    abstract_state: leaves of ShapeDtypeStruct; a leaf's `sharding` says where it goes, None is the default device. It may
      hold a part of the component (the decoder of a VAE, say); only that part is read.
    progress: called with (bytes done, bytes in all), counted as they lie in the files.

  Returns:
    A state of the same structure holding jax.Arrays.

  Raises:
    ValueError: the state has a leaf that the table does not know, or of another shape.
  """
  slots = {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(abstract_state)}
  targets = {path: variable.get_value() for path, variable in slots.items()}
  check_shapes(rows, targets)
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
  return nnx.from_flat_state([(path, variable.replace(arrays[".".join(map(str, path))]))
                              for path, variable in nnx.to_flat_state(abstract_state)])


def check_shapes(rows: tuple[names.Tensor, ...], targets: Mapping[str, jax.ShapeDtypeStruct]):
  """Raises ValueError unless every target is in the table, with its shape and as many layers."""
  shapes, layers = {}, {}
  for row in rows:
    layers[row.path] = None if row.layer is None else row.layer + 1
    shapes[row.path] = row.our_shape if row.layer is None else (row.layer + 1, *row.our_shape)
  wrong = [f"{path}: {tuple(target.shape)}, the table says {shapes.get(path, 'no such parameter')}"
           for path, target in targets.items() if shapes.get(path) != tuple(target.shape)]
  if wrong:
    raise ValueError("the model and the table of names disagree:\n  " + "\n  ".join(wrong))


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
