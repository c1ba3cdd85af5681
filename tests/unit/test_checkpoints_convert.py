"""convert_checkpoint as a user types it: there and back is bit-equal, and nothing is overwritten."""

import json
import os
import pathlib
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from MaxText.checkpoints import export, names
from MaxText.checkpoints.folder import load_leaves, open_folder
from MaxText.convert_checkpoint import main

PIPELINES = pathlib.Path(__file__).parents[1] / "golden" / "pipelines"
TOKENIZER = PIPELINES / "one_expert" / "pipe" / "tokenizer"
PARTS = ("transformer", "transformer_2", "vae", "text_encoder")


def convert(*arguments):
  return main(["tests/tiny.yml", "log_format=quiet", *arguments])


def tensors_of(folder):
  return {part: {name: array for file in (folder / part).glob("*.safetensors") for name, array in load_file(file).items()}
          for part in PARTS}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
  """Two experts in mixed types: most of one expert in bfloat16, one layer apart, the text encoder in float16."""
  folder = tmp_path_factory.mktemp("source") / "model"
  shutil.copytree(PIPELINES / "two_experts" / "pipe", folder)
  for part, dtype in (("transformer", ml_dtypes.bfloat16), ("text_encoder", np.float16)):
    (file,) = (folder / part).glob("*.safetensors")
    save_file({name: a if "norm" in name or name.startswith("blocks.1.attn1.to_q") else a.astype(dtype)
               for name, a in load_file(file).items()}, file)
  (folder / "tokenizer" / "special_tokens_map.json").write_text("{}")
  return folder


@pytest.fixture(scope="module")
def checkpoint(source, tmp_path_factory):
  path = tmp_path_factory.mktemp("checkpoint") / "orbax"
  assert convert(f"load_parameters_path={source}", f"converted_path={path}") == 0
  return path


def test_there_and_back_is_bit_equal(source, checkpoint, tmp_path):
  back = tmp_path / "new" / "back"
  assert convert(f"load_parameters_path={checkpoint}", "convert_to=diffusers", f"converted_path={back}") == 0
  before, after = tensors_of(source), tensors_of(back)
  assert before.keys() == after.keys() == set(PARTS)
  for part, tensors in before.items():
    assert tensors.keys() == after[part].keys()
    for name, array in tensors.items():
      assert array.dtype == after[part][name].dtype and array.tobytes() == after[part][name].tobytes(), name
  for file in source.rglob("*.json"):
    assert json.loads((back / file.relative_to(source)).read_text()) == json.loads(file.read_text()), file
  for file in (source / "tokenizer").iterdir():
    assert (back / "tokenizer" / file.name).read_bytes() == file.read_bytes()


def test_a_given_shift_is_written(checkpoint, tmp_path):
  keys = ("convert_to=diffusers", "flow_shift=7")
  assert convert(f"load_parameters_path={checkpoint}", f"converted_path={tmp_path}/new", *keys) == 0
  assert open_folder(f"{tmp_path}/new").flow_shift == 7.0


def test_our_checkpoint_opens_like_its_source(source, checkpoint):
  ours, theirs = open_folder(str(checkpoint)), open_folder(str(source))
  assert ours.format == "orbax" and ours.components == theirs.components
  for field in ("wan", "vae", "umt5", "num_experts", "boundary_ratio", "flow_shift"):
    assert getattr(ours, field) == getattr(theirs, field), field
  assert pathlib.Path(ours.tokenizer_path).read_bytes() == pathlib.Path(theirs.tokenizer_path).read_bytes()


@pytest.mark.parametrize("component", ["transformer_2", "vae"])
def test_it_restores_onto_any_mesh_in_any_type(component, source, checkpoint):
  ours, theirs = open_folder(str(checkpoint)), open_folder(str(source))
  mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
  targets = {}
  for path, shape in names.leaf_shapes(names.tensors(component, ours.architecture(component))).items():
    spec = [None] * len(shape)
    if shape[-1] % 8 == 0:
      spec[-1] = "x"
    targets[path] = jax.ShapeDtypeStruct(shape, ml_dtypes.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(*spec)))
  some = dict(list(targets.items())[::3])  # a part will do
  restored, read = load_leaves(ours, component, some), load_leaves(theirs, component, some)
  assert restored.keys() == some.keys()
  for path, array in restored.items():
    assert array.sharding == targets[path].sharding and array.dtype == ml_dtypes.bfloat16
    assert np.array_equal(np.asarray(array), np.asarray(read[path])), path


def test_large_parts_are_sharded(source, tmp_path):
  folder = open_folder(str(source))
  rows, dtypes = names.tensors("vae", folder.vae), export.stored_dtypes(folder, "vae")
  targets = {path: jax.ShapeDtypeStruct(shape, np.float32) for path, shape in names.leaf_shapes(rows).items()}
  arrays = load_leaves(folder, "vae", targets)
  export.write_shards(str(tmp_path), "diffusion_pytorch_model", rows, arrays, dtypes, shard_bytes=50_000)
  index = json.loads((tmp_path / "diffusion_pytorch_model.safetensors.index.json").read_text())
  files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
  assert len(files) > 3 and set(index["weight_map"].values()) == set(files)
  assert files[0] == f"diffusion_pytorch_model-00001-of-{len(files):05d}.safetensors"
  found = {name: (file, array) for file in files for name, array in load_file(tmp_path / file).items()}
  truth = tensors_of(source)["vae"]
  assert found.keys() == truth.keys() == index["weight_map"].keys()
  assert all(np.array_equal(found[n][1], a) and found[n][0] == index["weight_map"][n] for n, a in truth.items())
  assert index["metadata"]["total_size"] == sum(a.nbytes for a in truth.values())


def refusal(capsys, *arguments):
  assert convert(*arguments) == 2
  message = capsys.readouterr().err
  assert message.startswith("error: ") and "Traceback" not in message
  return message


def test_nothing_is_overwritten(source, checkpoint, tmp_path, capsys):
  (tmp_path / "full").mkdir()
  (tmp_path / "full" / "precious.txt").write_text("keep")
  (tmp_path / "file").write_text("keep")
  give = f"load_parameters_path={source}"
  assert "is not empty" in refusal(capsys, give, f"converted_path={tmp_path}/full")
  assert "is a file" in refusal(capsys, give, f"converted_path={tmp_path}/file")
  assert "cannot be made" in refusal(capsys, give, "converted_path=/proc/nowhere")
  assert "merges no LoRA" in refusal(capsys, give, f"converted_path={tmp_path}/new", f"lora_path={tmp_path}/file")
  assert "lies inside" in refusal(capsys, give, f"converted_path={source}/orbax")
  assert "converted_path is missing" in refusal(capsys, give)
  assert "load_parameters_path is missing" in refusal(capsys, f"converted_path={tmp_path}/new")
  assert "already" in refusal(capsys, give, "convert_to=diffusers", f"converted_path={tmp_path}/new")
  assert "already" in refusal(capsys, f"load_parameters_path={checkpoint}", f"converted_path={tmp_path}/new")
  assert "no such folder" in refusal(capsys, f"load_parameters_path={tmp_path}/none", f"converted_path={tmp_path}/new")
  assert sorted(os.listdir(tmp_path)) == ["file", "full"] and os.listdir(tmp_path / "full") == ["precious.txt"]


def test_a_failed_conversion_leaves_nothing_and_one_after_a_kill_succeeds(tmp_path, monkeypatch, capsys):
  give = f"load_parameters_path={PIPELINES}/one_frame/pipe"
  saved = export.orbax_folder.save_component

  def fail(directory, arrays):
    if directory.endswith("vae"):
      raise error
    saved(directory, arrays)

  monkeypatch.setattr(export.orbax_folder, "save_component", fail)
  error = ValueError("a bug")
  with pytest.raises(ValueError, match="a bug"):
    convert(give, f"converted_path={tmp_path}/new")
  assert not os.listdir(tmp_path)
  error = OSError(28, "No space left on device")
  assert convert(give, f"converted_path={tmp_path}/new") == 1
  assert "No space left on device" in capsys.readouterr().err and not os.listdir(tmp_path)
  monkeypatch.undo()
  (tmp_path / "new.partial").mkdir()
  (tmp_path / "new.partial" / "half").write_text("of a killed conversion")
  (tmp_path / "link").symlink_to("new")
  assert convert(give, f"converted_path={tmp_path}/link") == 0
  assert sorted(os.listdir(tmp_path)) == ["link", "new"] and open_folder(f"{tmp_path}/new").format == "orbax"


def edit(path, change):
  content = json.loads(path.read_text())
  change(content)
  path.write_text(json.dumps(content))


def largest_file(folder):
  return max((path for path in (folder / "vae").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


BAD = {
  "truncated": (lambda f: os.truncate(largest_file(f), 100), "missing or truncated files"),
  "a file gone": (lambda f: largest_file(f).unlink(), "missing or truncated files"),
  "a part gone": (lambda f: shutil.rmtree(f / "transformer_2"), "missing or truncated files"),
  "no tokenizer": (lambda f: (f / "tokenizer" / "spiece.model").unlink(), "spiece.model is missing"),
  "another version": (lambda f: edit(f / "maxtext_checkpoint.json", lambda c: c.update(version=7)), "version 7"),
  "a field gone": (lambda f: edit(f / "maxtext_checkpoint.json", lambda c: c.pop("leaves")), "is damaged"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_damaged_checkpoint_is_refused(case, checkpoint, tmp_path):
  change, words = BAD[case]
  folder = pathlib.Path(shutil.copytree(checkpoint, tmp_path / "model"))
  change(folder)
  with pytest.raises(ValueError) as error:
    open_folder(str(folder))
  assert words in str(error.value) and str(folder) in str(error.value)


def test_an_architecture_that_the_leaves_do_not_have(checkpoint, tmp_path):
  folder = pathlib.Path(shutil.copytree(checkpoint, tmp_path / "model"))
  edit(folder / "maxtext_checkpoint.json", lambda content: content["wan"].update(num_layers=9))
  with pytest.raises(ValueError, match="does not fit this code's models") as error:
    open_folder(str(folder))
  assert "transformer blocks.attn1.norm_k.scale: (2, " in str(error.value)


# --- a new model


KEPT = ("scale_shift", "condition_embedder.time", "relative_attention_bias", "gamma")  # small, or sensitive
NEW = ["model_name=wan-test", "init_random_weights=true", "convert_to=diffusers", f"tokenizer_path={TOKENIZER}"]


def test_a_new_model_of_random_weights(tmp_path):
  assert convert(*NEW, f"converted_path={tmp_path / 'one'}") == 0
  assert convert(*NEW, f"converted_path={tmp_path / 'two'}", "converted_dtype=bfloat16") == 0
  assert convert(*NEW, f"converted_path={tmp_path / 'three'}", "seed=1") == 0
  one, two, three = (tensors_of(tmp_path / name) for name in ("one", "two", "three"))
  assert open_folder(str(tmp_path / "one")).num_experts == 1
  assert one["transformer"] and one["vae"] and one["text_encoder"]
  for part, tensors in one.items():
    for name, array in tensors.items():
      rounded = two[part][name]
      assert array.dtype == np.float32
      kept = array.ndim < 2 or any(part in name for part in KEPT)
      assert rounded.dtype == (np.float32 if kept else ml_dtypes.bfloat16), name
      np.testing.assert_array_equal(array.astype(rounded.dtype), rounded)
  name = "blocks.0.attn1.to_q.weight"
  assert np.abs(one["transformer"][name] - three["transformer"][name]).max() > 0.01


@pytest.mark.parametrize("arguments, message", [
  (["init_random_weights=true", "model_name=wan-test"], "tokenizer_path is missing"),
  ([f"tokenizer_path={TOKENIZER}", f"load_parameters_path={PIPELINES / 'one_expert' / 'pipe'}"], "tokenizer_path"),
  ([*NEW, "text_vocab_size=17", "override_model_config=true"], "text_vocab_size=17"),
  ([*NEW[:3], "tokenizer_path=/nowhere"], "tokenizer_path=/nowhere: no tokenizer"),
])
def test_a_new_model_that_cannot_be(arguments, message, tmp_path, capsys):
  assert convert(*arguments, f"converted_path={tmp_path / 'new'}") == 2
  assert message in capsys.readouterr().err and not (tmp_path / "new").exists()
