"""Puts the weights of a folder into their places, shard by shard.

A few threads read ahead: each tensor once, only the part that this host needs, already in the target type, and handed to
  the devices in our layout (JAX transposes strided arrays faster than numpy would). A leaf of its own is then in its
  place. A layer of a stacked leaf is written into the stacked array on the devices by a compiled update that reuses the
  array's memory, so no host ever holds a stack.

Memory on the host beyond the placed arrays: twice IN_FLIGHT_BYTES of tensors on their way, or the largest tensor if that
  is more.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from MaxText.checkpoints import names, tensor_files
from MaxText.checkpoints.tensor_files import StoredTensor

IN_FLIGHT_BYTES = 256 << 20
READERS = 4

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
  # Files are read front to back. All hosts write the layers in the same order, which compiled programs on many hosts
  # need.
  wanted = sorted((row for row in rows if row.path in targets), key=lambda row: (stored[row].file, stored[row].offset))
  total = sum(stored[row].nbytes for row in wanted)
  arrays = _zeros({path: targets[path] for path in dict.fromkeys(row.path for row in wanted if row.layer is not None)})
  done = unfinished = 0
  with ThreadPoolExecutor(READERS) as pool:
    for row, array in _read_ahead(pool, wanted, stored, targets):
      if row.layer is None:
        arrays[row.path] = array
      else:
        write = _layer_writer(_sharding(targets[row.path]))
        arrays[row.path] = write(arrays[row.path], array, np.int32(row.layer))
      unfinished += array.nbytes
      if unfinished > IN_FLIGHT_BYTES:
        jax.block_until_ready(list(arrays.values()))
        unfinished = 0
      done += stored[row].nbytes
      if progress is not None:
        progress(done, total)
  return arrays


def _read_ahead(
  pool: ThreadPoolExecutor,
  wanted: Sequence[names.Tensor],
  stored: Mapping[names.Tensor, StoredTensor],
  targets: Mapping[str, jax.ShapeDtypeStruct],
) -> Iterator[tuple[names.Tensor, jax.Array]]:
  """Yields the tensors in order, while the threads fetch the next IN_FLIGHT_BYTES."""
  queue: deque[tuple[names.Tensor, Future]] = deque()
  ahead = 0
  for row in wanted:
    queue.append((row, pool.submit(_fetch, row, stored[row], targets[row.path])))
    ahead += stored[row].nbytes
    while ahead > IN_FLIGHT_BYTES:
      first, future = queue.popleft()
      ahead -= stored[first].nbytes
      yield first, future.result()
  while queue:
    first, future = queue.popleft()
    yield first, future.result()


def _fetch(row: names.Tensor, stored: StoredTensor, target: jax.ShapeDtypeStruct) -> jax.Array:
  """One tensor in our layout and the target's type; a layer of a stacked leaf is sharded as the rest of the leaf is."""
  sharding = _sharding(target)
  if row.layer is not None and isinstance(sharding, NamedSharding):
    spec = PartitionSpec(*sharding.spec[1:])
    sharding = NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
  box = _box(row.our_shape, sharding)
  if len(row.our_shape) == len(row.shape):
    theirs = [slice(None)] * len(row.shape)
    for ours, axis in enumerate(row.order):
      theirs[axis] = box[ours]
    part = tensor_files.read(stored, tuple(theirs), target.dtype).transpose(row.order)
  else:  # axes are merged or dropped; these tensors are small
    part = row.to_ours(tensor_files.read(stored, None, target.dtype))[box]

  def shard(index):
    bounds = [s.indices(n)[:2] for s, n in zip(index, row.our_shape, strict=True)]
    return part[tuple(slice(start - b.start, stop - b.start) for (start, stop), b in zip(bounds, box, strict=True))]

  return jax.make_array_from_callback(row.our_shape, sharding, shard)


def _box(shape: tuple[int, ...], sharding: Sharding) -> tuple[slice, ...]:
  """The smallest box that holds what the devices of this host need of an array."""
  bounds = [
    [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
    for index in sharding.addressable_devices_indices_map(shape).values()
  ]
  return tuple(slice(min(b[dim][0] for b in bounds), max(b[dim][1] for b in bounds)) for dim in range(len(shape)))


def _sharding(target: jax.ShapeDtypeStruct) -> Sharding:
  return target.sharding or SingleDeviceSharding(jax.local_devices()[0])


def _zeros(targets: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
  """Allocates the stacked leaves, all with one program."""
  make = jax.jit(
    lambda: {path: jnp.zeros(target.shape, target.dtype) for path, target in targets.items()},
    out_shardings={path: _sharding(target) for path, target in targets.items()},
  )
  return make()


@functools.lru_cache(maxsize=64)
def _layer_writer(sharding: Sharding):
  """Compiled (stack, one layer, its number) -> stack, in the stack's own memory."""
  update = functools.partial(update_layer, sharding=sharding)
  return jax.jit(update, donate_argnums=0, out_shardings=sharding)


def update_layer(stack: jax.Array, array: jax.Array, layer: jax.Array, *, sharding: Sharding) -> jax.Array:
  """Replaces one layer of a stacked leaf; for compiled programs that donate the stack, whose sharding is given."""
  dtype = stack.dtype
  if dtype.itemsize == 2 and next(iter(sharding.device_set)).platform == "cpu":
    # XLA's CPU compiler computes bfloat16 in float32, here by converting the whole stack there and back for every layer.
    # Integers with the same bits are left alone.
    stack, array = (jax.lax.bitcast_convert_type(x, jnp.uint16) for x in (stack, array))
  return jax.lax.bitcast_convert_type(jax.lax.dynamic_update_index_in_dim(stack, array, layer, 0), dtype)
