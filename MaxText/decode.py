"""Generates videos: python -m MaxText.decode configs/video.yml attention=svg prompt="a red ball rolls over the snow"

Reads top to bottom: configuration → plan → text embeddings → for every batch: noise, denoising steps, latents to disk,
VAE, mp4 → run.json. The stages live in MaxText/diffusion/pipeline.py, which can be used from Python without this command.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator

import numpy as np

from MaxText import pyconfig
from MaxText.config_reader import user_path
from MaxText.config_types import RunError
from MaxText.reporter import Reporter
from MaxText.run_folder import RunFolder, load_latents
from MaxText.video_io import to_uint8, write_video


@pyconfig.run_main
def main(argv: list[str]) -> None:
  config = pyconfig.initialize(argv, "decode")
  reporter = Reporter(config.log_format)
  if config.log_format == "text":
    config.print_config()

  with reporter.stage("start"):
    from MaxText.diffusion import compile_only, report  # imports jax: only once the configuration is right
    from MaxText.diffusion.pipeline import Request, VideoPipeline
    from MaxText.diffusion.run_record import RunRecord

    with pyconfig.input_errors():
      pipeline = VideoPipeline(config, reporter)
      if not config.dry_run:
        report.check_memory(pipeline)

  # --- what to make
  prompts = config.prompts() or ("",)
  requests = [
    Request(prompt, (config.seed + n) % 2**63) for prompt in prompts for n in range(config.num_videos_per_prompt)
  ]
  run = RunFolder(config, requests, create=not config.dry_run)
  if run.notice:
    reporter.warn(run.notice)
  if words := config.unknown_words():
    more = f" and more ({len(words)} words)" if len(words) > 5 else ""
    reporter.warn(f"these weights were not trained on {', '.join(map(repr, words[:5]))}{more}: the video will show "
                  f"something else; the words they know are in {config.load_parameters_path}/words.txt")
  for line in report.describe(pipeline):
    reporter.info(line)
  if config.dry_run:
    lines = (report.estimate(pipeline, len(requests)) if config.compile_topology is None else
             compile_only.describe(compile_only.compile_steps(pipeline), config.compile_topology))
    for line in lines:
      reporter.info(line)
    return
  record = RunRecord(config, pipeline, reporter, run, requests)
  record.write("running")
  todo = [i for i in range(len(requests)) if not run.finished(i)]
  if len(todo) < len(requests):
    reporter.info(f"{len(requests) - len(todo)} of {len(requests)} videos are finished already")

  for i in set(range(len(requests))) - set(todo):  # what a kill just after the video has left
    run.clean(i, keep_latents=config.save_latents)

  with record.ending(), stop_signals():
    # --- text, unless all latents exist (given by the user, or finished by an earlier run)
    given = user_path(config.latents_path) if config.latents_path else None
    saved = {i: given or run.latents(i) for i in todo if given or run.latents(i).exists()}
    if config.compare_dense:  # the control needs the sparse run's seconds beside its own
      saved = {}
    fresh = [i for i in todo if i not in saved]
    embeddings = {}
    if fresh:
      with reporter.stage("text"):
        embeddings = pipeline.encode_prompts([requests[i].prompt for i in fresh])

    # --- denoise and decode, batch by batch
    batches = [[i] for i in saved] + [fresh[n : n + config.batch_size] for n in range(0, len(fresh), config.batch_size)]
    for batch in batches:
      if batch[0] in saved:
        latents_BFHWC = load_latents(saved[batch[0]])[None]
      else:
        with reporter.stage("denoise"):
          latents_BFHWC = denoise(pipeline, run, reporter, record, batch, requests, embeddings)
        for i, latents_FHWC in zip(batch, latents_BFHWC, strict=True):  # on disk before the VAE may fail
          run.save_latents(run.latents(i), latents_FHWC)
      controls = {}
      if config.compare_dense:
        with reporter.stage("dense control"):
          controls = denoise_dense(pipeline, reporter, record, batch, requests, embeddings)
      if batch is batches[-1]:
        pipeline.experts.clear()  # the VAE may need the room
      for n, i in enumerate(batch):
        with reporter.stage("vae"), keeping_latents(reporter, given or run.latents(i)):
          clips = {name: list(uint8_frames(pipeline, latents[n])) for name, latents in controls.items()}
          if clips:
            write_video(run.video(i, "dense"), clips["dense"], config.height, config.width, config.fps)
          sparse = uint8_frames(pipeline, latents_BFHWC[n])
          clips["sparse"] = list(sparse) if clips else sparse
          write_video(run.video(i), clips["sparse"], config.height, config.width, config.fps)
        if controls:
          with reporter.stage("quality"):
            record.quality(i, {name: np.concatenate(clip) for name, clip in clips.items()})
        run.clean(i, keep_latents=config.save_latents or given is not None)
        record.video_done(i)
        reporter.info(f"wrote {run.video(i)}")

  record.write("finished")
  for line in record.summary():
    reporter.info(line)


def denoise(pipeline, run: RunFolder, reporter: Reporter, record, batch, requests, embeddings) -> np.ndarray:
  """All steps of one batch, with progress: latents [B, F, H, W, C]. Stopped, it keeps the last whole step's latents."""
  what = f"denoising {', '.join(run.video(i).stem for i in batch)}"
  step = latents_BFHWC = None
  try:
    for step, latents_BFHWC in pipeline.denoise([requests[i] for i in batch], embeddings):  # noqa: B007
      reporter.progress(what, step.index + 1, len(pipeline.steps), pipeline.step_seconds[-1], pipeline.seconds_left())
  except KeyboardInterrupt:
    if step is not None:
      paths = [
        run.save_latents(run.partial_latents(i, step.index + 1), latents)
        for i, latents in zip(batch, np.asarray(latents_BFHWC), strict=True)
      ]
      reporter.warn(
        f"stopped after step {step.index + 1} of {len(pipeline.steps)}; its latents are in "
        f"{', '.join(map(str, paths))} (look at them with latents_path=…); run_name={run.path.name} resume=true starts "
        "over with this video and keeps the finished ones"
      )
    raise
  record.batch_done(batch)
  return np.asarray(latents_BFHWC)


def denoise_dense(pipeline, reporter: Reporter, record, batch, requests, embeddings) -> dict[str, np.ndarray]:
  """The same noise with dense attention, and again with other tiles: what differs between these two is rounding alone."""
  latents = {}
  for name, other_tiles in (("dense", False), ("dense_again", True)):
    attention = pipeline.dense_control(other_tiles)
    for step, state in pipeline.denoise([requests[i] for i in batch], embeddings, control=attention):  # noqa: B007
      left = pipeline.seconds_left()
      reporter.progress(f"denoising {name}", step.index + 1, len(pipeline.steps), pipeline.step_seconds[-1], left)
    latents[name] = np.asarray(state)
    record.control_done(name)
  return latents


def uint8_frames(pipeline, latents_FHWC) -> Iterator[np.ndarray]:
  """Frames of one video as they will be written, [T, height, width, 3] at a time."""
  for frames_BTHW3 in pipeline.frames(latents_FHWC[None]):
    yield to_uint8(frames_BTHW3[0])


@contextlib.contextmanager
def keeping_latents(reporter: Reporter, path):
  """Says where the finished latents are when their video could not be made."""
  try:
    yield
  except BaseException as error:
    reporter.warn(f"the video was not written, but its final latents are in {path}: latents_path={path}, or the same "
                  "command with resume=true, makes it without denoising again")
    if isinstance(error, OSError):
      raise RunError(f"the video could not be written: {error}") from error
    raise


@contextlib.contextmanager
def stop_signals():
  """SIGTERM stops like Ctrl-C, so that what is done is kept; a second signal stops at once."""

  def stop(number, frame):
    signal.signal(number, signal.SIG_DFL)
    raise KeyboardInterrupt

  numbers = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
  previous = {number: signal.signal(number, stop) for number in numbers}
  try:
    yield
  finally:
    for number, handler in previous.items():
      signal.signal(number, handler)


if __name__ == "__main__":
  sys.exit(main())
