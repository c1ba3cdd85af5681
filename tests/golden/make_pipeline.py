"""Makes tests/golden/pipelines: tiny random Wan pipelines in the Diffusers folder format, and what they generate.

Run with the oracle's Python (requirements.txt beside this file), from anywhere:

  python tests/golden/make_pipeline.py [NAME ...]        # all of CASES by default

Each case becomes pipelines/NAME/ with
  pipe/        the folder: transformer[_2], vae, text_encoder, tokenizer (tokenizer.json and spiece.model), scheduler
  noise.npy    initial noise [C, F, height/8, width/8] float32
  latents.npy  final latents (normalised, as the denoising loop leaves them), same shape, float32
  frames.npz   key "frames": decoded video [T, H, W, 3] in 0..1, float16 (rounding at most 2.5e-4)
  args.json    the pipeline call (Diffusers' argument names) and solver, flow_shift, boundary_ratio

Every weight is float32 and random, biases and norm weights too, so that a missing bias, a swapped pair or a transposed
square matrix changes the result. The cases differ in heads, head dim, width, experts, VAE layout, shards and schedule.
"""

import dataclasses
import io
import json
import pathlib
import shutil
import sys

import numpy as np
import sentencepiece
import tokenizers
import torch
from diffusers import (
  AutoencoderKLWan,
  FlowMatchEulerDiscreteScheduler,
  UniPCMultistepScheduler,
  WanPipeline,
  WanTransformer3DModel,
)
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from sentencepiece import sentencepiece_model_pb2
from transformers import T5TokenizerFast, UMT5Config, UMT5EncoderModel

ROOT = pathlib.Path(__file__).parent / "pipelines"


@dataclasses.dataclass(frozen=True)
class Case:
  """One golden pipeline. The defaults are those of the first case; the others say how they differ."""

  seed: int
  prompt: str
  negative_prompt: str = ""
  height: int = 48
  width: int = 80
  num_frames: int = 13
  num_inference_steps: int = 5
  solver: str = "unipc"
  flow_shift: float = 4.0
  guidance_scale: float = 4.5
  guidance_scale_2: float | None = None  # given: two experts
  heads: int = 3
  head_dim: int = 16
  layers: int = 2
  ffn_dim: int = 104
  freq_dim: int = 48
  text_dim: int = 40
  text_heads: int = 5
  text_d_kv: int = 6
  vae_base_dim: int = 4
  vae_dim_mult: tuple[int, ...] = (1, 2, 2, 2)
  vae_num_res_blocks: int = 1
  max_shard_size: str = "10GB"


CASES = {
  # Odd token grid (4, 3, 5), three heads, one expert, sharded files with an index, the real VAE layout 3 channels wide.
  "one_expert": Case(
    seed=11,
    prompt="a red ball moves slowly right over the snow",
    negative_prompt="a green square",
    vae_base_dim=3,
    vae_dim_mult=(1, 2, 4, 4),
    vae_num_res_blocks=2,
    max_shard_size="100KB",
  ),
  # Portrait, two experts that switch inside the schedule, each with its own guidance, a prompt that needs cleaning.
  "two_experts": Case(
    seed=22,
    prompt="  two dogs &amp; a cat\nrun behind the river\t🌊 quickly ",
    negative_prompt="a blue mountain, slow",
    height=80,
    width=48,
    num_frames=5,
    num_inference_steps=6,
    flow_shift=5.0,
    guidance_scale=4.0,
    guidance_scale_2=3.0,
    heads=2,
    head_dim=24,
    ffn_dim=72,
    text_heads=3,
    text_d_kv=8,
    text_dim=32,
  ),
  # Five heads of 12, one layer, very wide, Euler, empty negative prompt.
  "five_heads_euler": Case(
    seed=33,
    prompt="the sun sets; the snow rises",
    height=32,
    width=112,
    num_frames=9,
    num_inference_steps=4,
    solver="euler",
    flow_shift=3.0,
    guidance_scale=2.5,
    heads=5,
    head_dim=12,
    layers=1,
    ffn_dim=96,
    freq_dim=32,
    text_dim=24,
    text_heads=2,
    text_d_kv=10,
  ),
  # The smallest legal picture, one frame, one step, no unconditional half, a prompt in full-width letters.
  "one_frame": Case(
    seed=44,
    prompt="ｒｅｄ　ball ① ﬁre",
    height=16,
    width=16,
    num_frames=1,
    num_inference_steps=1,
    flow_shift=1.0,
    guidance_scale=1.0,
    heads=2,
    head_dim=20,
    layers=1,
    ffn_dim=56,
    freq_dim=16,
    text_dim=16,
    text_heads=2,
    text_d_kv=6,
    vae_base_dim=2,
  ),
}


def randomise(module: torch.nn.Module, generator: torch.Generator) -> torch.nn.Module:
  """Gives every parameter a random value of a size that keeps activations near 1; returns `module` in eval mode."""
  with torch.no_grad():
    for name, parameter in module.named_parameters():
      noise = torch.randn(parameter.shape, generator=generator)
      if "scale_shift_table" in name:
        value = 0.4 * noise
      elif "gamma" in name or ("norm" in name and name.endswith("weight")):
        value = 1.0 + 0.25 * noise
      elif name.endswith("bias"):
        value = 0.15 * noise
      elif "shared" in name or "embed_tokens" in name:
        value = noise
      elif "relative_attention_bias" in name:
        value = 0.7 * noise
      else:  # linear [out, in] or convolution [out, in, ...]
        value = noise / parameter[0].numel() ** 0.5
      parameter.copy_(value)
  return module.eval()


def train_spiece(case: Case) -> bytes:
  """A sentencepiece model of random sentences, as spiece.model holds it."""
  words = "a the two and red blue green ball square cat dogs sun snow river moves rises slowly over behind".split()
  rng = np.random.default_rng(case.seed)
  sentences = (" ".join(rng.choice(words, rng.integers(4, 12))) + rng.choice([".", ",", "!"]) for _ in range(500))
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=sentences,
    model_writer=model,
    vocab_size=90,
    hard_vocab_limit=False,
    pad_id=0,
    eos_id=1,
    unk_id=2,
    bos_id=-1,
    normalization_rule_name="identity",  # the real model's NFKC table would take 0.5 MB here
    minloglevel=2,
  )
  return model.getvalue()


def fast_tokenizer(spiece: bytes) -> T5TokenizerFast:
  """The tokenizer that the oracle uses, equal to the sentencepiece model."""
  proto = sentencepiece_model_pb2.ModelProto.FromString(spiece)
  vocab = [(piece.piece, piece.score) for piece in proto.pieces]
  fast = tokenizers.Tokenizer(tokenizers.models.Unigram(vocab, unk_id=2, byte_fallback=False))
  fast.normalizer = tokenizers.normalizers.Replace(tokenizers.Regex(" {2,}"), " ")
  fast.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
  fast.decoder = tokenizers.decoders.Metaspace(replacement="▁", prepend_scheme="always")
  fast.post_processor = tokenizers.processors.TemplateProcessing(
    single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
  )
  return T5TokenizerFast(
    tokenizer_object=fast, extra_ids=0, eos_token="</s>", unk_token="<unk>", pad_token="<pad>", model_max_length=512
  )


def make_pipe(case: Case, tokenizer: T5TokenizerFast) -> WanPipeline:
  """Builds the random pipeline of `case`."""
  generator = torch.Generator().manual_seed(case.seed)

  def transformer() -> WanTransformer3DModel:
    return randomise(
      WanTransformer3DModel(
        num_attention_heads=case.heads,
        attention_head_dim=case.head_dim,
        in_channels=16,
        out_channels=16,
        text_dim=case.text_dim,
        freq_dim=case.freq_dim,
        ffn_dim=case.ffn_dim,
        num_layers=case.layers,
      ),
      generator,
    )

  text_encoder = UMT5EncoderModel(
    UMT5Config(
      vocab_size=len(tokenizer) + 6,  # the real table is longer than the tokenizer, too
      d_model=case.text_dim,
      d_kv=case.text_d_kv,
      d_ff=2 * case.text_dim + 4,
      num_layers=2,
      num_heads=case.text_heads,
      feed_forward_proj="gated-gelu",
    )
  )
  vae = AutoencoderKLWan(
    base_dim=case.vae_base_dim,
    z_dim=16,
    dim_mult=list(case.vae_dim_mult),
    num_res_blocks=case.vae_num_res_blocks,
    temperal_downsample=[False, True, True],
  )
  if case.solver == "unipc":
    scheduler = UniPCMultistepScheduler(
      prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=case.flow_shift
    )
  else:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=case.flow_shift)
  experts = {"transformer": transformer()}
  if case.guidance_scale_2 is not None:
    experts |= {"transformer_2": transformer(), "boundary_ratio": 0.875}
  vae = randomise(vae, generator)
  with torch.no_grad():
    vae.decoder.conv_out.weight.mul_(0.7)  # most pixels inside (-1, 1), where an error is not clipped away
  text_encoder = randomise(text_encoder, generator)
  return WanPipeline(tokenizer=tokenizer, text_encoder=text_encoder, vae=vae, scheduler=scheduler, **experts)


def check_tokens(pipe: WanPipeline, spiece: bytes, prompt: str) -> None:
  """Fails where tokenizer.json, which the oracle reads, and spiece.model, which we read, disagree about `prompt`."""
  cleaned = prompt_clean(prompt)
  expected = sentencepiece.SentencePieceProcessor(model_proto=spiece).encode(cleaned) + [1]
  got = pipe.tokenizer(cleaned).input_ids
  if got != expected:
    raise AssertionError(f"tokenizer.json gives {got}, spiece.model {expected} for {cleaned!r}")


def make_case(name: str) -> None:
  """Writes pipelines/`name`, replacing what is there."""
  case, out = CASES[name], ROOT / name
  shutil.rmtree(out, ignore_errors=True)
  out.mkdir(parents=True)
  spiece = train_spiece(case)
  make_pipe(case, fast_tokenizer(spiece)).save_pretrained(out / "pipe", max_shard_size=case.max_shard_size)
  (out / "pipe" / "tokenizer" / "spiece.model").write_bytes(spiece)
  pipe = WanPipeline.from_pretrained(out / "pipe")  # what is on disk is what generates
  pipe.set_progress_bar_config(disable=True)
  for text in (case.prompt, case.negative_prompt):
    check_tokens(pipe, spiece, text)

  call = {
    "prompt": case.prompt,
    "negative_prompt": case.negative_prompt,
    "height": case.height,
    "width": case.width,
    "num_frames": case.num_frames,
    "num_inference_steps": case.num_inference_steps,
    "guidance_scale": case.guidance_scale,
  }
  if case.guidance_scale_2 is not None:
    call["guidance_scale_2"] = case.guidance_scale_2
  shape = (16, 1 + (case.num_frames - 1) // 4, case.height // 8, case.width // 8)
  noise = np.random.default_rng(case.seed + 1).standard_normal(shape).astype(np.float32)
  latents = pipe(**call, latents=torch.from_numpy(noise)[None], output_type="latent").frames[0].numpy()
  frames = pipe(**call, latents=torch.from_numpy(noise)[None], output_type="np").frames[0]

  np.save(out / "noise.npy", noise)
  np.save(out / "latents.npy", latents)
  np.savez_compressed(out / "frames.npz", frames=frames.astype(np.float16))
  extra = {
    "solver": case.solver,
    "flow_shift": case.flow_shift,
    "boundary_ratio": 0.875 if case.guidance_scale_2 is not None else None,
  }
  (out / "args.json").write_text(json.dumps(call | extra, indent=2, ensure_ascii=False) + "\n")
  mib = sum(path.stat().st_size for path in out.rglob("*") if path.is_file()) / 2**20
  clipped = float(np.mean((frames == 0) | (frames == 1)))
  print(
    f"{name}: {mib:.2f} MiB, latents {latents.shape} std {latents.std():.3f}, frames {frames.shape} "
    f"std {frames.std():.3f} clipped {clipped:.3f}, timesteps {pipe.scheduler.timesteps.tolist()}"
  )


if __name__ == "__main__":
  for case_name in sys.argv[1:] or CASES:
    make_case(case_name)
