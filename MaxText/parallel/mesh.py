"""The device mesh: four named axes, their sizes read from `ici_*` and `dcn_*` keys.

Axes, outermost first, so that what talks most lies on the nearest chips:
  data     independent samples; with guidance the conditional and the unconditional half each get their half of it.
  fsdp     samples too, and weights stored in pieces which are gathered layer by layer.
  context  tokens of one video (Ulysses exchanges them for heads inside attention); weights are stored in pieces here too.
  tensor   heads and MLP columns.
`ici_*` sizes lie inside a slice (fast links), `dcn_*` sizes across slices; an axis has the product of its two sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

AXES = ("data", "fsdp", "context", "tensor")


def key(link: str, axis: str) -> str:
  """Config key of an axis size; link is 'ici' or 'dcn'."""
  return f"{link}_{axis}_parallelism"


def devices() -> list[jax.Device]:
  """The devices a mesh is made of unless the caller names others."""
  return jax.devices()


def divisors(n: int) -> list[int]:
  return [d for d in range(1, n + 1) if n % d == 0]


def listed(values: Sequence[Any], last: str = "or") -> str:
  """'1, 2 or 4'."""
  words = [str(v) for v in values]
  return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


def resolve_sizes(sizes: Mapping[str, int], count: int, units: str) -> dict[str, int]:
  """Fills in the one −1 of `sizes` (key → size) so that their product is `count`.

  Args:
    sizes: config key → size; at most one is −1.
    count: how many devices (or slices) there are.
    units: what is counted, for the messages.
  Raises:
    ValueError: a size that is 0 or below −1, two −1, or a product that does not fit; names key, value, count and choices.
  """
  for name, size in sizes.items():
    if size < 1 and size != -1:
      raise ValueError(f"{name}={size}: a mesh size is at least 1, or -1 to take what is left of {count} {units}")
  open_keys = [name for name, size in sizes.items() if size == -1]
  if len(open_keys) > 1:
    raise ValueError(f"{listed(open_keys, 'and')} are all -1: only one mesh size can be inferred from {count} {units}; "
                     f"give the others a size (1 leaves an axis unused)")
  product = math.prod(size for size in sizes.values() if size != -1)
  if open_keys and count % product == 0:
    return {**sizes, open_keys[0]: count // product}
  if product == count:
    return dict(sizes)
  raise ValueError(_misfit(sizes, product, count, units, bool(open_keys)))


def _misfit(sizes: Mapping[str, int], product: int, count: int, units: str, inferred: bool) -> str:
  """Says which sizes do not fit the count, and the nearest change of one of them that does."""
  given = {name: size for name, size in sizes.items() if size != -1}
  named = {name: size for name, size in given.items() if size > 1} or given
  choices = []
  for name, size in named.items():
    room, rest = divmod(count, product // size)
    if rest == 0:
      fits = divisors(room) if inferred else [room]
      choices.append(f"{name}={listed(sorted(sorted(fits, key=lambda d: abs(math.log(d / size)))[:3]))}")
  if not inferred and count % product == 0:
    choices.append(f"{next(iter(given if len(named) == len(given) else given.keys() - named.keys()))}=-1")
  advice = f"nearest: {listed(choices)}" if choices else f"sizes that divide {count}: {listed(divisors(count))}"
  verb = "cannot divide" if inferred else f"= {product}, but there are"
  return f"{' × '.join(f'{name}={size}' for name, size in named.items())} {verb} {count} {units}; {advice}"


def slice_of(device: Any) -> int:
  """Number of the slice a device belongs to; off TPU a process counts as one where the device does not say."""
  # Devices of a one-slice TPU topology that is only compiled for carry no slice_index, but the index of their host.
  return getattr(device, "slice_index", 0 if device.platform == "tpu" else device.process_index)


def make_mesh(config: Any, devs: Sequence[Any] | None = None) -> Mesh:
  """Mesh with axes `AXES` over `devs` (default: all devices), every device used exactly once.

  Args:
    config: has the attributes `ici_{axis}_parallelism` and `dcn_{axis}_parallelism` for every axis.
    devs: devices, or those of a compile-only topology.
  Raises:
    ValueError: sizes that do not fit the devices or the slices.
  """
  devs = list(devices() if devs is None else devs)
  slices = len({slice_of(d) for d in devs})
  dcn = resolve_sizes({key("dcn", axis): getattr(config, key("dcn", axis)) for axis in AXES}, slices, "slices")
  ici = resolve_sizes({key("ici", axis): getattr(config, key("ici", axis)) for axis in AXES}, len(devs) // slices,
                      "devices" if slices == 1 else "devices of a slice")
  ici_shape, dcn_shape = tuple(ici.values()), tuple(dcn.values())
  if slices == 1:
    array = mesh_utils.create_device_mesh(ici_shape, devs, allow_split_physical_axes=True)
  else:
    array = mesh_utils.create_hybrid_device_mesh(
      ici_shape, dcn_shape, devs, process_is_granule=not hasattr(devs[0], "slice_index"), allow_split_physical_axes=True)
  return Mesh(array, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def one_device(mesh: Mesh) -> Mesh:
  """Mesh of one device of this process, for what is too small to share out."""
  return mesh_of(next(device for device in mesh.devices.flat if device.process_index == jax.process_index()))


def mesh_of(device: jax.Device) -> Mesh:
  """Mesh of this device alone."""
  return Mesh(np.array([device]).reshape((1,) * len(AXES)), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def describe(mesh: Mesh) -> str:
  """'8 devices (cpu): data 2 × context 4'."""
  used = [f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1]
  kind = mesh.devices.flat[0].device_kind
  return f"{mesh.size} device{'s' if mesh.size > 1 else ''} ({kind})" + (f": {' × '.join(used)}" if used else "")
