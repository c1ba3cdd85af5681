"""Keys of training: what is refused, in which words."""

import pytest

from MaxText import pyconfig

BAD = [
  (["learning_rate=0"], ["learning_rate=0", "above 0"]),
  (["learning_rate=-1e-4"], ["learning_rate=-0.0001", "above 0"]),
  (["steps=0"], ["steps=0", "at least 1"]),
  (["global_batch_size=6", "gradient_accumulation_steps=4"],
   ["global_batch_size=6", "gradient_accumulation_steps=4", "1, 2"]),
  (["ema_decay=1"], ["ema_decay=1", "below 1"]),
  (["text_dropout=1.5"], ["text_dropout=1.5", "below 1"]),
  (["attention=svg"], ["attention=svg", "attention=flash", "gradient"]),
  (["remat_policy=some"], ["remat_policy=some", "none, minimal, full"]),
  (["warmup_steps=10"], ["warmup_steps=10", "less than steps=10"]),
  (["logit_normal_mean=1"], ["logit_normal_mean", "timestep_sampling=logit_normal"]),
  (["cosine_learning_rate_final_fraction=0"], ["cosine_learning_rate_final_fraction", "learning_rate_schedule=cosine"]),
  (["lora_alpha=2"], ["lora_alpha", "lora_rank"]),
  (["weight_dtype=bfloat16"], ["weight_dtype=bfloat16", "float32", "dtype=bfloat16"]),
  (["eval_buckets=2"], ["eval_buckets", "eval_interval"]),
  (["profiler_steps=2"], ["profiler_steps", "profiler=xplane"]),
  (["checkpoint_step=2"], ["checkpoint_step", "run_name"]),
  (["train_expert=low_noise"], ["train_expert=low_noise", "1 expert"]),
  (["model_name=wan2.2-t2v-a14b"], ["train_expert=null", "high_noise or low_noise"]),
  (["prompt=x"], ["prompt", "train does not read it"]),
  (["sample_interval=2"], ["sample_interval=2", "prompt="]),
  (["sample_interval=2", "prompt=x"], ["sample_interval=2", "load_parameters_path"]),
  (["sample_interval=2", "prompt=x", "num_videos_per_prompt=2"], ["num_videos_per_prompt", "train does not read it"]),
  (["batch_size=2"], ["batch_size", "global_batch_size"]),
  (["num_inference_steps=2"], ["num_inference_steps", "steps"]),
  (["resume=true", "run_name=x"], ["resume", "continues by itself"]),
  (["dry_run=true"], ["dry_run", "train does not read it"]),
  (["train_target=video"], ["train_target=video", "dit, text, vae"]),
  (["train_target=vae", "dataset_type=latents", "dataset_path=x"], ["dataset_type=latents", "dataset_type=video"]),
  (["train_target=vae", "text_dropout=0"], ["text_dropout", "train_target=vae"]),
  (["train_target=vae", "lora_rank=4"], ["lora_rank=4", "train_target=dit"]),
  (["vae_kl_weight=1"], ["vae_kl_weight", "train_target=vae"]),
  (["vae_freeze_encoder=true"], ["vae_freeze_encoder", "train_target=vae"]),
  (["train_target=vae", "vae_freeze_encoder=true", "vae_kl_weight=1"], ["vae_kl_weight", "vae_freeze_encoder=true"]),
  (["train_target=text", "dataset_type=video", "video_directory=."], ["train_target=text", "load_parameters_path"]),
  (["opt_type=adam"], ["opt_type=adam", "adamw, muon", "did you mean adamw"]),
  (["opt_type=muon", "lora_rank=4"], ["opt_type=muon", "LoRA", "adamw"]),
  (["muon_beta=0.9"], ["muon_beta", "opt_type=muon"]),
  (["train_latent_frames=6"], ["train_latent_frames=6", "num_frames=17 has 5", "at most 5"]),
  (["train_latent_frames=1", "patch_size=[5, 2, 2]", "override_model_config=true"], ["train_latent_frames", "[5, 2, 2]"]),
  (["train_target=vae", "train_latent_frames=1"], ["train_latent_frames", "train_target=vae"]),
  (["train_target=text", "model_name=wan2.2-t2v-a14b", "train_expert=low_noise"], ["train_target=text", "two experts"]),
]


@pytest.mark.parametrize("arguments, words", BAD, ids=lambda v: " ".join(v)[:50])
def test_refused(arguments, words):
  with pytest.raises(pyconfig.ConfigError) as error:
    pyconfig.initialize(["configs/train_video.yml", *arguments], "train", {})
  for word in words:
    assert word in str(error.value), error.value


@pytest.mark.parametrize("arguments", [
  [], ["lora_rank=4", "lora_alpha=8", "weight_dtype=bfloat16"], ["timestep_sampling=logit_normal", "logit_normal_std=2"],
  ["model_name=wan2.2-t2v-a14b", "train_expert=high_noise"], ["run_name=x", "checkpoint_step=2"],
  ["train_target=vae", "vae_kl_weight=0.001"], ["train_target=text"],
  ["opt_type=muon", "muon_beta=0.9", "train_latent_frames=5"], ["opt_type=muon", "train_target=vae"]])
def test_legal(arguments):
  assert pyconfig.initialize(["configs/train_video.yml", *arguments], "train", {}).steps == 10


def test_training_keys_do_nothing_elsewhere():
  with pytest.raises(pyconfig.ConfigError, match="learning_rate: would do nothing, decode does not train"):
    pyconfig.initialize(["tests/tiny.yml", "init_random_weights=true", "prompt=x", "learning_rate=1"], "decode", {})
