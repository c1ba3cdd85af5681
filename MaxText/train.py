"""Fine-tunes a model: python -m MaxText.train configs/train_video.yml load_parameters_path=FOLDER run_name=mine

Reads top to bottom: configuration → hosts → mesh → data → state by the load order → loop: batch, step, line,
evaluation, checkpoint → last checkpoint. The step itself is MaxText/training/step.py, the load order
MaxText/training/checkpointing.py.
"""

from __future__ import annotations

import contextlib
import fnmatch
import importlib.metadata
import json
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from MaxText import pyconfig
from MaxText.config_types import ConfigError, RunError
from MaxText.reporter import Reporter, write_json


@pyconfig.run_main
def main(argv: list[str]) -> None:
  config = pyconfig.initialize(argv, "train")
  reporter = Reporter(config.log_format)
  if config.log_format == "text":
    config.print_config()
  start_hosts()
  import jax  # only once the configuration is right

  from MaxText.input_pipeline import make_iterator
  from MaxText.parallel import memory, sharding
  from MaxText.parallel import mesh as mesh_lib
  from MaxText.training import batches, checkpointing, metrics, state, step

  # --- devices
  if config.jax_cache_dir:
    jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(config.jax_cache_dir).expanduser()))
  with pyconfig.input_errors():
    placement = sharding.Placement(mesh_lib.make_mesh(config), sharding.parse_rules(config.logical_axis_rules))
    batches.check_mesh(config, placement)
    check_profiler(config, jax.default_backend())
    recipe = step.make_recipe(config, placement)
  reporter.info(mesh_lib.describe(placement.mesh))

  # --- data and state
  template, optimizer = state.make_template(config, placement), state.make_optimizer(config)
  abstract = state.make_abstract_state(config, template, optimizer, placement)
  if config.debug_sharding:
    reporter.info(sharding.debug_sharding(template.abstract_state(template.variables)))
  with pyconfig.input_errors():
    sharding.check_sharded_enough(template.abstract_state(template.variables), placement, config.sharding_tolerance)
    held = {"weights": (abstract.weights, template.abstract(template.kept)), "optimizer": abstract.optimizer,
            "EMA": abstract.ema}
    memory.check_fits(held, placement.mesh, "train a LoRA (lora_rank=32) or a smaller model, or take more devices "
                      "(ici_fsdp_parallelism splits weights and optimizer)")
    iterator = make_iterator(config, placement, "train")
  checkpoints = checkpointing.Checkpoints(config, template)
  sample_videos = make_samples(config, template, checkpoints.run, reporter)
  with reporter.stage("load"):
    start = checkpoints.start(optimizer, placement, iterator)
    empty = batches.empty_prompt(config, placement)
  train_state, kept = start.state, start.kept
  completed = int(train_state.step)
  reporter.info(f"step {completed} of {config.steps}: {start.origin}")
  if completed >= config.steps:
    reporter.info(f"nothing to do: steps={config.steps}")
    return

  # --- programs
  if config.train_target != "vae":
    reporter.info(f"attention: {recipe.objective.attention.describe()}")
  train_step = step.jit_train_step(template, optimizer, recipe, abstract, placement)
  eval_step = step.jit_eval_step(template, recipe, config.eval_buckets, placement)
  main_process = jax.process_index() == 0
  if main_process:
    record_config(config, checkpoints.run, completed, reporter)
  lines = metrics.RunMetrics(config, checkpoints.run, completed)
  profile = Profile(config, checkpoints.run, completed)
  schedule = state.learning_rate(config)

  # --- loop
  stopping = stop_requests()
  reporter.info("compiling the training step, which belongs to the first step's seconds")
  with stopping as stop_asked, contextlib.closing(lines), contextlib.closing(profile), contextlib.closing(checkpoints):
    last = time.perf_counter()
    while completed < config.steps:
      profile.before(completed)
      with jax.set_mesh(placement.mesh):
        batch = batches.global_batch(next(iterator), placement)
        train_state, values = train_step(train_state, kept, batch, empty)
      values = {key: float(value) for key, value in values.items()}  # waits for the step
      completed += 1
      now = time.perf_counter()
      seconds, last = now - last, now
      profile.after(completed)
      if not checkpointing.finite(values):
        raise RunError(
          f"step {completed}: loss {values['loss']}, gradient norm {values['gradient_norm']}: not finite; nothing of "
          "this step is kept. Continue from the last checkpoint with a lower learning_rate, or dtype=float32")
      tflops = metrics.batch_flops(config, batch) / seconds / placement.mesh.size / 1e12
      peak = metrics.PEAK_TFLOPS.get(placement.mesh.devices.flat[0].device_kind)
      if main_process:
        reporter.info(metrics.step_line(completed, seconds, tflops, values["loss"]))
        lines.write(
          step=completed, seconds=seconds, tflops_per_device=tflops, mfu=None if peak is None else tflops / peak,
          learning_rate=float(schedule(completed - 1)), **values)

      if config.eval_interval and (completed % config.eval_interval == 0 or completed == config.steps):
        weights = train_state.weights if train_state.ema is None else train_state.ema
        with jax.set_mesh(placement.mesh):
          losses = evaluate(config, placement, eval_step, weights, kept)
        if main_process:
          mean, parts = sum(losses) / len(losses), {}
          line = f"eval step: {completed}, loss: {mean:.6f}"
          if config.train_target != "vae":
            levels = recipe.objective.levels
            parts = {"eval_loss_by_noise_level": losses}
            line += f", by noise level {levels.low:g} to {levels.high:g}: {', '.join(f'{loss:.6f}' for loss in losses)}"
          reporter.info(line)
          lines.write(step=completed, eval_loss=mean, **parts)
        last = time.perf_counter()

      if sample_videos is not None and sample_videos.due(completed):
        weights = train_state.weights if train_state.ema is None else train_state.ema
        sample_videos.write(completed, weights, kept)
        last = time.perf_counter()

      stop = stop_asked(completed)
      if checkpoints.due(completed) or stop:
        checkpoints.save(completed, train_state, iterator, start.base)
        last = time.perf_counter()
      if stop:
        checkpoints.wait()
        then = "; the same command continues" if completed < config.steps else ", the last"
        reporter.info(f"asked to stop: step {completed} of {config.steps} is saved{then}")
        return
    checkpoints.wait()
  reporter.info(f"finished: {checkpoints.directory / str(completed)}")


def start_hosts() -> None:
  """Joins the hosts of a job: on a TPU slice of several, or where JAX_COORDINATOR_ADDRESS names one of them.

  Off TPU and outside of a job manager that JAX knows, JAX_NUM_PROCESSES and JAX_PROCESS_ID say how many there are and
  which this is.

  Raises:
    ConfigError: a coordinator, but not which of how many processes this is.
  """
  hosts = os.environ.get("TPU_WORKER_HOSTNAMES", "").count(",")
  if not (hosts or os.environ.get("JAX_COORDINATOR_ADDRESS") or os.environ.get("MEGASCALE_COORDINATOR_ADDRESS")):
    return
  import jax

  if jax.distributed.is_initialized():
    return
  try:
    known = {argument: int(os.environ[name]) for argument, name in
             (("num_processes", "JAX_NUM_PROCESSES"), ("process_id", "JAX_PROCESS_ID")) if name in os.environ}
    jax.distributed.initialize(**known)
  except (ValueError, TypeError) as e:
    raise ConfigError(f"JAX_COORDINATOR_ADDRESS={os.environ.get('JAX_COORDINATOR_ADDRESS')}: the hosts cannot be joined "
                      f"({e}); set JAX_NUM_PROCESSES, and JAX_PROCESS_ID of each, 0 for the coordinator") from e


def check_profiler(config, backend: str) -> None:
  """Refuses a trace on a TPU whose libtpu is not the one that JAX names: tracing would end the process without a word.

  Seen with libtpu 0.0.52 under JAX 0.10.2: a segmentation fault in start_trace as soon as libtpu is loaded.

  Raises:
    ConfigError: says what to install.
  """
  if config.profiler == "none" or backend != "tpu":
    return
  required = importlib.metadata.requires("jax") or ()
  named = [words.partition(";")[0].strip() for words in required if words.startswith("libtpu")]
  found = f"libtpu=={importlib.metadata.version('libtpu')}"
  if named and not any(fnmatch.fnmatch(found, pattern) for pattern in named):
    raise ConfigError(f"profiler={config.profiler}: {found} is installed, and a trace would end this process; install "
                      f"what this JAX was made with, pip install '{named[0]}', or leave the profiler out")


def record_config(config, run: pathlib.Path, completed: int, reporter: Reporter) -> None:
  """Writes every key's value and source to RUN/config.json, and says what a continued run changes.

  A continued run whose values differ writes config_from_step_N.json instead, so that the values of every step are known.
  """
  values = json.loads(json.dumps(config.as_record()))
  earlier = sorted(run.glob("config_from_step_*.json"))[-1:] or list(run.glob("config.json"))
  if not earlier:
    run.mkdir(parents=True, exist_ok=True)
    write_json(str(run / "config.json"), values)
    return
  before = json.loads(earlier[0].read_text(encoding="utf-8"))
  changed = [key for key in values if key not in before or before[key]["value"] != values[key]["value"]]
  if changed:
    write_json(str(run / f"config_from_step_{completed:09d}.json"), values)
    listed = ", ".join(f"{key} was {before.get(key, {}).get('value')!r}, is {values[key]['value']!r}" for key in changed)
    reporter.info(f"changed since the last start: {listed}")


def evaluate(config, placement, eval_step, weights, kept) -> list[float]:
  """Mean loss over eval_steps batches, in each part of the noise levels; for the VAE one number."""
  import numpy as np

  from MaxText.input_pipeline import make_iterator
  from MaxText.training.batches import global_batch

  iterator = make_iterator(config, placement, "eval")
  losses = [
    np.asarray(eval_step(weights, kept, global_batch(next(iterator), placement), np.uint32(number)))
    for number in range(config.eval_steps)
  ]
  return np.mean(losses, axis=0).tolist()


def make_samples(config, template, run: pathlib.Path, reporter: Reporter):
  """What makes a sample video every sample_interval steps, its prompt already embedded; None for none."""
  if not config.sample_interval:
    return None
  from MaxText.training.samples import Samples

  with reporter.stage("text"), pyconfig.input_errors():
    return Samples(config, template, run, reporter)


class Profile:
  """A trace of some steps in RUN/profile, for XProf; profiler=none does nothing."""

  def __init__(self, config, run: pathlib.Path, completed: int):
    self.first = completed + config.skip_first_n_steps_for_profiler if config.profiler == "xplane" else None
    self.last = None if self.first is None else self.first + config.profiler_steps
    self.directory, self.running = run / "profile", False

  def before(self, completed: int) -> None:
    if completed == self.first:
      import jax

      jax.profiler.start_trace(str(self.directory))
      self.running = True

  def after(self, completed: int) -> None:
    if self.running and completed == self.last:
      self.close()

  def close(self) -> None:
    if self.running:
      import jax

      jax.profiler.stop_trace()
      self.running = False


@contextlib.contextmanager
def stop_requests() -> Iterator[Any]:
  """Yields asked(step): whether SIGTERM has come. All hosts of a job get the same answer at the same step."""
  import jax

  if jax.process_count() > 1:  # JAX's own service watches for the signal, and agrees on a step
    from jax.experimental import multihost_utils

    yield multihost_utils.reached_preemption_sync_point
    return
  asked = threading.Event()
  if threading.current_thread() is not threading.main_thread():
    yield lambda step: False
    return
  previous = signal.signal(signal.SIGTERM, lambda number, frame: asked.set())
  try:
    yield lambda step: asked.is_set()
  finally:
    signal.signal(signal.SIGTERM, previous)


if __name__ == "__main__":
  sys.exit(main())
