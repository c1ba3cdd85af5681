"""Our own checkpoint folder: an Orbax checkpoint a component, a description of the model, and the tokenizer.

    maxtext_checkpoint.json   architecture, every leaf's type and shape, size of every file, the Diffusers configs it came
    with transformer/ …            Orbax, one array a leaf, named by its dotted path; written and restored sharded
    tokenizer/                the tokenizer's files

The whole folder is written under a temporary name and renamed (convert_checkpoint), so one that exists is complete.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from MaxText.checkpoints import contents, names
from MaxText.checkpoints.contents import Fields, Folder, read_json

if TYPE_CHECKING:
  import jax

DESCRIPTION = "maxtext_checkpoint.json"
_VERSION = 1
_TOKENIZER = os.path.join("tokenizer", "spiece.model")
# Leaves are cut into pieces of this size on disk, so that reading a shard does not read a whole stack.
_CHUNK_BYTES = 256 << 20


def open_orbax(path: str) -> Folder:
  """Opens and checks one of our checkpoints; see `folder.open_folder`."""
  from MaxText.models.umt5 import Umt5Config
  from MaxText.models.vae import VaeConfig
  from MaxText.models.wan import WanConfig

  file = os.path.join(path, DESCRIPTION)
  description = read_json(file)
  if description.get("version") != _VERSION:
    raise ValueError(f"{file} has version {description.get('version')!r}, this code reads {_VERSION}: convert again")
  try:
    wan, vae, umt5 = (
      kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in description[part].items()})
      for part, kind in (("wan", WanConfig), ("vae", VaeConfig), ("umt5", Umt5Config))
    )
    folder = Folder(
      path=path, format="orbax", wan=wan, vae=vae, umt5=umt5, num_experts=Fields(description, file).count("num_experts"),
      boundary_ratio=description["boundary_ratio"], flow_shift=description["flow_shift"],
      tokenizer_path=contents.required_file(os.path.join(path, _TOKENIZER), contents.TOKENIZER), stored={},
      configs=description["configs"],
    )
    leaves, files = description["leaves"], description["files"]
    problems = [p for component in folder.components for p in _leaf_problems(folder, component, leaves[component])]
  except (KeyError, TypeError, AttributeError) as e:
    raise ValueError(f"{file} is damaged ({type(e).__name__}: {e}); convert the model again") from e
  contents.check_together(wan, vae, umt5, path)
  if problems:
    raise ValueError(contents.listed(f"{file} does not fit this code's models; convert again", problems))
  broken = [f"{name}: {_size(os.path.join(path, name))} of {size} bytes" for name, size in files.items()
            if _size(os.path.join(path, name)) != size]
  if broken:
    raise ValueError(contents.listed(f"{path} has missing or truncated files; copy or convert it again", broken))
  return folder


def _size(path: str) -> int:
  return os.path.getsize(path) if os.path.isfile(path) else 0


def _leaf_problems(folder: Folder, component: str, leaves: Mapping[str, Any]) -> list[str]:
  expected = names.leaf_shapes(names.tensors(component, folder.architecture(component)))
  found = {path: tuple(shape) for path, (_, shape) in leaves.items()}
  return [f"{component} {path}: {found.get(path, 'missing')}, expected {expected.get(path, 'no such parameter')}"
          for path in sorted(expected.keys() | found.keys()) if expected.get(path) != found.get(path)]


def leaf_dtypes(folder: Folder, component: str) -> dict[str, np.dtype]:
  """Type that every leaf has in one of our checkpoints."""
  leaves = read_json(os.path.join(folder.path, DESCRIPTION))["leaves"][component]
  return {path: np.dtype(dtype) for path, (dtype, _) in leaves.items()}


def stored_dtypes(folder: Folder, component: str) -> dict[str, np.dtype]:
  """Diffusers name -> type in the folder the checkpoint came from, for tensors whose leaf had to take a wider one."""
  exceptions = read_json(os.path.join(folder.path, DESCRIPTION)).get("stored_dtypes", {}).get(component, {})
  return {name: np.dtype(dtype) for name, dtype in exceptions.items()}


def save_component(directory: str, arrays: Mapping[str, jax.Array]):
  """Writes the leaves of a component as an Orbax checkpoint in a new folder."""
  import jax
  import orbax.checkpoint as ocp

  save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), dict(arrays))
  largest = max(shard.data.nbytes for array in arrays.values() for shard in array.addressable_shards)
  with _checkpointer(largest) as checkpointer:
    checkpointer.save(os.path.abspath(directory), args=ocp.args.PyTreeSave(dict(arrays), save_args=save_args))


def restore(
  folder: Folder,
  component: str,
  targets: Mapping[str, jax.ShapeDtypeStruct],
  progress: Callable[[int, int], None] | None = None,
) -> dict[str, jax.Array]:
  """Restores leaves of a component in the types and shardings of `targets`, whatever mesh wrote them."""
  directory = os.path.join(os.path.abspath(folder.path), component)
  return restore_leaves(directory, targets, leaf_dtypes(folder, component), progress)


def restore_leaves(
  directory: str,
  targets: Mapping[str, jax.ShapeDtypeStruct],
  stored: Mapping[str, np.dtype],
  progress: Callable[[int, int], None] | None = None,
) -> dict[str, jax.Array]:
  """`restore` for an Orbax folder of dotted names; stored: the types that it holds them in."""
  import jax
  import orbax.checkpoint as ocp

  total = sum(target.size * target.dtype.itemsize for target in targets.values())
  if progress is not None:
    progress(0, total)
  default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  restore_args = {
    path: ocp.ArrayRestoreArgs(sharding=target.sharding or default, dtype=target.dtype, global_shape=target.shape)
    for path, target in targets.items()
  }
  # As many bytes as either type takes: what is read is converted afterwards.
  largest = max(
    math.prod((target.sharding or default).shard_shape(target.shape)) * max(target.dtype.itemsize, stored[path].itemsize)
    for path, target in targets.items()
  )
  with _checkpointer(largest) as checkpointer:
    arrays = checkpointer.restore(
      directory,
      args=ocp.args.PyTreeRestore(item=dict(targets), restore_args=restore_args, partial_restore=True),
    )
  if progress is not None:
    progress(total, total)
  return arrays


def _checkpointer(largest: int):
  """A checkpointer that keeps about `largest` bytes on their way, the most that one device's part of a leaf takes.

  Orbax's own limit is 96 GB; a smaller one than the largest part makes it fail.
  """
  import orbax.checkpoint as ocp

  limit = math.ceil(largest / 10**9)
  return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(
    use_ocdbt=True, use_zarr3=True, restore_concurrent_gb=limit, save_concurrent_gb=limit))


def write_description(
  path: str,
  folder: Folder,
  leaves: Mapping[str, Mapping[str, tuple[np.dtype, tuple[int, ...]]]],
  exceptions: Mapping[str, Mapping[str, np.dtype]],
):
  """Writes maxtext_checkpoint.json and copies the tokenizer; the components are already in `path`.

  Args:
    path: the new checkpoint.
    folder: what it was made from.
    leaves: component -> path -> (type, shape).
    exceptions: component -> Diffusers name -> type, where it differs from the leaf's.
  """
  shutil.copytree(os.path.dirname(folder.tokenizer_path), os.path.join(path, os.path.dirname(_TOKENIZER)))
  files = [os.path.relpath(os.path.join(root, name), path) for root, _, found in os.walk(path) for name in found]
  description = {
    "version": _VERSION,
    "wan": dataclasses.asdict(folder.wan),
    "vae": dataclasses.asdict(folder.vae),
    "umt5": dataclasses.asdict(folder.umt5),
    "num_experts": folder.num_experts,
    "boundary_ratio": folder.boundary_ratio,
    "flow_shift": folder.flow_shift,
    "leaves": {
      part: {path: [str(dtype), list(shape)] for path, (dtype, shape) in of.items()} for part, of in leaves.items()
    },
    "stored_dtypes": {part: {name: str(dtype) for name, dtype in of.items()} for part, of in exceptions.items()},
    "files": {name: os.path.getsize(os.path.join(path, name)) for name in sorted(files)},
    "configs": dict(folder.configs),
  }
  with open(os.path.join(path, DESCRIPTION), "w", encoding="utf-8") as f:
    json.dump(description, f, indent=1)
