"""Writes tests/golden/vae/: tiny Wan autoencoders with weights, inputs and outputs, and the names of the full-size one.

Needs torch and diffusers, in an environment of their own (pip install torch==2.13.0 diffusers==0.42.1):

    python tests/golden/make_vae.py

Two models: "full" has the structure of the published autoencoder (four stages 1-2-4-4, two residual blocks, 16 channels),
"small" another one (three stages 1-2-3, one block, 4 channels, strides 4 in space and 2 in time). Every weight is random,
biases and gammas too, rounded to float16 to be small; the models compute in float32. The video has 13 frames of 48 × 80.
Causality makes the outputs of 1 and 5 frames prefixes of the outputs of 13 frames, which is checked here. Decoded frames
keep every other column.
"""

import json
import pathlib

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from safetensors.torch import save_file

OUT = pathlib.Path(__file__).parent / "vae"

MODELS = {
  "full": dict(base_dim=6, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=2, temperal_downsample=[False, True, True]),
  "small": dict(base_dim=4, z_dim=4, dim_mult=[1, 2, 3], num_res_blocks=1, temperal_downsample=[False, True],
                scale_factor_spatial=4, scale_factor_temporal=2,
                latents_mean=[-0.7, 0.2, 0.5, -0.1], latents_std=[2.8, 1.4, 0.6, 1.9]),
}


def randomise(model: torch.nn.Module, generator: torch.Generator) -> None:
  """Random weights that keep activations of the order of one, so that few frames touch the clip at ±1."""
  for name, parameter in model.named_parameters():
    noise = torch.randn(parameter.shape, generator=generator)
    if name.endswith("gamma"):
      value = 1 + 0.3 * noise
    elif name.endswith("bias"):
      value = 0.2 * noise
    else:
      value = noise / parameter[0].numel() ** 0.5
    if name == "decoder.conv_out.weight":
      value = 0.4 * value
    parameter.data = value.half().float()


def channels_last(x: torch.Tensor) -> np.ndarray:
  return x.permute(0, 2, 3, 4, 1).contiguous().numpy()


@torch.no_grad()
def main():
  OUT.mkdir(exist_ok=True)
  generator = torch.Generator().manual_seed(7)
  coarse = torch.rand(1, 3, 4, 6, 10, generator=generator)
  video = torch.nn.functional.interpolate(coarse, size=(13, 48, 80), mode="trilinear")
  video = (video + 0.1 * torch.randn(video.shape, generator=generator)).clamp(0, 1)
  video_u8 = (video * 255).round().to(torch.uint8)
  video = video_u8.float() / 127.5 - 1
  np.savez_compressed(OUT / "video.npz", video=video_u8[0].permute(1, 2, 3, 0).numpy())

  for name, config in MODELS.items():
    model = AutoencoderKLWan(**config).eval()
    randomise(model, generator)
    mean, std = (torch.tensor(x).view(1, -1, 1, 1, 1) for x in (model.config.latents_mean, model.config.latents_std))
    encoded = (model.encode(video).latent_dist.mode() - mean) * (1.0 / std)
    latents = torch.randn(encoded.shape, generator=generator)
    z = latents / (1.0 / std) + mean
    frames = model.decode(z).sample
    for num_frames in (1, 5):
      num_latents = 1 + (num_frames - 1) // model.config.scale_factor_temporal
      prefix = (model.encode(video[:, :, :num_frames]).latent_dist.mode() - mean) * (1.0 / std)
      torch.testing.assert_close(prefix, encoded[:, :, :num_latents])
      torch.testing.assert_close(model.decode(z[:, :, :num_latents]).sample, frames[:, :, :num_frames])
    print(name, "latents std", float(encoded.std()), "frames std", float(frames.std()),
          "clipped", float((frames.abs() >= 1).float().mean()))
    save_file({k: v.half().contiguous() for k, v in model.state_dict().items()}, OUT / f"{name}.safetensors")
    np.savez_compressed(OUT / f"{name}.npz", encoded=channels_last(encoded), latents=channels_last(latents),
                        frames=channels_last(frames)[:, :, :, ::2])
    model.save_config(OUT / name)
    (OUT / name / "config.json").rename(OUT / f"{name}.json")
    (OUT / name).rmdir()

  with torch.device("meta"):
    model = AutoencoderKLWan()
  shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
  (OUT / "wan2.1_shapes.json").write_text(json.dumps(shapes, indent=0))


if __name__ == "__main__":
  main()
