"""One checkpoint of a training run, opened as weights: what decode and convert_checkpoint read.

    model/                 description: the trained components, their architecture and leaves, the folder it started from
    transformer/ …         weights of each trained component (Orbax, one array a leaf, named by its dotted path), float32
    transformer_ema/ …     their average, where the run keeps one; it is then what is sampled from
    optimizer/ iterator/   for continuing

What was not trained (tokenizer, other components) is read from the folder that training started from.
Orbax gives the folder its name when it is whole. Nothing here imports JAX before weights are read.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from MaxText.checkpoints import contents, names, orbax_folder
from MaxText.checkpoints.contents import Folder, read_json

if TYPE_CHECKING:
  import jax

VERSION = 2
MODEL, OPTIMIZER, ITERATOR = "model", "optimizer", "iterator"
_DESCRIPTION = os.path.join(MODEL, "metadata")  # as Orbax names a JSON item


def average_of(component: str) -> str:
  """The item that holds the average of a component's weights."""
  return f"{component}_ema"


def is_training(path: str) -> bool:
  return os.path.isfile(os.path.join(path, _DESCRIPTION))


def runs_checkpoints(path: str) -> list[str]:
  """Checkpoints below a run's folder or its checkpoints/, oldest first: for messages."""
  for place in (path, os.path.join(path, "checkpoints")):
    if os.path.isdir(place):
      steps = [name for name in os.listdir(place) if name.isdecimal() and is_training(os.path.join(place, name))]
      if steps:
        return [os.path.join(place, name) for name in sorted(steps, key=int)]
  return []


def read_description(path: str) -> dict[str, Any]:
  """What a training checkpoint says of itself.

  Raises:
    ValueError: `path` is no training checkpoint, or one of another version.
  """
  if not is_training(path):
    raise ValueError(f"{path} is no training checkpoint: {_DESCRIPTION} is missing; give one like RUN/checkpoints/500")
  description = read_json(os.path.join(path, _DESCRIPTION))
  if description.get("version") != VERSION:
    raise ValueError(f"{path} has version {description.get('version')!r}, this code reads {VERSION}")
  return description


def open_training(path: str, open_folder: Callable[[str], Folder]) -> Folder:
  """Opens a training checkpoint as a model; see `folder.open_folder`, which it takes to open what it started from."""
  description = read_description(path)
  base = description["base"]
  if description["lora_rank"]:
    raise ValueError(f"{path} holds a LoRA: use load_parameters_path={base or 'the weights it was trained on'} "
                     "lora_path=RUN/lora.safetensors")
  if base is None:
    raise ValueError(f"{path} was trained from random weights, so parts that videos are made with are "
                     "missing; train with load_parameters_path=FOLDER, which convert_checkpoint can make of random "
                     "weights")
  try:
    folder = open_folder(base)
  except ValueError as e:
    raise ValueError(f"{path} takes its VAE and text encoder from {base}, where training started; it cannot be opened: "
                     f"{e}") from e
  found = {}
  for component, entry in description["components"].items():
    expected = names.leaf_shapes(names.tensors(component, folder.architecture(component)))
    shapes = {name: tuple(shape) for name, (_, shape) in entry["leaves"].items()}
    wrong = [f"{component}.{name}: {shapes.get(name, 'missing')}, expected {expected.get(name, 'no such parameter')}"
             for name in sorted(expected.keys() | shapes.keys()) if expected.get(name) != shapes.get(name)]
    if wrong:
      raise ValueError(contents.listed(f"{path} does not fit {base}, where training started", wrong))
  trained = tuple(description["components"])
  if "vae" in trained:
    statistics = {key: description["components"]["vae"]["architecture"][key] for key in ("latents_mean", "latents_std")}
    found = {"vae": dataclasses.replace(folder.vae, **statistics),
             "configs": {**folder.configs, "vae": {**folder.configs.get("vae", {}), **statistics}}}
  return dataclasses.replace(folder, path=path, format="training", stored={}, base=folder, trained=trained, **found)


def weights_directory(folder: Folder, component: str) -> str:
  """The item whose numbers are the component: the average where there is one."""
  average = average_of(component)
  return average if os.path.isdir(os.path.join(folder.path, average)) else component


def leaf_dtypes(folder: Folder, component: str) -> dict[str, np.dtype]:
  """Type of every leaf of a trained component."""
  leaves = read_description(folder.path)["components"][component]["leaves"]
  return {path: np.dtype(dtype) for path, (dtype, _) in leaves.items()}


def restore(
  folder: Folder, component: str, targets: Mapping[str, jax.ShapeDtypeStruct], progress=None
) -> dict[str, jax.Array]:
  """The weights of a trained component, or those of them that `targets` names, in its types and shardings.

  Raises:
    ValueError: the files are damaged.
  """
  directory = os.path.join(os.path.abspath(folder.path), weights_directory(folder, component))
  try:
    return orbax_folder.restore_leaves(directory, targets, leaf_dtypes(folder, component), progress)
  except Exception as e:  # noqa: BLE001 - Orbax and TensorStore raise many kinds for files that are cut or gone
    raise ValueError(f"{directory} is damaged ({first_line(e)}); use another checkpoint of the run") from e


def first_line(error: BaseException, length: int = 200) -> str:
  """The start of an error's text, for a message of one line."""
  text = " ".join(str(error).split()) or type(error).__name__
  return text if len(text) <= length else text[:length] + "…"
