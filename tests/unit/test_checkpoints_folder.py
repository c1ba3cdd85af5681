"""Opening a folder: what it says about a good one, and one clear message for each way it can be wrong."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from MaxText.checkpoints import names
from MaxText.checkpoints.folder import open_folder
from MaxText.checkpoints.tensor_files import read_header
from MaxText.models.umt5 import Umt5Config
from MaxText.models.vae import VaeConfig
from MaxText.models.wan import WanConfig

PIPELINES = pathlib.Path(__file__).parents[1] / "golden" / "pipelines"
TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"


def pipe(name):
  return PIPELINES / name / "pipe"


@pytest.fixture
def folder(tmp_path):
  return pathlib.Path(shutil.copytree(pipe("one_frame"), tmp_path / "model"))


def edit_json(path, **values):
  content = json.loads(path.read_text()) | values
  path.write_text(json.dumps({key: value for key, value in content.items() if value != "delete"}))


def edit_tensors(path, change):
  tensors = load_file(path)
  change(tensors)
  save_file(tensors, path)


def refusal(path):
  with pytest.raises(ValueError) as error:
    open_folder(str(path))
  return str(error.value)


def all_tensors(directory):
  return {name: array for file in sorted(directory.glob("*.safetensors")) for name, array in load_file(file).items()}


def test_a_diffusers_folder_says_what_it_is():
  one, two = open_folder(str(pipe("one_expert"))), open_folder(f"{pipe('two_experts')}/")
  args = json.loads((PIPELINES / "two_experts" / "args.json").read_text())
  assert (one.format, one.num_experts, one.boundary_ratio) == ("diffusers", 1, None)
  assert (two.num_experts, two.boundary_ratio, two.flow_shift) == (2, 0.875, args["flow_shift"])
  assert one.wan == WanConfig(num_heads=3, head_dim=16, text_dim=40, freq_dim=48, ffn_dim=104, num_layers=2)
  assert one.vae == VaeConfig(base_dim=3, num_res_blocks=one.vae.num_res_blocks) and one.vae.latents_mean[0] == -0.7571
  assert one.umt5 == Umt5Config(vocab_size=one.umt5.vocab_size, d_model=40, d_kv=6, d_ff=84, num_layers=2, num_heads=5)
  assert one.tokenizer_path == str(pipe("one_expert") / "tokenizer" / "spiece.model")
  assert two.components == ("text_encoder", "transformer", "transformer_2", "vae")
  # Several shards and an index, as the large models have.
  files = {tensor.file for tensor in one.stored["transformer"].values()}
  assert len(files) == len(list((pipe("one_expert") / "transformer").glob("*.safetensors"))) > 1


def test_headers_agree_with_the_safetensors_library():
  path = pipe("one_frame") / TRANSFORMER
  stored, _ = read_header(str(path))
  arrays = load_file(path)
  assert {name: (t.shape, t.dtype) for name, t in stored.items()} == {n: (a.shape, a.dtype) for n, a in arrays.items()}


def test_opening_reads_no_weights_and_importing_no_jax():
  code = ("import sys; from MaxText.checkpoints import folder, lora; assert 'jax' not in sys.modules; "
          "from MaxText.checkpoints import tensor_files; tensor_files.read = None; folder.open_folder(sys.argv[1])")
  subprocess.run([sys.executable, "-c", code, str(pipe("one_frame"))], check=True, cwd=pathlib.Path(__file__).parents[2])


@pytest.mark.parametrize("alias", ["encoder.embed_tokens.weight", "both"])
def test_the_token_embedding_under_either_of_its_names(folder, alias):
  def change(tensors):
    tensors["encoder.embed_tokens.weight"] = tensors["shared.weight"].copy()
    if alias != "both":
      del tensors["shared.weight"]

  edit_tensors(folder / "text_encoder" / "model.safetensors", change)
  stored = open_folder(str(folder)).stored["text_encoder"]
  assert {row.name for row in stored} >= {"shared.weight"}


def make_original(path, name="one_expert"):
  """The same weights in the original release's layout; the text encoder and the VAE as safetensors."""
  source = open_folder(str(pipe(name)))
  experts = ("high_noise_model", "low_noise_model") if source.num_experts == 2 else ("",)
  wan = source.wan
  for component, expert in zip(names.COMPONENTS, experts, strict=False):
    os.makedirs(path / expert, exist_ok=True)
    tensors = all_tensors(pipe(name) / component)
    save_file({row.original: tensors[row.name] for row in source.stored[component]},
              path / expert / "diffusion_pytorch_model.safetensors")
    (path / expert / "config.json").write_text(json.dumps({
      "_class_name": "WanModel", "model_type": "t2v", "dim": wan.width, "num_heads": wan.num_heads,
      "in_dim": wan.in_channels, "out_dim": wan.out_channels, "freq_dim": wan.freq_dim, "ffn_dim": wan.ffn_dim,
      "num_layers": wan.num_layers, "eps": wan.eps, "text_len": 512, "text_dim": wan.text_dim}))
  for component, stem in (("vae", "Wan2.1_VAE"), ("text_encoder", "models_t5_umt5-xxl-enc-bf16")):
    tensors = all_tensors(pipe(name) / component)
    save_file({row.original: tensors[row.name] for row in source.stored[component]}, path / f"{stem}.safetensors")
  shutil.copytree(pipe(name) / "tokenizer", path / "google" / "umt5-xxl")
  return path


@pytest.mark.parametrize("name", ["one_expert", "two_experts", "five_heads_euler", "one_frame"])
def test_the_original_release_has_the_same_architecture(name, tmp_path):
  diffusers, original = open_folder(str(pipe(name))), open_folder(str(make_original(tmp_path / "model", name)))
  assert original.format == "original"
  assert (original.wan, original.vae, original.umt5) == (diffusers.wan, diffusers.vae, diffusers.umt5)
  assert original.num_experts == diffusers.num_experts
  assert (original.boundary_ratio, original.flow_shift) == ((0.875, 12.0) if name == "two_experts" else (None, None))
  assert original.stored.keys() == diffusers.stored.keys()


def config(part, **values):
  return lambda folder: edit_json(folder / part / "config.json", **values)


def index(**values):
  return lambda folder: edit_json(folder / "model_index.json", **values)


def remove(path):
  return lambda folder: (folder / path).unlink()


def truncate(path, size):
  def change(folder):
    content = (folder / path).read_bytes()
    (folder / path).write_bytes(content[:size])

  return change


def text(path, content):
  return lambda folder: (folder / path).write_text(content)


def tensors(change, path=TRANSFORMER):
  return lambda folder: edit_tensors(folder / path, change)


def shrink(t):
  t["blocks.0.ffn.net.0.proj.weight"] = t["blocks.0.ffn.net.0.proj.weight"][:, :-1].copy()


def image_keys(t):
  t["blocks.0.attn2.add_k_proj.weight"] = np.zeros((4, 4), np.float32)


def whole_numbers(t):
  t["proj_out.bias"] = t["proj_out.bias"].astype(np.uint8)


def header(change):
  """Rewrites the header of the transformer's file and leaves its numbers alone."""
  def rewrite(folder):
    content = (folder / TRANSFORMER).read_bytes()
    length = int.from_bytes(content[:8], "little")
    entries = json.loads(content[8 : 8 + length])
    change(entries)
    text = json.dumps(entries).encode()
    (folder / TRANSFORMER).write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])

  return rewrite


BAD = {
  "image-to-video channels": (config("transformer", in_channels=36), "image-to-video"),
  "image-to-video projections": (config("transformer", added_kv_proj_dim=48), "image-to-video"),
  "image-to-video embedder": (config("transformer", image_dim=1280), "image-to-video"),
  "image-to-video pipeline": (index(_class_name="WanImageToVideoPipeline"), "image-to-video"),
  "VACE": (index(_class_name="WanVACEPipeline"), "VACE"),
  "Animate": (index(_class_name="WanAnimatePipeline"), "Animate"),
  "TI2V-5B pipeline": (index(expand_timesteps=True), "TI2V-5B"),
  "TI2V-5B channels": (config("transformer", in_channels=48, out_channels=48), "TI2V-5B"),
  "TI2V-5B VAE": (config("vae", is_residual=True), "TI2V-5B"),
  "another pipeline": (index(_class_name="FluxPipeline"), "FluxPipeline, not a WanPipeline"),
  "another transformer": (config("transformer", _class_name="WanVACETransformer3DModel"), "WanVACE"),
  "another text encoder": (index(text_encoder=["transformers", "T5EncoderModel"]), "T5EncoderModel"),
  "no transformer": (index(transformer=[None, None]), "names no transformer"),
  "second expert not there": (index(transformer_2=["diffusers", "WanTransformer3DModel"], boundary_ratio=0.9),
                              "transformer_2/config.json is missing"),
  "two experts, no boundary": (index(transformer_2=["diffusers", "WanTransformer3DModel"]), "boundary_ratio"),
  "boundary of one expert": (index(boundary_ratio=0.9), "no transformer_2"),
  "widths of text": (config("transformer", text_dim=48),
                     "text of width 48 (text_dim), the text encoder gives 16 (d_model)"),
  "latent channels": (config("vae", z_dim=12, latents_mean=[0.0] * 12, latents_std=[1.0] * 12), "12 latent channels"),
  "statistics of the latents": (config("vae", latents_mean=[0.0, 1.0]), "latents_mean has 2"),
  "another depth": (config("transformer", num_layers=5), "missing"),
  "another feed-forward width": (config("transformer", ffn_dim=100), "wrongly shaped"),
  "a key missing in a config": (config("text_encoder", d_kv="delete"), "'d_kv'"),
  "text for a number": (config("transformer", num_layers="2"), "num_layers = '2' should be a whole number"),
  "absurdly many layers": (config("transformer", num_layers=10**30), "should be a whole number from 1 to 1,000"),
  "absurdly many VAE blocks": (config("vae", num_res_blocks=10**9), "should be a whole number from 1 to 1,000"),
  "zero heads": (config("transformer", num_attention_heads=0), "num_attention_heads = 0"),
  "patch of two": (config("transformer", patch_size=[2, 2]), "patch_size = [2, 2]"),
  "other norms": (config("transformer", qk_norm=None), "qk_norm = None"),
  "another gate": (config("text_encoder", feed_forward_proj="relu"), "feed_forward_proj"),
  "broken JSON": (text("transformer/config.json", '{"num_layers": 2,'), "transformer/config.json cannot be read as JSON"),
  "JSON that is a list": (text("model_index.json", "[1]"), "should hold a JSON object"),
  "no config": (remove("vae/config.json"), "vae/config.json is missing"),
  "no scheduler": (remove("scheduler/scheduler_config.json"), "scheduler_config.json is missing"),
  "shift of zero": (lambda f: edit_json(f / "scheduler/scheduler_config.json", flow_shift=0), "flow_shift = 0"),
  "no tokenizer": (remove("tokenizer/spiece.model"), "spiece.model is missing"),
  "damaged tokenizer": (text("tokenizer/spiece.model", "x"), "spiece.model is not a sentencepiece model"),
  "token that is a number": (
    text("tokenizer/tokenizer_config.json", '{"added_tokens_decoder": {"5": {"content": 7}}}'), "special tokens"),
  "pipeline that is a list": (lambda f: edit_json(f / "model_index.json", _class_name=[]), "describes a []"),
  "class that is a number": (config("text_encoder", architectures=5, d_model="delete"), "has no 'd_model'"),
  "JSON without an end": (text("vae/config.json", '{"a":' * 50_000), "cannot be read as JSON"),
  "no weights": (remove("vae/diffusion_pytorch_model.safetensors"), "vae/diffusion_pytorch_model.safetensors is missing"),
  "truncated weights": (truncate(TRANSFORMER, -1), "is truncated"),
  "a longer file": (lambda f: (f / TRANSFORMER).write_bytes((f / TRANSFORMER).read_bytes() + b"\0"),
                    "has something behind its tensors"),
  "truncated header": (truncate(TRANSFORMER, 100), "is truncated"),
  "empty weights": (truncate(TRANSFORMER, 0), "not a safetensors file"),
  "text for weights": (text(TRANSFORMER, "<html>404 not found</html>"), "not a safetensors file"),
  "header without a type": (header(lambda h: h["proj_out.bias"].pop("dtype")), "not a safetensors file"),
  "header of another length": (header(lambda h: h["proj_out.bias"].update(shape=[7])), "the file is damaged"),
  "shape of text": (header(lambda h: h["proj_out.bias"].update(shape="ab")), "the file is damaged"),
  "type that is a list": (header(lambda h: h["proj_out.bias"].update(dtype=[])), "is stored as []"),
  "one offset": (header(lambda h: h["proj_out.bias"].update(data_offsets=[0])), "not a safetensors file"),
  "overlapping tensors": (
    header(lambda h: h["proj_out.bias"].update(data_offsets=[n + 4 for n in h["proj_out.bias"]["data_offsets"]])),
    "the file is damaged"),
  "missing name": (tensors(lambda t: t.pop("proj_out.bias")), "1 missing:\n  proj_out.bias"),
  "unexpected name": (tensors(image_keys), "1 unexpected:\n  blocks.0.attn2.add_k_proj.weight"),
  "wrong shape": (tensors(shrink), "1 wrongly shaped:\n  blocks.0.ffn.net.0.proj.weight"),
  "whole numbers for weights": (tensors(whole_numbers), "proj_out.bias is stored as U8"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_folder_is_refused_in_one_clear_message(case, folder):
  change, words = BAD[case]
  change(folder)
  message = refusal(folder)
  assert words in message and str(folder) in message


def test_long_lists_are_cut(folder):
  edit_tensors(folder / TRANSFORMER, lambda t: [t.pop(name) for name in list(t) if name.startswith("blocks.0.")])
  message = refusal(folder)
  assert "27 missing:" in message and message.endswith("… and 7 more") and len(message.splitlines()) == 23


def test_shards(tmp_path):
  folder = pathlib.Path(shutil.copytree(pipe("one_expert"), tmp_path / "model"))
  shard = sorted((folder / "transformer").glob("*.safetensors"))[1]
  index_path = folder / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
  content, index_text = shard.read_bytes(), index_path.read_text()
  shard.unlink()
  assert f"lacks 1 of 4 shards: {shard.name}" in refusal(folder)
  shard.write_bytes(content[: len(content) // 2])
  assert f"{shard} is truncated" in refusal(folder)
  shard.write_bytes(content)
  weight_map = json.loads(index_text)["weight_map"]
  name = next(name for name, file in weight_map.items() if file == shard.name)
  other = next(file for file in weight_map.values() if file != shard.name)
  index_path.write_text(json.dumps({"weight_map": weight_map | {name: other}}))
  assert f"does not hold {name}" in refusal(folder)
  index_path.write_text("{}")
  assert "weight_map" in refusal(folder)
  index_path.write_text(index_text)
  open_folder(str(folder))


def test_experts_of_two_sizes(tmp_path):
  folder = pathlib.Path(shutil.copytree(pipe("two_experts"), tmp_path / "model"))
  edit_json(folder / "transformer_2" / "config.json", num_layers=7)
  assert "the two experts differ" in refusal(folder)


def test_what_is_no_folder_of_a_model(tmp_path):
  assert "there is no such folder" in refusal(tmp_path / "nothing")
  message = refusal(tmp_path)
  assert "holds no Wan model" in message and "model_index.json" in message and "config.json" in message
  assert f"give the whole folder: {pipe('one_frame')}" in refusal(pipe("one_frame") / "vae")
  assert "is a file" in refusal(pipe("one_frame") / "model_index.json")


BAD_ORIGINAL = {
  "image-to-video": (lambda f: edit_json(f / "config.json", model_type="i2v", in_dim=36), "image-to-video"),
  "VACE": (lambda f: edit_json(f / "config.json", model_type="vace"), "VACE"),
  "another class": (lambda f: edit_json(f / "config.json", _class_name="VaceWanModel"), "VaceWanModel"),
  "TI2V-5B": (lambda f: (f / "Wan2.2_VAE.pth").write_bytes(b""), "TI2V-5B"),
  "heads": (lambda f: edit_json(f / "config.json", num_heads=5), "dim = 48 is not divisible by num_heads = 5"),
  "no VAE": (remove("Wan2.1_VAE.safetensors"), "Wan2.1_VAE.pth is missing"),
  "no text encoder": (remove("models_t5_umt5-xxl-enc-bf16.safetensors"), "models_t5_umt5-xxl-enc-bf16.pth is missing"),
  "no tokenizer": (remove("google/umt5-xxl/spiece.model"), "spiece.model is missing"),
  "text encoder of another project": (
    lambda f: shutil.copy(f / "Wan2.1_VAE.safetensors", f / "models_t5_umt5-xxl-enc-bf16.safetensors"),
    "has no token_embedding.weight"),
  "missing name": (lambda f: edit_tensors(f / "Wan2.1_VAE.safetensors", lambda t: t.pop("decoder.middle.1.norm.gamma")),
                   "1 missing:\n  decoder.middle.1.norm.gamma"),
}


@pytest.mark.parametrize("case", BAD_ORIGINAL)
def test_a_wrong_original_release_is_refused(case, tmp_path):
  change, words = BAD_ORIGINAL[case]
  folder = make_original(tmp_path / "model")
  change(folder)
  assert words in refusal(folder)
