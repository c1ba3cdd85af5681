"""The schema: every key once, with its type, default, group and one line of documentation.

configs/base.yml lists the same keys with their trade-offs, and a test holds the two equal. `pyconfig` fills the schema
from files, environment and command line; `config_checks` holds the rules that join several keys.
"""

from __future__ import annotations

import types
import typing
from typing import Annotated, Any, Literal, Union

import annotated_types as at
import pydantic


class RunError(RuntimeError):
  """A run that failed for a reason its message tells in full: printed without a traceback, exit status 1."""


class ConfigError(ValueError):
  """A wrong configuration or input. Commands print its message without a traceback and exit with status 2."""


GROUPS = {
    "run": "what runs, from which weights, and where the output goes",
    "sampling": "the prompt and how the video is sampled",
    "attention": "the kind of attention, and Sparse VideoGen (svg_*)",
    "memory": "number formats, and what bounds memory",
    "mesh": "how devices share the work",
    "training": "the loss, the optimizer, and what a training run writes (train only)",
    "data": "videos, captions, and the dataset that is made of them",
    "conversion": "convert_checkpoint only",
    "architecture": "dimensions of the networks; set by the model file or the weights folder, not by hand",
}

Count = Annotated[int, at.Ge(1)]
Index = Annotated[int, at.Ge(0)]
Positive = Annotated[float, at.Gt(0)]
NonNegative = Annotated[float, at.Ge(0)]
Density = Annotated[float, at.Gt(0), at.Le(1)]
Fraction = Annotated[float, at.Gt(0), at.Lt(1)]
Share = Annotated[float, at.Ge(0), at.Lt(1)]  # of a decay or a probability: 0 turns it off
Part = Annotated[float, at.Ge(0), at.Le(1)]
Seed = Annotated[int, at.Ge(0), at.Le(2**63 - 1)]
AxisSize = Literal[-1] | Count
FloatName = Literal["float32", "bfloat16"]
LoraExpert = Literal["both", "high_noise", "low_noise"]
AxisRule = tuple[str, str | tuple[str, ...] | None]

DEFAULT_AXIS_RULES: tuple[AxisRule, ...] = (
    ("batch", ("data", "fsdp")),
    ("tokens", "context"),
    ("heads", "tensor"),
    ("mlp", "tensor"),
    ("embed", ("fsdp", "context")),
    ("vocab", ("fsdp", "tensor")),
    ("conv_in", None),
    ("conv_out", None),
    ("norm", None),
    ("layers", None),
)


def _key(group: str, default: Any, doc: str) -> Any:
  return pydantic.Field(default=default, description=doc, json_schema_extra={"group": group})


class Settings(pydantic.BaseModel):
  """All keys as flat, frozen, strictly typed attributes. None means "not set"."""

  model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

  # --- run
  model_name: str = _key("run", "", "a model of configs/models, or empty: the weights folder decides")
  load_parameters_path: str | None = _key("run", None,
    "weights: a Diffusers folder, an original Wan release, or our Orbax checkpoint")
  init_random_weights: bool = _key("run", False, "use random weights: for benchmarks and tests, the video is noise")
  override_model_config: bool = _key("run", False,
    "let architecture keys differ from the model file or the weights folder")
  base_output_directory: str = _key("run", "outputs", "folder that holds one folder a run")
  run_name: str = _key("run", "", "name of this run's folder; empty makes a fresh one from model, attention and time")
  resume: bool = _key("run", False, "continue an existing run: skip finished videos, make the missing ones")
  dry_run: bool = _key("run", False, "print the plan (tokens, memory, time, what is dense) and stop")
  log_format: Literal["text", "quiet", "json"] = _key("run", "text",
    "progress for people, only errors, or one JSON object a line")
  compile_topology: str | None = _key("run", None,
    "compile ahead of time for this TPU topology (v6e:2x4) instead of the devices here")
  jax_cache_dir: str | None = _key("run", "~/.cache/maxtext-video/jax",
    "keeps compiled programs between runs; null turns it off")

  # --- sampling
  prompt: str | None = _key("sampling", None, "what the video shows")
  negative_prompt: str = _key("sampling", "", "what the video should not show; used when guidance is not 1")
  prompts_file: str | None = _key("sampling", None, "UTF-8 text file with one prompt a line, instead of prompt")
  num_videos_per_prompt: Count = _key("sampling", 1, "videos of each prompt, each with a seed of its own")
  batch_size: Count = _key("sampling", 1, "videos generated together")
  height: Count = _key("sampling", 480, "picture height in pixels, a multiple of 16")
  width: Count = _key("sampling", 832, "picture width in pixels, a multiple of 16")
  num_frames: Count = _key("sampling", 81, "frames of the video, 4n+1; 1 makes a picture")
  fps: Positive = _key("sampling", 16.0, "frames a second of the written file")
  num_inference_steps: Count = _key("sampling", 50, "denoising steps")
  guidance_scale: NonNegative | tuple[NonNegative, ...] = _key("sampling", 5.0,
    "classifier-free guidance: one number, or one an expert (high noise first); 1 skips the unconditional half")
  flow_shift: Positive = _key("sampling", 3.0, "shift s of the noise levels, s·σ/(1+(s−1)·σ)")
  rope_stretch: Positive = _key("sampling", 1.0,
    "spread of the tokens' rows and columns: 4 gives a small picture the positions of one 4 times as wide and high")
  boundary_ratio: Fraction | None = _key("sampling", None,
    "noise level at which the low-noise expert takes over (two experts only)")
  solver: Literal["unipc", "euler"] = _key("sampling", "unipc", "UniPC of order 2 (bh2), or Euler")
  seed: Seed = _key("sampling", 0, "seed of the noise, 0 to 2^63−1")
  initial_noise_path: str | None = _key("sampling", None,
    "start from this .npy: float32, [channels, F, height/8, width/8]")
  save_latents: bool = _key("sampling", False, "keep the final latents beside the video")
  latents_path: str | None = _key("sampling", None, "decode these saved latents to video again, without denoising")
  compare_dense: bool = _key("sampling", False, "also run dense attention with the same seed, and report PSNR and SSIM")
  lora_path: str | tuple[str, ...] | None = _key("sampling", None,
    "one LoRA file or a list of them, merged into the weights")
  lora_weight: float | tuple[float, ...] = _key("sampling", 1.0, "strength of the LoRA: one number, or one a file")
  lora_expert: LoraExpert | tuple[LoraExpert, ...] = _key("sampling", "both",
    "the expert that the LoRA changes: one choice, or one a file; both for models with one expert")

  # --- attention
  attention: Literal["dot_product", "flash", "svg"] = _key("attention", "flash",
    "plain and memory-bounded; the fastest dense kernel of the device; or Sparse VideoGen")
  context_parallel_strategy: Literal["none", "ulysses"] = _key("attention", "none",
    "how attention crosses the context axis: not at all, or by all-to-all (heads sharded, tokens whole)")
  flash_block_q: Count | None = _key("attention", None, "query tile of the dense kernel; null takes the tuned one")
  flash_block_kv: Count | None = _key("attention", None, "key tile of the dense kernel; null takes the tuned one")
  svg_schedule: str = _key("attention", "moderate",
    "conservative, moderate, aggressive, or a YAML file of step and layer intervals")
  svg_density: Density | tuple[Density, ...] | None = _key("attention", None,
    "kept share of the band: one number, or one an expert; null takes the schedule's")
  svg_start_step: Index | None = _key("attention", None, "first sparse step; null takes the schedule's")
  svg_end_step: Index | None = _key("attention", None, "step after the last sparse one; null takes the schedule's")
  svg_start_layer: Index | None = _key("attention", None, "first sparse layer; null takes the schedule's")
  svg_end_layer: Index | None = _key("attention", None, "layer after the last sparse one; null takes the schedule's")
  svg_band_width: Index | None = _key("attention", None, "half-width of the band in tokens, in place of a density")
  svg_sink: Literal["frame", "prefix"] = _key("attention", "frame",
    "what every query keeps: the true first frames, or the first keys in the head's own order")
  svg_sink_frames: Index = _key("attention", 1, "latent frames in the sink; 0 for none")
  svg_num_sampled_queries: Count = _key("attention", 64, "queries sampled to tell spatial from temporal heads")
  svg_routing: Literal["dynamic", "spatial", "temporal"] = _key("attention", "dynamic",
    "decide each head from its queries and keys, or make all heads one kind")
  svg_kernel: Literal["naive", "exact", "aligned"] = _key("attention", "aligned",
    "mask every tile, mask only boundary tiles, or round the band to whole tiles")
  svg_layout: Literal["head_local", "pre_exchange", "in_kernel"] = _key("attention", "head_local",
    "where temporal heads are permuted: after the exchange, before it, or inside the kernel")
  svg_block_q: Count | None = _key("attention", None, "query tile of the sparse kernel; null takes the tuned one")
  svg_block_kv: Count | None = _key("attention", None, "key tile of the sparse kernel; null takes the tuned one")

  # --- memory
  dtype: FloatName = _key("memory", "bfloat16", "what the networks compute in")
  weight_dtype: FloatName = _key("memory", "bfloat16", "what the weights are stored in")
  vae_tile_size: Count | None = _key("memory", None,
    "decode the picture in square tiles of this many pixels; null decodes it whole")
  vae_tile_overlap: Count = _key("memory", 64, "pixels that neighbouring tiles share and blend")

  # --- mesh
  ici_data_parallelism: AxisSize = _key("mesh", 1, "devices of a slice that share the batch (guidance halves and videos)")
  ici_fsdp_parallelism: AxisSize = _key("mesh", -1, "devices of a slice that share the weights, gathered layer by layer")
  ici_context_parallelism: AxisSize = _key("mesh", 1, "devices of a slice that share the tokens")
  ici_tensor_parallelism: AxisSize = _key("mesh", 1, "devices of a slice that share each matrix product")
  dcn_data_parallelism: AxisSize = _key("mesh", -1, "slices that share the batch")
  dcn_fsdp_parallelism: AxisSize = _key("mesh", 1, "slices that share the weights")
  dcn_context_parallelism: AxisSize = _key("mesh", 1, "slices that share the tokens")
  dcn_tensor_parallelism: AxisSize = _key("mesh", 1, "slices that share each matrix product")
  logical_axis_rules: tuple[AxisRule, ...] = _key("mesh", DEFAULT_AXIS_RULES,
    "which mesh axes shard which named array dimension")
  sharding_tolerance: NonNegative = _key("mesh", 0.02,
    "share of a device's weight bytes that may lie above a perfect split")
  debug_sharding: bool = _key("mesh", False, "print the sharding of every parameter")

  # --- training
  train_target: Literal["dit", "text", "vae"] = _key("training", "dit",
    "what is trained: the transformer; transformer and text encoder together; or the VAE, by reconstruction")
  vae_mse_weight: NonNegative = _key("training", 1.0,
    "weight of the VAE's mean square error of a pixel, beside the mean absolute error")
  vae_kl_weight: NonNegative = _key("training", 1e-6,
    "weight of the VAE's divergence from a normal distribution, beside the mean absolute error of a pixel")
  vae_freeze_encoder: bool = _key("training", False,
    "train the VAE's decoder alone: latents stay what they are, and transformers trained on them still fit")
  steps: Count = _key("training", 1000, "optimizer steps of the whole run, those before a restart included")
  global_batch_size: Count = _key("training", 1, "samples of one optimizer step, over all devices")
  gradient_accumulation_steps: Count = _key("training", 1, "parts that a batch is worked through in, one after the other")
  opt_type: Literal["adamw", "muon"] = _key("training", "adamw",
    "AdamW for all weights; or Muon for the inner matrices and AdamW for the rest")
  muon_beta: Share = _key("training", 0.95, "decay of Muon's mean of the gradient")
  learning_rate: Positive = _key("training", 1e-5, "highest learning rate")
  learning_rate_schedule: Literal["constant", "cosine"] = _key("training", "constant", "what follows the warm-up")
  warmup_steps: Index = _key("training", 0, "steps over which the learning rate rises from 0")
  cosine_learning_rate_final_fraction: Part = _key("training", 0.1,
    "learning rate at the last step of the cosine, as a part of the highest")
  adam_b1: Share = _key("training", 0.9, "decay of AdamW's mean of the gradient")
  adam_b2: Share = _key("training", 0.999, "decay of AdamW's mean of the squared gradient")
  adam_eps: Positive = _key("training", 1e-8, "keeps AdamW's quotient finite")
  adam_weight_decay: NonNegative = _key("training", 0.01, "weight decay of the matrices, times the learning rate")
  gradient_clipping_threshold: NonNegative = _key("training", 1.0, "largest norm of the whole gradient; 0 turns it off")
  ema_decay: Share = _key("training", 0.0, "decay of the averaged weights that are then sampled from; 0 keeps none")
  timestep_sampling: Literal["uniform", "logit_normal"] = _key("training", "uniform",
    "distribution of the noise levels, before flow_shift")
  logit_normal_mean: float = _key("training", 0.0, "mean of the logit; above 0 trains more at high noise")
  logit_normal_std: Positive = _key("training", 1.0, "deviation of the logit")
  train_latent_frames: Count | None = _key("training", None,
    "train on this many latent frames of each clip, the first and random others at their own times; null takes all")
  text_dropout: Share = _key("training", 0.1, "share of samples that are trained on the empty prompt, for guidance")
  remat_policy: Literal["none", "minimal", "full"] = _key("training", "full",
    "what the backward pass computes again: nothing, all but the matrix products, or whole blocks")
  train_expert: Literal["high_noise", "low_noise"] | None = _key("training", None,
    "the expert that is trained, at its own noise levels; for models with two")
  lora_rank: Index = _key("training", 0, "trains adapters of this rank and keeps the weights; 0 trains all weights")
  lora_alpha: Positive | None = _key("training", None,
    "strength of the adapters is this over the rank; null takes the rank")
  load_full_state_path: str | None = _key("training", None,
    "a training checkpoint of another run to continue: weights, optimizer, step and data")
  checkpoint_period: Index = _key("training", 500, "steps between checkpoints; 0 writes only the last")
  checkpoint_step: Index | None = _key("training", None, "continue this run from this checkpoint, not from its latest")
  max_checkpoints_to_keep: Count = _key("training", 2, "the newest checkpoints that are kept")
  async_checkpointing: bool = _key("training", True, "write checkpoints while training goes on")
  eval_interval: Index = _key("training", 0, "steps between evaluations; 0 makes none")
  eval_steps: Count = _key("training", 1, "batches of an evaluation")
  eval_buckets: Count = _key("training", 4, "equal parts of the noise levels whose losses are told apart")
  write_metrics: bool = _key("training", True, "write metrics.jsonl, one line a step")
  profiler: Literal["none", "xplane"] = _key("training", "none", "write a trace of some steps for XProf or TensorBoard")
  skip_first_n_steps_for_profiler: Index = _key("training", 1, "steps of this start that pass before the trace begins")
  profiler_steps: Count = _key("training", 3, "steps in the trace")
  write_tensorboard: bool = _key("training", False, "write the metrics for TensorBoard too")
  sample_interval: Index = _key("training", 0, "steps between sample videos of prompt; 0 makes none")

  # --- data
  dataset_type: Literal["synthetic", "latents", "video"] = _key("data", "synthetic",
    "random latents, for tests and benchmarks; the shards of encode_dataset; or videos, encoded during training")
  dataset_path: str | None = _key("data", None, "folder of shards: encode_dataset writes it, training reads it")
  video_directory: str | None = _key("data", None, "folder of videos with captions")
  size_buckets: tuple[tuple[Count, Count], ...] | None = _key("data", None,
    "sizes [height, width] of clips, each video takes the nearest in aspect; null takes height and width")
  clips_per_video: Count = _key("data", 1, "clips taken from a video at most, one after the other from its start")
  eval_fraction: Share = _key("data", 0.0, "share of the videos that is kept for evaluation")
  num_data_workers: Count = _key("data", 2, "threads that read shards and decode videos")
  dataset_dtype: FloatName = _key("data", "float32", "what latents and text embeddings are stored in")
  clips_per_shard: Count = _key("data", 64, "clips in one shard")
  tokenizer_path: str | None = _key("data", None, "the folder that train_tokenizer writes spiece.model to")
  tokenizer_vocab_size: Annotated[int, at.Ge(16)] = _key("data", 8000, "most pieces that train_tokenizer learns")
  tokenizer_max_length: Annotated[int, at.Ge(2), at.Le(512)] = _key("data", 512,
    "tokens that prompts are padded to and cut at by the models that use what train_tokenizer learns")

  # --- conversion
  convert_to: Literal["orbax", "diffusers"] = _key("conversion", "orbax",
    "our checkpoint, or a Diffusers folder")
  converted_path: str | None = _key("conversion", None, "the folder that convert_checkpoint writes")
  converted_dtype: FloatName | None = _key("conversion", None,
    "type of the written matrices, embeddings and convolutions; null keeps every weight as it is stored")

  # --- architecture: the transformer
  patch_size: tuple[Count, Count, Count] = _key("architecture", (1, 2, 2),
    "latent frames, rows and columns that make one token")
  num_heads: Count = _key("architecture", 40, "attention heads")
  head_dim: Count = _key("architecture", 128, "dimensions of a head")
  in_channels: Count = _key("architecture", 16, "latent channels read")
  out_channels: Count = _key("architecture", 16, "latent channels predicted")
  text_dim: Count = _key("architecture", 4096, "width of the text embeddings that the transformer reads")
  freq_dim: Count = _key("architecture", 256, "width of the sinusoidal time embedding")
  ffn_dim: Count = _key("architecture", 13824, "width of the feed-forward layer")
  num_layers: Count = _key("architecture", 40, "transformer blocks")
  norm_eps: Positive = _key("architecture", 1e-6, "epsilon of the norms")
  num_experts: Annotated[int, at.Ge(1), at.Le(2)] = _key("architecture", 1,
    "one transformer, or a high-noise and a low-noise one")
  # --- architecture: the VAE
  vae_base_dim: Count = _key("architecture", 96, "channels of the VAE's first stage")
  vae_z_dim: Count = _key("architecture", 16, "latent channels of the VAE")
  vae_dim_mult: tuple[Count, ...] = _key("architecture", (1, 2, 4, 4),
    "channels of each VAE stage as multiples of the first")
  vae_num_res_blocks: Count = _key("architecture", 2, "residual blocks in a VAE stage")
  vae_temporal_downsample: tuple[bool, ...] = _key("architecture", (False, True, True),
    "which VAE stages halve the number of frames")
  # --- architecture: the text encoder
  text_vocab_size: Count = _key("architecture", 256384, "tokens of the text encoder")
  text_d_model: Count = _key("architecture", 4096, "width of the text encoder")
  text_d_kv: Count = _key("architecture", 64, "dimensions of a text encoder head")
  text_d_ff: Count = _key("architecture", 10240, "width of the text encoder's feed-forward layer")
  text_num_layers: Count = _key("architecture", 24, "text encoder blocks")
  text_num_heads: Count = _key("architecture", 64, "text encoder heads")
  text_num_buckets: Count = _key("architecture", 32, "buckets of the relative position bias")
  text_max_distance: Count = _key("architecture", 128, "distance beyond which positions share a bucket")


KEYS: dict[str, pydantic.fields.FieldInfo] = Settings.model_fields
FREE_TEXT = frozenset({"prompt", "negative_prompt"})  # any text is a value here, "null" and "" too


def group_of(key: str) -> str:
  return KEYS[key].json_schema_extra["group"]


def keys_of(group: str) -> tuple[str, ...]:
  return tuple(key for key in KEYS if group_of(key) == group)


ARCHITECTURE = frozenset(keys_of("architecture"))


def _is_union(annotation: Any) -> bool:
  return typing.get_origin(annotation) in (Union, types.UnionType)


def branches(key: str) -> tuple[Any, ...]:
  """The alternatives of a key's type, bounds included, None left out."""
  field = KEYS[key]
  annotation = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
  options = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
  return tuple(option for option in options if option is not types.NoneType)


def may_be_none(key: str) -> bool:
  annotation = KEYS[key].annotation
  return _is_union(annotation) and types.NoneType in typing.get_args(annotation)


def _choices(option: Any) -> tuple[Any, ...]:
  return typing.get_args(option) if typing.get_origin(option) is Literal else ()


def choices(key: str) -> tuple[Any, ...]:
  """The values that the key may take when they are a fixed few, else ()."""
  return _choices(branches(key)[0])


def is_text(key: str) -> bool:
  """Whether a scalar written for this key is text whatever it looks like ("yes", "12", "a: b")."""
  return any(option is str for option in branches(key)) or any(isinstance(choice, str) for choice in choices(key))


def may_be_list(key: str) -> bool:
  return any(typing.get_origin(option) is tuple for option in branches(key))


_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false", types.NoneType: "null"}
_BOUNDS = ((at.Ge, "ge", "at least"), (at.Gt, "gt", "above"), (at.Le, "le", "at most"), (at.Lt, "lt", "below"))


def _words(option: Any) -> str:
  if option in _NAMES:
    return _NAMES[option]
  origin, args = typing.get_origin(option), typing.get_args(option)
  if origin is Annotated:
    limits = [f"{word} {getattr(bound, name)}" for bound in args[1:] for kind, name, word in _BOUNDS
              if isinstance(bound, kind)]
    return f"{_words(args[0])}, {' and '.join(limits)}"
  if origin is Literal:
    return ("one of " if len(args) > 1 else "") + ", ".join(str(arg) for arg in args)
  if origin is tuple and args[-1] is Ellipsis:
    return f"a list, each {_words(args[0])}"
  if origin is tuple:
    return f"a list of {len(args)}, each {_words(args[0])}" if len(set(args)) == 1 else (
        "a list [" + ", ".join(_words(arg) for arg in args) + "]")
  return " or ".join(_words(arg) for arg in args)


def expected(key: str) -> str:
  """What values the key takes, in words: "a number, above 0 and at most 1, or a list of such"."""
  first, *rest = branches(key)
  words = _words(first)
  if may_be_list(key) and rest:
    words += ", or a list of such"
  elif rest:
    words += f", or {_words(rest[0])}"
  return words + (", or null" if may_be_none(key) and key not in FREE_TEXT else "")


def as_yaml(value: Any) -> str:
  """A value as it is written in YAML and on the command line."""
  if isinstance(value, (list, tuple)):
    return "[" + ", ".join(as_yaml(item) for item in value) + "]"
  if value is None or isinstance(value, bool):
    return {None: "null", True: "true", False: "false"}[value]
  return f"{value:g}" if isinstance(value, float) and f"{value:g}" == f"{value:.12g}" else str(value)
