"""Tiny random Wan transformers and what they predict, by the Diffusers implementation. Writes dit_<name>.safetensors.

Each file holds the weights under their Diffusers names, the inputs (in.*), the output (out), and the architecture.
Every bias and norm is random, so that an omitted or transposed one is seen. Run with the oracle's Python (README.md).
"""

import json
import os

import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import save_file

HERE = os.path.dirname(os.path.abspath(__file__))
CASES = {
  "2_heads": dict(heads=2, head_dim=24, layers=2, latent=(3, 4, 6), batch=1),
  "3_heads": dict(heads=3, head_dim=20, layers=3, latent=(4, 6, 10), batch=2),
  "5_heads": dict(heads=5, head_dim=16, layers=1, latent=(1, 2, 2), batch=2),
}


def main():
  for seed, (name, case) in enumerate(CASES.items()):
    torch.manual_seed(seed)
    width = case["heads"] * case["head_dim"]
    config = dict(patch_size=[1, 2, 2], num_attention_heads=case["heads"], attention_head_dim=case["head_dim"],
                  in_channels=16, out_channels=16, text_dim=20, freq_dim=26, ffn_dim=width + 8, num_layers=case["layers"],
                  cross_attn_norm=True, qk_norm="rms_norm_across_heads", eps=1e-6)
    model = WanTransformer3DModel(**config).eval()
    with torch.no_grad():
      for key, value in model.named_parameters():
        if "norm" in key and key.endswith("weight"):
          value.add_(0.3 * torch.randn_like(value))
        elif value.ndim == 1:
          value.copy_(0.2 * torch.randn_like(value))
    batch, (F, H, W) = case["batch"], case["latent"]
    inputs = {
      "latents": torch.randn(batch, 16, F, H, W),
      "timestep": torch.tensor([737, 3][:batch]),
      "text": torch.randn(batch, 7, 20),
    }
    with torch.no_grad():
      out = model(inputs["latents"], inputs["timestep"], inputs["text"], return_dict=False)[0]
    tensors = {k: v.contiguous() for k, v in model.state_dict().items()}
    tensors |= {f"in.{k}": v for k, v in inputs.items()} | {"out": out.contiguous()}
    save_file(tensors, os.path.join(HERE, f"dit_{name}.safetensors"), metadata={"config": json.dumps(config)})


if __name__ == "__main__":
  main()
