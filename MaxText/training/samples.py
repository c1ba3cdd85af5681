"""A sample video every so often: what the weights of a training run make of one prompt, by the pipeline of decode.

The text is embedded once, before training, unless the text encoder is trained too; the VAE is loaded with the first
sample and stays. Of a model with two experts the one that is trained comes from the run, the other from the weights
folder.
"""

from __future__ import annotations

import pathlib

import jax
from flax import nnx

from MaxText.diffusion.pipeline import EXPERTS, NotFiniteError, Request, VideoPipeline
from MaxText.input_pipeline import clips
from MaxText.reporter import Reporter
from MaxText.training.state import Template, Weights, components_of
from MaxText.video_io import write_video


class Samples:
  """Writes RUN/samples/step_000500.mp4, every `sample_interval` steps and after the last. Every process calls it alike.

  Args:
    config: of the run; with size_buckets the first size is sampled.
    template: turns weights into models.
    run: the run's folder.
    reporter: where progress and failures go.
  """

  def __init__(self, config, template: Template, run: pathlib.Path, reporter: Reporter):
    height, width = clips.sizes(config)[0]
    self.config = config.model_copy(update={"height": height, "width": width, "batch_size": 1})
    self.template, self.directory, self.reporter = template, run / "samples", reporter
    self.pipeline = VideoPipeline(self.config, Reporter("quiet"))
    self.expert = components_of(config)[0]
    trained_text = "text_encoder" in components_of(config)
    self.embeddings = None if trained_text else self.pipeline.encode_prompts([config.prompt])

  def due(self, step: int) -> bool:
    return step % self.config.sample_interval == 0 or step == self.config.steps

  def write(self, step: int, weights: Weights, kept: Weights) -> None:
    """Makes the video of these weights. NaN is a warning: whether training goes on is decided by its loss.

    Args:
      step: how many are completed.
      weights: those that are trained, or their average. kept: the others.
    """
    pipeline, path, number = self.pipeline, self.directory / f"step_{step:06d}.mp4", EXPERTS.index(self.expert)
    models = self.template.merge({**kept, **weights})
    pipeline.experts[number] = nnx.split(getattr(models, self.expert))
    request = Request(self.config.prompt, self.config.seed)
    try:
      text = self.embeddings or pipeline.encode_prompts([request.prompt], models.text_encoder)
      for _, latents_BFHWC in pipeline.denoise([request], text):  # noqa: B007
        pass
      if jax.process_index() == 0:
        self.directory.mkdir(parents=True, exist_ok=True)
        frames = (frames_BTHW3[0] for frames_BTHW3 in pipeline.frames(latents_BFHWC))
        write_video(path, frames, self.config.height, self.config.width, self.config.fps)
        self.reporter.info(f"wrote {path}")
    except NotFiniteError as e:
      self.reporter.warn(f"no sample at step {step}: {e}")
    finally:
      pipeline.experts.pop(number)  # the arrays are given up with the next step
