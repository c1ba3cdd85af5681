"""Opens a folder of Wan weights, whatever its format, and loads parts of it: the two functions that other code uses."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from MaxText.checkpoints import (
  contents,
  diffusers_folder,
  names,
  orbax_folder,
  original_folder,
  random_folder,
  training_folder,
)
from MaxText.checkpoints.contents import Folder

if TYPE_CHECKING:
  import jax
  from flax import nnx

__all__ = ["Folder", "load", "load_leaves", "open_folder"]


def open_folder(path: str) -> Folder:
  """Opens a folder of weights and checks it, without reading a weight.

  The format is recognised by the files: a Diffusers folder (model_index.json), the original release (config.json, or
  high_noise_model/ and low_noise_model/), our own checkpoint (maxtext_checkpoint.json), or one of a training run. The
  architecture comes from the folder's own config files; every name and shape, and the length of every file, is checked
  against it.

  Args:
    path: the folder; ~ is expanded.

  Raises:
    ValueError: one message that says what is wrong with the folder and what to do.
  """
  path = os.path.expanduser(path)
  if not os.path.exists(path):
    raise ValueError(f"{path}: there is no such folder; download the model and give the path of its folder")
  if not os.path.isdir(path):
    raise ValueError(f"{path} is a file; give the folder of the whole model")
  path = path.rstrip("/") or "/"
  if os.path.isfile(os.path.join(path, orbax_folder.DESCRIPTION)):
    return _readable(orbax_folder.open_orbax(path))
  if os.path.isfile(os.path.join(path, diffusers_folder.INDEX)):
    return _readable(diffusers_folder.open_diffusers(path))
  if training_folder.is_training(path):
    return training_folder.open_training(path, open_folder)
  if original_folder.is_original(path):
    return _readable(original_folder.open_original(path))
  checkpoints = training_folder.runs_checkpoints(path)
  if checkpoints:
    raise ValueError(f"{path} belongs to a training run; give one of its checkpoints, the latest is {checkpoints[-1]}")
  parent = os.path.dirname(os.path.abspath(path))
  if os.path.isfile(os.path.join(parent, diffusers_folder.INDEX)):
    raise ValueError(f"{path} is one part of a model; give the whole folder: {parent}")
  raise ValueError(
    f"{path} holds no Wan model: looked for {diffusers_folder.INDEX} (Diffusers), config.json or high_noise_model/ "
    f"(original release) and {orbax_folder.DESCRIPTION} (converted by convert_checkpoint)"
  )


def _readable(folder: Folder) -> Folder:
  """The folder; raises ValueError if its tokenizer cannot be used, which would show only after the text encoder loads."""
  from MaxText.models.tokenizer import Tokenizer

  Tokenizer(os.path.dirname(folder.tokenizer_path))
  return folder


def load(
  folder: Folder, component: str, abstract_state: nnx.State, progress: Callable[[int, int], None] | None = None
) -> nnx.State:
  """Loads one part of a folder straight into its place.

  Args:
    folder: from `open_folder`.
    component: 'transformer', 'transformer_2', 'vae' or 'text_encoder'.
    abstract_state: state whose leaves are ShapeDtypeStructs, as `nnx.eval_shape` makes it. A leaf's dtype is what it is
      converted to, its sharding where it goes (None: the first local device). It may be a part of the component; the rest
      is then not read.
    progress: called with (bytes done, bytes in all).

  Returns:
    the same state with jax.Arrays.

  Raises:
    ValueError: the folder has no such component, or the state's shapes are not the folder's.
  """
  from flax import nnx

  if component not in folder.components:
    raise ValueError(f"{folder.path} has no {component}; it has {', '.join(folder.components)}")
  variables = {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(abstract_state)}
  arrays = load_leaves(folder, component, {path: variable.get_value() for path, variable in variables.items()}, progress)
  return nnx.from_flat_state([
    (path, variable.replace(arrays[".".join(map(str, path))])) for path, variable in nnx.to_flat_state(abstract_state)
  ])


def load_leaves(
  folder: Folder,
  component: str,
  targets: Mapping[str, jax.ShapeDtypeStruct],
  progress: Callable[[int, int], None] | None = None,
) -> dict[str, jax.Array]:
  """`load` for a plain mapping of dotted paths to ShapeDtypeStructs."""
  from MaxText.checkpoints import loading  # JAX is imported here and not before

  rows = names.tensors(component, folder.architecture(component))
  shapes = names.leaf_shapes(rows)
  wrong = [f"{path}: {list(target.shape)}, the folder has {list(shapes.get(path, ()))}"
           for path, target in targets.items() if shapes.get(path) != tuple(target.shape)]
  if wrong:
    raise ValueError(contents.listed(f"the {component} to load differs from {folder.path}", wrong))
  if folder.base is not None:
    if component in folder.trained:
      return training_folder.restore(folder, component, targets, progress)
    return load_leaves(folder.base, component, targets, progress)
  if folder.format == "random":
    return random_folder.leaves(folder, component, targets)
  if folder.format == "orbax":
    return orbax_folder.restore(folder, component, targets, progress)
  return loading.read_into(rows, folder.stored[component], targets, progress)
