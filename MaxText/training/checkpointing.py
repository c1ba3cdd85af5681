"""Checkpoints of a training run, and where a run that starts takes its state from.

Load order: the latest checkpoint of this run (or the one that checkpoint_step names); else load_full_state_path or
load_parameters_path; else random weights. Orbax writes a checkpoint beside the others under a temporary name and renames
it when it is whole, so a run that is killed while it writes goes on from the one before. A checkpoint is restored onto
whatever mesh there is. `checkpoints/training_folder.py` says what lies in it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import grain
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from MaxText.checkpoints import contents, lora, training_folder
from MaxText.checkpoints import folder as folder_lib
from MaxText.checkpoints.training_folder import ITERATOR, MODEL, OPTIMIZER
from MaxText.config_types import ConfigError
from MaxText.parallel import sharding
from MaxText.training import state as state_lib
from MaxText.training.state import Template, TrainState

_CHUNK_BYTES = 256 << 20  # pieces of a leaf on disk, so that reading a shard does not read a whole stack


@dataclasses.dataclass
class Start:
  """State to train on, the kept weights, where they came from in words, and what the next checkpoint builds on."""

  state: TrainState
  kept: state_lib.Weights
  origin: str
  base: str | None


class Checkpoints:
  """Those of one run, in {base_output_directory}/{run_name}/checkpoints/{step}."""

  def __init__(self, config, template: Template):
    self.config, self.template = config, template
    self.run = pathlib.Path(config.base_output_directory).expanduser().absolute() / config.run_name
    self.directory = self.run / "checkpoints"
    self.components = state_lib.components_of(config)
    self.base = None if config.folder is None else os.path.abspath(config.folder.path)
    names = (*self.components, *map(training_folder.average_of, self.components), OPTIMIZER)
    arrays = {name: _handler() for name in names}
    options = ocp.CheckpointManagerOptions(
      max_to_keep=config.max_checkpoints_to_keep, enable_async_checkpointing=config.async_checkpointing,
      cleanup_tmp_directories=True)
    self._manager = ocp.CheckpointManager(
      self.directory, options=options,
      item_handlers={**arrays, MODEL: ocp.JsonCheckpointHandler(), ITERATOR: grain.checkpoint.CheckpointHandler()})

  # --- load

  def chosen_step(self) -> int | None:
    """The step of this run to continue from; None for a run without checkpoints.

    Raises:
      ConfigError: checkpoint_step names none; or the run's folder holds something else.
    """
    steps, asked = sorted(self._manager.all_steps()), self.config.checkpoint_step
    if asked is not None and asked not in steps:
      raise ConfigError(f"checkpoint_step={asked}: {self.directory} has no such checkpoint; it has "
                        f"{', '.join(map(str, steps)) or 'none'}")
    return asked if asked is not None else max(steps, default=None)

  def start(
    self, optimizer: optax.GradientTransformation, placement: sharding.Placement, iterator: grain.DatasetIterator
  ) -> Start:
    """State by the load order; the iterator is moved to where the checkpoint left it.

    Raises:
      ConfigError: a checkpoint that is damaged, foreign, or of another model.
    """
    config, template = self.config, self.template
    abstract = state_lib.make_abstract_state(config, template, optimizer, placement)
    step = self.chosen_step()
    path = str(self.directory / str(step)) if step is not None else config.load_full_state_path
    if path is None:
      weights = self._weights(template.trained, placement)
      origin = "random weights" if config.folder is None else f"weights of {config.folder.path}"
      state = state_lib.init_state(abstract, weights, optimizer)
      return Start(state, self._weights(template.kept, placement), origin, self.base)
    key = "checkpoint" if step is not None else "load_full_state_path"
    try:
      description = self._check(os.path.expanduser(path))
      state = _restore(os.path.expanduser(path), self.components, abstract, iterator)
    except ValueError as e:
      older = [str(s) for s in sorted(self._manager.all_steps()) if step is not None and s != step]
      advice = f"; to continue from another one give checkpoint_step={' or '.join(older)}" if older else ""
      raise ConfigError(f"{key} {path}: {e}{advice}") from e
    base = self.base or description["base"]
    kept = self._weights(template.kept, placement)
    if step is not None:
      self._set_aside(step)
    return Start(state, kept, f"checkpoint {path}", base)

  def _weights(self, names: tuple[str, ...], placement: sharding.Placement) -> state_lib.Weights:
    folder, load = self.config.folder, None
    if folder is not None:
      def load(component, targets):
        return folder_lib.load_leaves(folder, component, targets)
    return state_lib.make_weights(self.template, names, placement, self.config.seed, load)

  def _check(self, path: str) -> dict[str, Any]:
    """The description of a checkpoint, if its leaves are those of this run's model."""
    description = training_folder.read_description(path)
    trained = tuple(description["components"])
    if trained != self.components:
      raise ValueError(f"holds {' and '.join(trained)}, this run trains {' and '.join(self.components)} (train_target, "
                       "train_expert)")
    mine = {name: tuple(leaf.shape) for name, leaf in self.template.abstract(self.template.trained).items()}
    theirs = {f"{component}.{name}": tuple(shape) for component, entry in description["components"].items()
              for name, (_, shape) in entry["leaves"].items()}
    wrong = [f"{name}: {list(theirs.get(name, ())) or 'missing'}, this run has {list(mine.get(name, ())) or 'none'}"
             for name in sorted(mine.keys() | theirs.keys()) if mine.get(name) != theirs.get(name)]
    if wrong:
      raise ValueError(contents.listed("it was made for another model, or with another lora_rank", wrong[:5]))
    return description

  def _set_aside(self, step: int) -> None:
    """Renames checkpoints newer than the one the user asked for: training will write these steps anew."""
    newer = [s for s in self._manager.all_steps() if s > step]
    if newer and jax.process_index() == 0:
      for each in newer:
        number, target = 0, self.directory / f"set_aside_{each}"
        while target.exists():
          number, target = number + 1, self.directory / f"set_aside_{each}_{number + 1}"
        os.rename(self.directory / str(each), target)
    if newer:
      if jax.process_count() > 1:
        multihost_utils.sync_global_devices("checkpoints set aside")
      self._manager.reload()

  # --- save

  def due(self, step: int) -> bool:
    period = self.config.checkpoint_period
    return step == self.config.steps or bool(period) and step % period == 0

  def save(self, step: int, state: TrainState, iterator: grain.DatasetIterator, base: str | None) -> None:
    """Starts to write a checkpoint, or writes it if async_checkpointing=false. The state may be given up afterwards."""
    if step in self._manager.all_steps():
      return
    items = {
      OPTIMIZER: _save_args(_rest(state)),
      MODEL: ocp.args.JsonSave(self._description(state, base)),
      ITERATOR: grain.checkpoint.CheckpointSave(iterator),
    }
    for component in self.components:
      items[component] = _save_args(state_lib.of_component(state.weights, component))
      if state.ema is not None:
        items[training_folder.average_of(component)] = _save_args(state_lib.of_component(state.ema, component))
    self._manager.save(step, args=ocp.args.Composite(**items), force=True)
    if self.config.lora_rank:
      self._write_lora(state)

  def _description(self, state: TrainState, base: str | None) -> dict[str, Any]:
    return {
      "version": training_folder.VERSION,
      "base": base,
      "lora_rank": self.config.lora_rank,
      "components": {component: {
        "architecture": dataclasses.asdict(self._architecture(component, state)),
        "leaves": {name: [str(array.dtype), list(array.shape)]
                   for name, array in state_lib.of_component(state.weights, component).items()},
      } for component in self.components},
    }

  def _architecture(self, component: str, state: TrainState) -> Any:
    """The component's dataclass; that of a VAE holds the mean and deviation that its latents now have."""
    if component == "text_encoder":
      return self.config.umt5()
    if component != "vae":
      return self.config.wan()
    if not state.statistics:
      return self.config.vae()
    mean, square = (np.asarray(state.statistics[name], np.float64) for name in ("latents_mean", "latents_square"))
    deviation = np.sqrt(np.maximum(square - mean**2, 1e-6))
    return dataclasses.replace(self.config.vae(), latents_mean=mean.tolist(), latents_std=deviation.tolist())

  def _write_lora(self, state: TrainState) -> None:
    """lora.safetensors, for lora_path: the adapters as they are now."""
    weights = state.weights if state.ema is None else state.ema
    whole = multihost_utils.process_allgather(weights, tiled=True) if jax.process_count() > 1 else jax.device_get(weights)
    if jax.process_index() == 0:
      adapters = state_lib.of_component(whole, self.components[0])
      lora.write_lora(str(self.run / "lora.safetensors"), self.config.wan(), adapters, state_lib.lora_scale(self.config))

  def wait(self) -> None:
    """Returns when all checkpoints are whole."""
    self._manager.wait_until_finished()

  def close(self) -> None:
    self._manager.close()


def _handler() -> ocp.PyTreeCheckpointHandler:
  return ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)


def _save_args(tree: Any) -> ocp.args.PyTreeSave:
  return ocp.args.PyTreeSave(tree, save_args=jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), tree))


def _rest(state: TrainState) -> dict[str, Any]:
  """What only a run that continues needs. Empty statistics have no place in a checkpoint."""
  rest = {"step": state.step, "optimizer": state.optimizer}
  return {**rest, "statistics": state.statistics} if state.statistics else rest


def _restore(
  path: str, components: tuple[str, ...], abstract: TrainState, iterator: grain.DatasetIterator
) -> TrainState:
  """The state in a checkpoint, in the shardings of `abstract`; the iterator is set too.

  Raises:
    ValueError: an item is missing or damaged.
  """
  path = os.path.abspath(path)

  def read(weights, averages: bool):
    found = {}
    for component in components:
      average = training_folder.average_of(component)
      item = average if averages and os.path.isdir(os.path.join(path, average)) else component
      leaves = _item(path, item, state_lib.of_component(weights, component))
      found |= {f"{component}.{name}": leaf for name, leaf in leaves.items()}
    return {name: found[name] for name in weights}

  weights = read(abstract.weights, averages=False)
  rest = _item(path, OPTIMIZER, _rest(abstract))
  # A run that turns the average on starts it from its weights.
  ema = None if abstract.ema is None else read(abstract.ema, averages=True)
  _item(path, ITERATOR, iterator)
  return TrainState(rest["step"], weights, rest["optimizer"], ema, rest.get("statistics", {}))


def _item(path: str, name: str, target: Any) -> Any:
  directory = os.path.join(path, name)
  if not os.path.isdir(directory):
    raise ValueError(f"{directory} is missing")
  try:
    if name == ITERATOR:
      return _move_iterator(pathlib.Path(directory), target)
    arguments = ocp.checkpoint_utils.construct_restore_args(target)
    with ocp.Checkpointer(_handler()) as checkpointer:
      return checkpointer.restore(directory, args=ocp.args.PyTreeRestore(item=target, restore_args=arguments))
  except Exception as e:  # noqa: BLE001 - Orbax and TensorStore raise many kinds for files that are cut or gone
    raise ValueError(f"{directory} is damaged ({training_folder.first_line(e)})") from e


def _move_iterator(directory: pathlib.Path, iterator: grain.DatasetIterator) -> None:
  """Sets the iterator to where a checkpoint left it.

  Grain keeps one file a process, and would read that of the same process of as many. Ours all say the same: how many
  global batches were taken. So any of them serves, and a run may go on with another number of hosts.
  """
  states = {path.read_text() for path in sorted(directory.glob("process_*-of-*.json"))}
  if len(states) != 1:
    raise ValueError(f"{len(states)} different positions in the data, where there should be one")
  iterator.set_state(json.loads(states.pop()))
  iterator.start_prefetch()


def finite(metrics: Mapping[str, Any]) -> bool:
  """Whether every number of a step is one."""
  return all(np.isfinite(float(value)) for value in metrics.values())
