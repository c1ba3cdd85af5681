"""What arrays take of a device's memory, and whether they can lie there at all.

Only arrays whose sizes are known before anything is loaded or compiled are counted: weights, optimizer state, averages.
What a program needs beside them only its compilation tells (`dry_run=true compile_topology=…`, `train_compile`).
"""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

GIB = 2**30
_CGROUP = pathlib.Path("/sys/fs/cgroup/memory.max")


def device_bytes(tree: Any) -> int:
  """Bytes of a device's share of these ShapeDtypeStructs with shardings."""
  return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def device_limit(mesh: Mesh) -> int | None:
  """Bytes that one device of the mesh may hold; None where its backend does not tell. CPU devices share the host's."""
  local = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
  if local[0].platform == "cpu":
    return host_bytes() // len(local)
  return (local[0].memory_stats() or {}).get("bytes_limit")


def host_bytes() -> int:
  """Memory of this machine, or of the container if that has less."""
  total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
  limit = _CGROUP.read_text().strip() if _CGROUP.exists() else "max"
  return total if limit == "max" else min(total, int(limit))


def check_fits(held: Mapping[str, Any], mesh: Mesh, advice: str) -> None:
  """Refuses arrays that cannot lie in a device's memory together.

  Args:
    held: name → ShapeDtypeStructs with shardings.
    advice: what to change, as a clause.
  Raises:
    ValueError: names the sizes, and the advice.
  """
  sizes, limit = {name: device_bytes(tree) for name, tree in held.items()}, device_limit(mesh)
  if limit is None or sum(sizes.values()) <= limit:
    return
  device = mesh.devices.flat[0]
  where = "this machine" if device.platform == "cpu" else f"a device ({device.device_kind})"
  if device.platform == "cpu" and limit < host_bytes():
    where = f"each of {host_bytes() // limit} devices on this machine"
  parts = ", ".join(f"{name} {size / GIB:,.1f}" for name, size in sizes.items() if size)
  raise ValueError(f"too large: {parts} GiB, and {where} has {limit / GIB:,.1f} GiB, in which activations must lie too; "
                   f"{advice}")
