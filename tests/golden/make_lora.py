"""Tiny LoRAs in the original release's names, and what the reference makes of them. Writes lora_<style>.safetensors.

  python tests/golden/make_lora.py        (needs torch 2.13, diffusers 0.42.1)

Each file holds the LoRA as it would be downloaded (in.<name>) and, for every weight and bias that the reference's
conversion to Diffusers names touches, what is added to it (out.<diffusers name>): lora_B @ lora_A, or the bias.
"""

import pathlib

import torch
from diffusers.loaders.lora_conversion_utils import (
  _convert_musubi_wan_lora_to_diffusers,
  _convert_non_diffusers_wan_lora_to_diffusers,
)
from safetensors.torch import save_file

WIDTH, FFN, TEXT, FREQ, LAYERS, RANK = 12, 20, 10, 8, 2, 3  # as TINY in tests/unit/test_checkpoints_lora.py
SHAPES = {f"{a}.{m}": (WIDTH, WIDTH) for a in ("self_attn", "cross_attn") for m in "qkvo"}
SHAPES |= {"ffn.0": (FFN, WIDTH), "ffn.2": (WIDTH, FFN)}
TOP = {"text_embedding.0": (WIDTH, TEXT), "text_embedding.2": (WIDTH, WIDTH), "time_embedding.0": (WIDTH, FREQ),
       "time_embedding.2": (WIDTH, WIDTH), "time_projection.1": (6 * WIDTH, WIDTH), "head.head": (64, WIDTH)}


def blocks(separator):
  for i in range(LAYERS):
    for module, shape in SHAPES.items():
      yield f"blocks.{i}.{module}".replace(".", separator), shape


def pair(lora, module, shape, down, up):
  lora[f"{module}.{down}.weight"] = torch.randn(RANK, shape[1])
  lora[f"{module}.{up}.weight"] = torch.randn(shape[0], RANK)


def write(style, lora, convert):
  converted = convert({name: tensor.clone() for name, tensor in lora.items()})  # it scales some in place
  out = {}
  for name, tensor in converted.items():
    module = name.removeprefix("transformer.")
    if module.endswith(".lora_B.weight"):
      module = module.removesuffix(".lora_B.weight")
      out[f"out.{module}.weight"] = tensor @ converted[f"transformer.{module}.lora_A.weight"]
    elif module.endswith(".lora_B.bias"):
      out[f"out.{module.removesuffix('.lora_B.bias')}.bias"] = tensor.clone()
  path = pathlib.Path(__file__).with_name(f"lora_{style}.safetensors")
  save_file({f"in.{name}": tensor for name, tensor in lora.items()} | out, path)
  print(path.name, len(lora), len(out), path.stat().st_size)


torch.manual_seed(0)
lora = {}
for module, shape in blocks("_"):
  pair(lora, f"lora_unet_{module}", shape, "lora_down", "lora_up")
  lora[f"lora_unet_{module}.alpha"] = torch.tensor(1.5)
write("lora_unet", lora, _convert_musubi_wan_lora_to_diffusers)

lora = {}
for module, shape in [*blocks("."), *TOP.items()]:
  pair(lora, f"diffusion_model.{module}", shape, "lora_A", "lora_B")
  lora[f"diffusion_model.{module}.diff_b"] = torch.randn(shape[0])
write("diffusion_model", lora, _convert_non_diffusers_wan_lora_to_diffusers)

lora = {}
for module, shape in blocks("."):
  pair(lora, f"diffusion_model.{module}", shape, "lora_down", "lora_up")
  lora[f"diffusion_model.{module}.alpha"] = torch.tensor(2.0)
write("diffusion_model_alpha", lora, _convert_non_diffusers_wan_lora_to_diffusers)
