"""Rules of the keys of a training run, and of training keys given to another command. See `config_checks`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from MaxText import config_types

if TYPE_CHECKING:
  from MaxText.config_checks import Facts

# Keys of other groups that train reads; the rest of these groups would do nothing.
_READ = frozenset({"height", "width", "num_frames", "fps", "flow_shift", "rope_stretch", "boundary_ratio", "seed"})
_SAMPLING = frozenset({"prompt", "negative_prompt", "num_inference_steps", "guidance_scale", "solver"})  # sample videos
_UNREAD_RUN = frozenset({"resume", "dry_run"})
_INSTEAD = {
  "resume": "a run with checkpoints continues by itself when its run_name is given",
  "dry_run": "MaxText.train_compile runs nothing, and shows the memory and FLOPs of a step",
  "batch_size": "the key of training is global_batch_size",
  "lora_path": "to train a LoRA set lora_rank",
  "num_inference_steps": "the key of training is steps; sample videos need sample_interval",
  "prompt": "for a video of it every so often set sample_interval",
}


def check_training(facts: Facts) -> Iterator[str]:
  """Problems of the group 'training'."""
  if not facts.training:
    for key in sorted(facts.user_keys & set(config_types.keys_of("training"))):
      yield f"{key}: would do nothing, {facts.command} does not train; leave it out, or use python -m MaxText.train"
    return
  sampling = _SAMPLING if facts.config.sample_interval else frozenset()
  unread = (set(config_types.keys_of("sampling")) - _READ - sampling) | _UNREAD_RUN
  for key in sorted(facts.user_keys & unread):
    yield f"{key}: {facts.command} does not read it; " + _INSTEAD.get(key, "leave it out")
  yield from _target(facts)
  yield from _model(facts)
  yield from _batch(facts)
  yield from _idle(facts)
  yield from _samples(facts)


def _target(facts: Facts) -> Iterator[str]:
  c = facts.config
  if c.train_target == "vae":
    if c.dataset_type == "latents":
      yield "dataset_type=latents: the VAE is trained on videos; use dataset_type=video video_directory=FOLDER"
    for key in ("text_dropout", "timestep_sampling", "flow_shift", "rope_stretch", "train_expert",
                "train_latent_frames"):
      if key in facts.user_keys:
        yield f"{key}: would do nothing, train_target=vae has no noise levels, texts or experts; leave it out"
  else:
    for key in sorted({"vae_mse_weight", "vae_kl_weight", "vae_freeze_encoder"} & facts.user_keys):
      yield f"{key}: would do nothing without train_target=vae; add it, or leave this out"
  if c.vae_freeze_encoder and c.train_target == "vae" and "vae_kl_weight" in facts.user_keys:
    yield "vae_kl_weight: would do nothing, vae_freeze_encoder=true keeps the latents as they are; leave it out"
  if c.train_target == "text" and c.dataset_type != "synthetic" and c.load_parameters_path is None \
     and c.load_full_state_path is None:
    yield ("train_target=text: needs load_parameters_path, because captions are read by a model's tokenizer; "
           "convert_checkpoint makes a folder of random weights around a new tokenizer")
  if c.train_target != "dit" and c.lora_rank:
    yield f"lora_rank={c.lora_rank}: a LoRA is made of the transformer alone; use train_target=dit, or leave it out"
  if c.opt_type == "muon" and c.lora_rank:
    yield "opt_type=muon: the thin matrices of a LoRA are trained by adamw; leave it out"
  if c.train_latent_frames is not None:
    frames = c.latent_grid[0]
    if c.patch_size[0] != 1:
      yield f"train_latent_frames: needs tokens of one latent frame, and patch_size={list(c.patch_size)}; leave it out"
    elif c.train_latent_frames > frames:
      yield f"train_latent_frames={c.train_latent_frames}: num_frames={c.num_frames} has {frames}; give at most {frames}"
  if c.train_target == "text" and c.num_experts == 2:
    yield ("train_target=text: both experts read the same text encoder, and one is trained at a time; use "
           "train_target=dit for models with two experts")


def _model(facts: Facts) -> Iterator[str]:
  c = facts.config
  if c.attention == "svg":
    yield ("attention=svg: training is dense, the sparse kernels have no gradient; use attention=flash, and "
           "attention=svg when you decode what was trained")
  if c.num_experts == 2 and c.train_expert is None:
    yield "train_expert=null: the model has 2 experts and one is trained at a time; give high_noise or low_noise"
  if c.num_experts == 1 and c.train_expert is not None:
    yield f"train_expert={c.train_expert}: the model has 1 expert, so it would do nothing; leave it out"
  if c.lora_rank == 0 and "weight_dtype" in facts.user_keys and c.weight_dtype != "float32":
    yield (f"weight_dtype={c.weight_dtype}: weights that are trained are always float32 (small steps vanish in "
           "bfloat16); leave it out, and set dtype=bfloat16 to compute in bfloat16")
  if c.load_full_state_path is not None and c.load_parameters_path is not None:
    yield ("load_full_state_path and load_parameters_path are both set: a training checkpoint holds the weights too; "
           "keep one")


def _batch(facts: Facts) -> Iterator[str]:
  c = facts.config
  batch, parts = c.global_batch_size, c.gradient_accumulation_steps
  if batch % parts:
    fits = [n for n in range(1, batch + 1) if batch % n == 0]
    yield (f"global_batch_size={batch}: not divisible by gradient_accumulation_steps={parts}; "
           f"choices: {', '.join(map(str, fits))}")
  if c.warmup_steps >= c.steps and c.warmup_steps:
    yield f"warmup_steps={c.warmup_steps}: must be less than steps={c.steps}"


def _idle(facts: Facts) -> Iterator[str]:
  """Keys that the value of another key switches off."""
  c = facts.config
  switches = (
    (c.timestep_sampling == "logit_normal", ("logit_normal_mean", "logit_normal_std"), "timestep_sampling=logit_normal"),
    (c.learning_rate_schedule == "cosine", ("cosine_learning_rate_final_fraction",), "learning_rate_schedule=cosine"),
    (c.lora_rank > 0, ("lora_alpha",), "lora_rank"),
    (c.opt_type == "muon", ("muon_beta",), "opt_type=muon"),
    (c.eval_interval > 0, ("eval_steps", "eval_buckets"), "eval_interval"),
    (c.profiler != "none", ("skip_first_n_steps_for_profiler", "profiler_steps"), "profiler=xplane"),
    (facts.config.set_by_user("run_name"), ("checkpoint_step",), "run_name, the run to continue"),
  )
  for on, keys, switch in switches:
    for key in keys:
      if not on and key in facts.user_keys:
        yield f"{key}: would do nothing without {switch}; add it, or leave this out"


def _samples(facts: Facts) -> Iterator[str]:
  c = facts.config
  if not c.sample_interval:
    return
  if c.train_target == "vae":
    yield (f"sample_interval={c.sample_interval}: train_target=vae makes no videos of prompts; leave it out, and set "
           "eval_interval to see how well videos are reconstructed")
    return
  if c.prompt is None:
    yield f'sample_interval={c.sample_interval}: give prompt="…", what the sample videos show'
  if c.load_parameters_path is None:
    yield (f"sample_interval={c.sample_interval}: needs load_parameters_path, a model whose text encoder and VAE make "
           "the sample videos; give it, or leave sample_interval out")
