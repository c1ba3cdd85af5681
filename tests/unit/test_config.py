"""The configuration: schema and base.yml agree, the chain of sources, literal text, what is refused in which words."""

import dataclasses
import json
import sys
import types

import numpy as np
import pytest
import yaml

from MaxText import config_reader, config_types, pyconfig
from MaxText.config_help import COMMANDS
from MaxText.models.umt5 import Umt5Config
from MaxText.models.vae import VaeConfig
from MaxText.models.wan import WanConfig

RANDOM = "init_random_weights=true"
ALL_YAML = sorted(config_reader.CONFIGS.rglob("*.yml"))
MODELS = sorted(path.stem for path in (config_reader.CONFIGS / "models").glob("*.yml"))


def load(*arguments, environ=None, command="decode"):
  return pyconfig.initialize(["tests/tiny.yml", RANDOM, "prompt=x", *arguments], command, environ or {})


def run(arguments, capsys, environ=None, command="decode"):
  """Exit status and stderr of a command that only reads its configuration."""

  @pyconfig.run_main
  def main(argv):
    pyconfig.initialize(argv, command, environ or {})

  status = main(arguments)
  return status, capsys.readouterr().err


# --- schema and files


def test_base_yml_holds_the_schema():
  base = config_reader.read_yaml(config_reader.CONFIGS / "base.yml")
  assert list(base) == list(config_types.KEYS)
  assert base == {key: field.default for key, field in config_types.KEYS.items()}
  assert pyconfig.Config(**base).model_dump() == config_types.Settings().model_dump()


def test_every_key_has_a_group_and_a_line():
  for key, field in config_types.KEYS.items():
    assert config_types.group_of(key) in config_types.GROUPS
    assert field.description and "\n" not in field.description
  assert all(config_types.keys_of(group) for group in config_types.GROUPS)


@pytest.mark.parametrize("path", ALL_YAML, ids=lambda p: str(p.relative_to(config_reader.CONFIGS)))
def test_every_yaml_parses(path):
  assert isinstance(yaml.safe_load(path.read_text()), dict)
  if path.parent == config_reader.CONFIGS:
    config = pyconfig.initialize([str(path), RANDOM, "prompt=x"], "decode", {})
    assert set(config.sources) == set(config_types.KEYS)


@pytest.mark.parametrize("name", MODELS)
def test_model_files(name):
  config = load(f"model_name={name}")
  assert config.wan().num_layers == config.num_layers
  assert config.sources["num_heads"] == f"configs/models/{name}.yml"
  assert config.num_tokens == np.prod(config.token_grid)


def test_published_models():
  small, large, experts = (
      load(f"model_name={name}") for name in ("wan2.1-t2v-1.3b", "wan2.1-t2v-14b", "wan2.2-t2v-a14b"))
  assert small.wan() == WanConfig(num_heads=12, ffn_dim=8960, num_layers=30)
  assert large.wan() == WanConfig() and experts.wan() == WanConfig()
  for config in (small, large, experts):
    assert config.vae() == VaeConfig() and config.umt5() == Umt5Config() and config.dtype == "bfloat16"
  assert small.token_grid == (21, 30, 52) and small.num_tokens == 32_760
  assert large.latent_grid == (21, 90, 160) and large.num_tokens == 75_600
  assert (experts.num_experts, experts.boundary_ratio, experts.guidance_scales) == (2, 0.875, (4.0, 3.0))
  assert (experts.num_inference_steps, experts.flow_shift) == (40, 12.0)


# --- the chain


def test_last_link_wins_and_is_named(tmp_path):
  mine = tmp_path / "mine.yml"
  mine.write_text("base_config: video.yml\nnum_frames: 5\nsolver: euler\n")
  environ = {"M_HEIGHT": "64", "M_NEGATIVE_PROMPT": "no", "UNRELATED": "1"}
  config = pyconfig.initialize([str(mine), RANDOM, "width=48", "prompt=a: b"], "decode", environ)
  expected = {
      "fps": (16.0, "configs/models/wan-demo.yml"),
      "height": (64, "environment M_HEIGHT"),
      "width": (48, "command line"),
      "prompt": ("a: b", "command line"),
      "negative_prompt": ("no", "environment M_NEGATIVE_PROMPT"),
      "solver": ("euler", str(mine)),
      "dtype": ("float32", "configs/video.yml"),
      "batch_size": (1, "configs/base.yml"),
      "num_frames": (49, f"configs/models/wan-demo.yml (over {mine}: 5)"),  # the model file comes after, and says so
  }
  assert {key: (getattr(config, key), config.sources[key]) for key in expected} == expected
  assert config.set_by_user("width") and config.set_by_user("height") and not config.set_by_user("solver")
  with pytest.raises(Exception, match="frozen"):
    config.width = 16
  assert isinstance(hash(config), int)


def test_sampling_keys_of_the_model_may_be_overridden():
  config = load("num_inference_steps=3", "guidance_scale=1", "flow_shift=7", "fps=24", "height=48", "width=80")
  assert (config.num_inference_steps, config.guidance_scale, config.flow_shift, config.fps) == (3, 1.0, 7.0, 24.0)


def test_works_from_any_folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert load().model_name == "wan-test"
  assert pyconfig.initialize(["video.yml", RANDOM, "prompt=x"], "decode", {}).model_name == "wan-demo"


def test_record_is_json_with_sources(capsys):
  config = load("svg_density=0.5", "attention=svg")
  record = json.loads(json.dumps(config.as_record()))
  assert record["svg_density"] == {"value": 0.5, "source": "command line"}
  assert record["patch_size"]["value"] == [1, 2, 2] and set(record) == set(config_types.KEYS)
  config.print_config()
  printed = capsys.readouterr().out
  assert "attention=svg, svg_density=0.5\n" in printed and "seed=" not in printed
  base = sum(entry["source"] == "configs/base.yml" for entry in record.values())
  assert f"  configs/base.yml: the other {base} keys" in printed


def test_fresh_run_names_differ(tmp_path):
  first = load(f"base_output_directory={tmp_path}").run_name
  (tmp_path / first).mkdir()
  assert load(f"base_output_directory={tmp_path}").run_name != first and first.startswith("wan-test_flash_")
  assert list(tmp_path.iterdir()) == [tmp_path / first], "reading the configuration leaves nothing behind"


def test_minus_one_of_base_gives_way():
  config = load("ici_context_parallelism=-1", "context_parallel_strategy=ulysses")
  assert (config.ici_fsdp_parallelism, config.ici_context_parallelism) == (1, -1)


@pytest.mark.parametrize("text", [
    "yes", "12", "a: b", "null", "", "[1, 2", "{x}", "- a", "1e3", "true", "a=b=c", '"quoted" # no', "雪の上の赤い球 🎈",
    "two\nlines\tand 'quotes'", "word " * 2000, "%s {0} \\n"])
def test_prompts_are_literal(text):
  assert pyconfig.initialize(["tests/tiny.yml", RANDOM, f"prompt={text}"], "decode", {}).prompt == text
  assert pyconfig.initialize(["tests/tiny.yml", RANDOM], "decode", {"M_PROMPT": text}).prompt == text


@pytest.mark.parametrize("line, prompt", [("prompt: yes", "yes"), ("prompt: 12", "12"), ('prompt: "a: b"', "a: b"),
                                          ("prompt: |-\n  two\n  lines", "two\nlines"), ('prompt: ""', "")])
def test_prompts_of_a_file_are_literal_too(tmp_path, line, prompt):
  (tmp_path / "mine.yml").write_text(f"base_config: video.yml\n{line}\n")
  assert pyconfig.initialize([str(tmp_path / "mine.yml"), RANDOM], "decode", {}).prompt == prompt


@pytest.mark.parametrize("arguments, key, value", [
    (["seed=010"], "seed", 10),
    ([f"seed={2**63 - 1}"], "seed", 2**63 - 1),
    (["flow_shift=1e1"], "flow_shift", 10.0),
    (["flow_shift=.5"], "flow_shift", 0.5),
    (["guidance_scale=[2]"], "guidance_scale", (2.0,)),
    (["guidance_scale=0"], "guidance_scale", 0.0),
    (["attention=svg", "svg_density=1.0"], "svg_density", 1.0),
    (["attention=svg", "svg_start_step=2", "svg_end_step=2"], "svg_end_step", 2),
    (["attention=svg", "svg_band_width=1000000"], "svg_band_width", 1_000_000),
    (["attention=svg", "svg_sink_frames=0"], "svg_sink_frames", 0),
    (["num_frames=1", "attention=svg"], "num_frames", 1),
    (["height=16", "width=16", "num_frames=5"], "token_grid", (2, 1, 1)),
    (["height=1024", "width=16"], "height", 1024),
    (["num_inference_steps=1"], "num_inference_steps", 1),
    (["dry_run=True"], "dry_run", True),
    (["jax_cache_dir=null"], "jax_cache_dir", None),
    (["jax_cache_dir="], "jax_cache_dir", None),
    (["context_parallel_strategy=ulysses", "attention=svg", "ici_context_parallelism=4"], "ici_context_parallelism", 4),
    (["override_model_config=true", "num_heads=5", "head_dim=8"], "num_heads", 5),
    (["model_name=", "num_heads=3", "num_layers=2"], "num_heads", 3),
    (["override_model_config=true", "num_experts=2", "boundary_ratio=0.9", "guidance_scale=[4,3]"],
     "guidance_scales", (4.0, 3.0)),
])
def test_odd_but_legal(arguments, key, value):
  assert getattr(load(*arguments), key) == value


# --- bad input: arguments and words that the one message must hold

BAD_VALUES = [
    (["num_frames=15"], ["num_frames=15", "4n+1", "13 or 17"]),
    (["num_frames=80"], ["num_frames=80", "77 or 81"]),
    (["num_frames=0"], ["num_frames=0", "at least 1"]),
    (["num_frames=17.0"], ["num_frames=17", "whole number"]),
    (["height=1080"], ["height=1080", "multiple of 16", "1072 or 1088"]),
    (["height=16400"], ["height=16400", "at most 16384", "H.264"]),
    (["width=850"], ["width=850", "848 or 864"]),
    (["height=8"], ["height=8", "nearest valid: 16"]),
    (["height=-16"], ["height=-16", "at least 1"]),
    (["height=abc"], ["height=abc", "whole number", "command line"]),
    (["height=[480]"], ["height=[480]", "whole number"]),
    (["width=true"], ["width=true", "whole number"]),
    (["seed=1.5"], ["seed=1.5", "whole number"]),
    (["seed=-1"], ["seed=-1", "at least 0"]),
    ([f"seed={2**63}"], ["seed=9223372036854775808", "at most 9223372036854775807"]),
    (["seed=" + "9" * 5000], ["seed=", "whole number"]),
    (["fps=0"], ["fps=0", "above 0"]),
    (["fps=.nan"], ["fps=nan", "above 0"]),
    (["fps=1e9"], ["fps=1e+09", "0.001 to 1000"]),
    (["fps=1e-9"], ["fps=1e-09", "0.001 to 1000"]),
    (["fps=fast"], ["fps=fast", "a number"]),
    (["num_inference_steps=0"], ["num_inference_steps=0", "at least 1"]),
    (["guidance_scale=-1"], ["guidance_scale=-1", "at least 0"]),
    (["guidance_scale=inf"], ["guidance_scale=inf", "a number"]),
    (["guidance_scale=[4,3]"], ["guidance_scale=[4.0, 3.0]", "1 expert"]),
    (["guidance_scale=[]"], ["guidance_scale=[]", "0 entries"]),
    (["guidance_scale={a: 1}"], ["guidance_scale", "a number"]),
    (["flow_shift=0"], ["flow_shift=0", "above 0"]),
    (["boundary_ratio=0.5"], ["boundary_ratio=0.5", "1 expert", "nothing"]),
    (["boundary_ratio=1.5"], ["boundary_ratio=1.5", "below 1"]),
    (["model_name=wan2.2-t2v-a14b", "boundary_ratio=null"], ["boundary_ratio=null", "2 experts", "0.875"]),
    (["model_name=wan2.2-t2v-a14b", "guidance_scale=[4,3,2]"], ["guidance_scale", "3 entries", "2 experts"]),
    (["batch_size=0"], ["batch_size=0", "at least 1"]),
    (["num_videos_per_prompt=0"], ["num_videos_per_prompt=0", "at least 1"]),
    (["solver=dpm"], ["solver=dpm", "unipc, euler"]),
    (["dtype=float16"], ["dtype=float16", "float32, bfloat16"]),
    (["dry_run=yes"], ["dry_run=yes", "true or false"]),
    (["log_format=loud"], ["log_format=loud", "text, quiet, json"]),
    (["attention=svgg"], ["attention=svgg", "did you mean svg?"]),
    (["attention=SVG"], ["attention=SVG", "did you mean svg?"]),
    (["attention=svg", "svg_density=0"], ["svg_density=0", "above 0 and at most 1"]),
    (["attention=svg", "svg_density=1.01"], ["svg_density=1.01", "at most 1"]),
    (["attention=svg", "svg_density=-0.5"], ["svg_density=-0.5", "above 0"]),
    (["attention=svg", "svg_density=nan"], ["svg_density=nan", "above 0"]),
    (["attention=svg", "svg_density=[0.5,0.2]"], ["svg_density=[0.5, 0.2]", "1 expert"]),
    (["attention=svg", "svg_density=[0.5"], ["svg_density=[0.5", "a number"]),
    (["attention=svg", "svg_start_step=3", "svg_end_step=2"], ["svg_start_step=3", "svg_end_step=2", "after"]),
    (["attention=svg", "svg_start_step=5"], ["svg_start_step=5", "0 to 4", "num_inference_steps=4"]),
    (["attention=svg", "svg_end_layer=3"], ["svg_end_layer=3", "0 to 2", "num_layers=2"]),
    (["attention=svg", "svg_start_layer=2", "svg_end_layer=1"], ["svg_start_layer=2", "svg_end_layer=1", "after"]),
    (["attention=svg", "svg_sink_frames=6"], ["svg_sink_frames=6", "5 latent frames"]),
    (["attention=svg", "svg_sink_frames=-1"], ["svg_sink_frames=-1", "at least 0"]),
    (["attention=svg", "svg_band_width=-1"], ["svg_band_width=-1", "at least 0"]),
    (["attention=svg", "svg_num_sampled_queries=0"], ["svg_num_sampled_queries=0", "at least 1"]),
    (["attention=svg", "svg_density=0.3", "svg_band_width=64"], ["svg_density", "svg_band_width=64", "keep one"]),
    (["attention=svg", "svg_routing=spatial", "svg_num_sampled_queries=8"],
     ["svg_num_sampled_queries", "svg_routing=spatial"]),
    (["attention=svg", "svg_schedule=bold"], ["svg_schedule=bold", "conservative, moderate, aggressive"]),
    (["attention=svg", "svg_schedule=agressive"], ["did you mean aggressive?"]),
    (["svg_density=0.5"], ["svg_density", "do nothing", "attention=svg"]),
    (["attention=dot_product", "flash_block_q=512"], ["flash_block_q", "do nothing", "attention=flash"]),
    (["compare_dense=true"], ["compare_dense=true", "attention=svg"]),
    (["vae_tile_overlap=32"], ["vae_tile_overlap", "vae_tile_size"]),
    (["vae_tile_size=100"], ["vae_tile_size=100", "96 or 104"]),
    (["vae_tile_size=64", "vae_tile_overlap=64"], ["vae_tile_overlap=64", "at most half of vae_tile_size=64"]),
    (["context_parallel_strategy=ulysses", "ici_context_parallelism=3"],
     ["ici_context_parallelism=3", "num_heads=4", "1, 2, 4"]),
    (["context_parallel_strategy=ulysses", "ici_context_parallelism=4", "height=16", "width=16", "num_frames=5"],
     ["ici_context_parallelism=4", "2 tokens", "1, 2"]),
    (["context_parallel_strategy=ulysses", "ici_context_parallelism=4", "ici_tensor_parallelism=2"],
     ["ici_context_parallelism=4", "num_heads=4", "tensor"]),
    (["context_parallel_strategy=ulysses", "ici_tensor_parallelism=3"],
     ["ici_tensor_parallelism=3", "num_heads=4", "1, 2, 4"]),
    (["ici_context_parallelism=2"], ["ici_context_parallelism=2", "context_parallel_strategy=ulysses"]),
    (["ici_tensor_parallelism=0"], ["ici_tensor_parallelism=0", "at least 1"]),
    (["ici_data_parallelism=-1", "ici_tensor_parallelism=-1"],
     ["ici_data_parallelism and ici_tensor_parallelism", "only one"]),
    (["logical_axis_rules=[[heads]]"], ["logical_axis_rules", "a list"]),
    (["compile_topology=v6e-8"], ["compile_topology=v6e-8", "v6e:2x4"]),
    (["run_name=a/b"], ["run_name='a/b'", "plain folder name"]),
    (["run_name=.."], ["run_name='..'", "plain folder name"]),
    (["run_name=" + "x" * 201], ["run_name", "200 bytes"]),
    (["resume=true"], ["resume=true", "run_name"]),
    (["base_output_directory="], ["base_output_directory", "empty"]),
    (["base_output_directory=gs://bucket/x"], ["base_output_directory=gs://bucket/x", "folder of this machine"]),
    (["base_output_directory=/dev/null/x"], ["base_output_directory=/dev/null/x", "not a folder"]),
    (["base_output_directory=/proc/nowhere"], ["base_output_directory=/proc/nowhere", "cannot be written"]),
    (["lora_path=/nowhere/a.safetensors"], ["lora_path=/nowhere/a.safetensors", "no such file"]),
    (["lora_path=[/nowhere/a.safetensors, 3]"], ["lora_path", "text"]),
    (["lora_weight=0.5"], ["lora_weight", "lora_path"]),
    (["initial_noise_path=/nowhere.npy"], ["initial_noise_path=/nowhere.npy", "No such file"]),
    (["latents_path=/nowhere.npy"], ["latents_path=/nowhere.npy", "No such file"]),
    (["prompts_file=/nowhere.txt"], ["prompts_file=/nowhere.txt", "No such file", "both set"]),
    (["prompts_file=~nobody-of-this-name/x"], ["prompts_file=~nobody-of-this-name/x", "No such file"]),
    (["latents_path=~nobody-of-this-name/x"], ["latents_path=~nobody-of-this-name/x", "No such file"]),
    (["load_parameters_path=~nobody-of-this-name/x"], ["~nobody-of-this-name/x", "no such folder"]),
    (["lora_path=" + "x" * 5000], ["lora_path=x", "no such file"]),
    (["run_name=\udcff"], ["run_name", "UTF-8"]),
    (["base_output_directory=\ud800"], ["base_output_directory", "UTF-8"]),
    (["base_output_directory=a\0b"], ["base_output_directory", "NUL"]),
    (["negative_prompt=\udcff"], ["negative_prompt", "UTF-8"]),
    (["model_name=wan2.1-t2v-13b"], ["model_name=wan2.1-t2v-13b", "did you mean wan2.1-t2v-1.3b", "wan-test"]),
    (["num_heads=8"],
     ["num_heads=8 (command line)", "num_heads=4 (configs/models/wan-test.yml)", "override_model_config"]),
    (["vae_base_dim=32"], ["vae_base_dim=32 (command line)", "vae_base_dim=16"]),
    (["in_channels=36"], ["in_channels=36 (command line)", "in_channels=16 (configs/base.yml)"]),
    (["override_model_config=true", "in_channels=36"], ["in_channels=36", "vae_z_dim=16", "image-to-video"]),
    (["override_model_config=true", "head_dim=33"], ["head_dim=33", "even"]),
    (["override_model_config=true", "text_dim=32"], ["text_dim=32", "text_d_model=64"]),
    (["override_model_config=true", "vae_dim_mult=[1,2]"], ["vae_temporal_downsample", "1, one between"]),
    (["override_model_config=true", "num_experts=3"], ["num_experts=3", "at most 2"]),
    (["load_parameters_path=/nowhere"], ["load_parameters_path=/nowhere"]),
    (["attetion=svg"], ["unknown key 'attetion'", "did you mean attention?"]),
    (["Height=16"], ["unknown key 'Height'", "did you mean height?"]),
    (["zzzzzzzz=1"], ["unknown key 'zzzzzzzz'", "--help"]),
    (["=3"], ["unknown key ''"]),
    (["--height=16"], ["without dashes", "height=16"]),
    (["height"], ["'height' is not key=value", "height=VALUE"]),
    (["height=16", "height=32"], ["height is given twice"]),
    (["a", "red", "ball"], ["'red' is not key=value", "quotes"]),
    (["configs/base.yml"], ["'configs/base.yml' is not key=value", "one YAML file"]),
]


@pytest.mark.parametrize("arguments, words", BAD_VALUES, ids=lambda v: " ".join(v)[:60] if isinstance(v, list) else "")
def test_bad_values(arguments, words, capsys):
  status, message = run(["tests/tiny.yml", RANDOM, "prompt=x", *arguments], capsys)
  assert status == 2
  assert message.startswith("error: ") and "Traceback" not in message
  for word in words:
    assert word in message, message


def test_one_problem_is_one_line_and_several_are_listed(capsys):
  assert run(["tests/tiny.yml", RANDOM, "prompt=x", "fps=0"], capsys)[1].count("\n") == 1
  message = run(["tests/tiny.yml", RANDOM, "prompt=x", "fps=0", "seed=-1", "height=a"], capsys)[1]
  assert message.startswith("error: 3 problems:\n  - ") and message.count("\n") == 4


@pytest.mark.parametrize("command, arguments, words", [
    ("decode", ["tests/tiny.yml", "prompt=x"], ["no weights", "load_parameters_path=FOLDER", RANDOM]),
    ("decode", ["tests/tiny.yml", RANDOM], ["no prompt", "prompts_file"]),
    ("convert_checkpoint", ["tests/tiny.yml"], ["load_parameters_path is missing"]),
    ("decode", [], ["config file", "configs/video.yml"]),
    ("decode", ["prompt=x"], ["first argument", "prompt=x"]),
    ("decode", ["configs/vide.yml"], ["configs/vide.yml: no such config file", "configs/video.yml"]),
    ("decode", ["configs"], ["configs: is a folder"]),
    ("decode", ["configs/models"], ["configs/models: is a folder"]),
])
def test_what_is_missing(command, arguments, words, capsys):
  status, message = run(arguments, capsys, command=command)
  assert status == 2
  for word in words:
    assert word in message, message


BAD_FILES = [
    ("- a\n- b\n", ["is a list", "mapping"]),
    ("just words\n", ["is a single value", "mapping"]),
    ("", ["is empty"]),
    ("# only a comment\n", ["is empty"]),
    ("height: 480\n\twidth: 832\n", ["line 2", "tabs"]),
    ("height: [480\n", ["not valid YAML"]),
    ("height: 480\nwidth 832\n", ["line", "not valid YAML"]),
    ("height: 480\nheight: 720\n", ["line 2", "'height'", "twice"]),
    ("heigth: 480\n", ["line 1", "unknown key 'heigth'", "did you mean height?"]),
    ("? [a, b]\n: 1\n", ["unknown key"]),
    ("seed: four\n", ["seed=four", "mine.yml", "whole number"]),
    ("negative_prompt: null\n", ["negative_prompt=null", "text"]),
    ("height: !!python/object:os.system 1\n", ["mine.yml", "not valid YAML"]),
    ("height: !!int x\n", ["mine.yml", "cannot be read"]),
    ("height: 1\n---\nheight: 2\n", ["not valid YAML"]),
    ("base_config: nowhere.yml\n", ["nowhere.yml", "no such config file"]),
    ("base_config: mine.yml\n", ["mine.yml", "leads back"]),
    ("num_layers: 7\n", ["num_layers=7", "mine.yml", "contradicts", "num_layers=2 (configs/models/wan-test.yml)"]),
    (b"\xff\xfe\x00h", ["not UTF-8"]),
    ("height: \x00\n", ["control characters"]),
    ("height: " + "[" * 3000, ["mine.yml"]),
]


@pytest.mark.parametrize("text, words", BAD_FILES, ids=range(len(BAD_FILES)))
def test_bad_files(text, words, tmp_path, capsys):
  path = tmp_path / "mine.yml"
  path.write_bytes(text if isinstance(text, bytes) else text.encode())
  arguments = [str(path), RANDOM, "prompt=x", "model_name=wan-test"]
  status, message = run(arguments, capsys)
  assert status == 2 and "Traceback" not in message
  for word in words:
    assert word in message, message


@pytest.mark.parametrize("environ, arguments, words", [
    ({"M_HEIGHT": "48"}, ["height=64"], ["height", "M_HEIGHT=48", "command line", "keep one"]),
    ({"M_HIEGHT": "48"}, [], ["M_HIEGHT", "did you mean M_HEIGHT"]),
    ({"M_": "48"}, [], ["unknown key ''"]),
    ({"M_HEIGHT": "tall"}, [], ["height=tall", "environment M_HEIGHT", "whole number"]),
    ({"M_HEIGHT": "48", "M_height": "64"}, [], ["another variable sets height"]),
    ({"M_SVG_DENSITY": "0.5"}, [], ["svg_density", "do nothing"]),
])
def test_bad_environment(environ, arguments, words, capsys):
  status, message = run(["tests/tiny.yml", RANDOM, "prompt=x", *arguments], capsys, environ)
  assert status == 2
  for word in words:
    assert word in message, message


# --- files that keys name


def npy(path, array):
  np.save(path, array, allow_pickle=True)
  return path


@pytest.mark.parametrize("array, words", [
    (np.zeros((16, 5, 16, 15), np.float32), ["[16, 5, 16, 15]", "float32 [16, 5, 16, 16]"]),
    (np.zeros((16, 5, 16, 16), np.float64), ["holds float64"]),
    (np.zeros((1, 16, 5, 16, 16), np.float32), ["[1, 16, 5, 16, 16]"]),
    (np.full((16, 5, 16, 16), np.nan, np.float32), ["NaN"]),
    (np.array([{"a": 1}], dtype=object), ["Python objects"]),
])
def test_bad_noise(array, words, tmp_path, capsys):
  path = npy(tmp_path / "noise.npy", array)
  status, message = run(["tests/tiny.yml", RANDOM, "prompt=x", f"initial_noise_path={path}"], capsys)
  assert status == 2 and f"initial_noise_path={path}" in message
  for word in words:
    assert word in message, message


def test_noise_of_the_right_shape(tmp_path, capsys):
  path = npy(tmp_path / "noise.npy", np.zeros((16, 5, 16, 16), np.float32))
  assert load(f"initial_noise_path={path}").initial_noise_path == str(path)
  path.write_bytes(path.read_bytes()[:-4])
  assert "damaged" in run(["tests/tiny.yml", RANDOM, "prompt=x", f"initial_noise_path={path}"], capsys)[1]
  path.write_bytes(b"PK\x03\x04" + bytes(100))
  assert "not a .npy file" in run(["tests/tiny.yml", RANDOM, "prompt=x", f"initial_noise_path={path}"], capsys)[1]


def test_saved_latents_give_the_size(tmp_path, capsys):
  path = npy(tmp_path / "latents.npy", np.zeros((16, 3, 4, 6), np.float32))
  config = pyconfig.initialize(["tests/tiny.yml", RANDOM, f"latents_path={path}"], "decode", {})
  assert (config.num_frames, config.height, config.width) == (9, 32, 48)
  assert config.sources["height"] == f"latents {path}"
  status, message = run(["tests/tiny.yml", RANDOM, f"latents_path={path}", "height=64"], capsys)
  assert status == 2 and "[16, 3, 4, 6]" in message and "[16, 3, 8, 6]" in message
  for arguments, word in ((["num_videos_per_prompt=2"], "copies"), (["attention=svg", "compare_dense=true"], "anew")):
    status, message = run(["tests/tiny.yml", RANDOM, f"latents_path={path}", *arguments], capsys)
    assert status == 2 and word in message


def test_prompts_file(tmp_path, capsys):
  path = tmp_path / "prompts.txt"
  path.write_bytes("\ufeffone: a\r\n\n  \n雪\nthree".encode())
  config = pyconfig.initialize(["tests/tiny.yml", RANDOM, f"prompts_file={path}"], "decode", {})
  assert config.prompts() == ("one: a", "雪", "three")
  for content, word in ((b"", "holds no prompt"), (b" \n\n", "holds no prompt"), (b"\xff\xff", "not UTF-8")):
    path.write_bytes(content)
    status, message = run(["tests/tiny.yml", RANDOM, f"prompts_file={path}"], capsys)
    assert status == 2 and word in message


def test_loras(tmp_path, capsys):
  one, two = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
  one.touch(), two.touch()
  assert load(f"lora_path={one}").loras == ((str(one), 1.0, "both"),)
  both = load(f"lora_path=[{one}, {two}]", "lora_weight=[1, -0.5]")
  assert both.loras == ((str(one), 1.0, "both"), (str(two), -0.5, "both"))
  status, message = run(["tests/tiny.yml", RANDOM, "prompt=x", f"lora_path={one}", "lora_weight=[1, 2]"], capsys)
  assert status == 2 and "2 entries for 1 files" in message


# --- the weights folder


@pytest.fixture
def folder(monkeypatch):
  """Replaces the reader of weights folders; the test sets what it says about the model."""
  said = types.SimpleNamespace(
      wan=WanConfig(num_heads=3, head_dim=32, text_dim=40, ffn_dim=192, num_layers=2), vae=VaeConfig(base_dim=16),
      umt5=Umt5Config(d_model=40), num_experts=1, boundary_ratio=None, flow_shift=4.0)
  module = types.ModuleType("MaxText.checkpoints.folder")

  def open_folder(path):
    if path == "/broken":
      raise ValueError("/broken: transformer/config.json is missing")
    return said

  module.open_folder = open_folder
  monkeypatch.setitem(sys.modules, "MaxText.checkpoints.folder", module)
  return said


def from_folder(*arguments):
  return pyconfig.initialize(["tests/tiny.yml", "load_parameters_path=/weights", "prompt=x", *arguments], "decode", {})


def test_folder_decides_the_architecture(folder):
  config = from_folder()
  assert (config.model_name, config.num_heads, config.flow_shift) == ("", 3, 4.0)
  assert config.sources["num_heads"] == config.sources["flow_shift"] == "weights folder /weights"
  assert config.wan() == folder.wan and config.vae() == folder.vae and config.umt5() == folder.umt5
  assert config.height == 480, "a model_name that only video.yml sets brings no sampling values along"
  assert from_folder("flow_shift=2").flow_shift == 2.0


def test_folder_keeps_its_latent_statistics(folder):
  folder.vae = dataclasses.replace(folder.vae, latents_mean=(0.5,) * 16, latents_std=(2.0,) * 16)
  assert from_folder().vae() == folder.vae


def test_folder_of_a_known_model_brings_its_sampling_values(folder):
  folder.wan, folder.vae, folder.umt5 = WanConfig(num_heads=12, ffn_dim=8960, num_layers=30), VaeConfig(), Umt5Config()
  folder.flow_shift = None
  config = from_folder()
  assert (config.model_name, config.width, config.dtype, config.flow_shift) == ("wan2.1-t2v-1.3b", 832, "bfloat16", 3.0)


def test_folder_with_two_experts(folder):
  folder.num_experts, folder.boundary_ratio = 2, 0.875
  config = from_folder("guidance_scale=[4, 3]")
  assert (config.num_experts, config.boundary_ratio, config.guidance_scales) == (2, 0.875, (4.0, 3.0))


@pytest.mark.parametrize("arguments, words", [
    (["model_name=wan-test"], ["num_heads=4 (configs/models/wan-test.yml)", "num_heads=3 (weights folder /weights)"]),
    (["num_heads=5"], ["num_heads=5 (command line)", "num_heads=3 (weights folder /weights)", "override_model_config"]),
    (["num_experts=2"], ["num_experts=2 (command line)", "num_experts=1 (weights folder /weights)"]),
    ([RANDOM], ["load_parameters_path", "init_random_weights", "both set"]),
])
def test_folder_contradicted(folder, arguments, words, capsys):
  status, message = run(["tests/tiny.yml", "load_parameters_path=/weights", "prompt=x", *arguments], capsys)
  assert status == 2
  for word in words:
    assert word in message, message


def test_folder_overridden(folder):
  overridden = from_folder("override_model_config=true", "norm_eps=1e-5").wan()
  assert overridden == dataclasses.replace(folder.wan, eps=1e-5)


def test_an_override_that_the_weights_cannot_take_is_refused(folder, capsys):
  arguments = ["tests/tiny.yml", "load_parameters_path=/weights", "prompt=x", "override_model_config=true"]
  status, message = run([*arguments, "num_layers=1", "norm_eps=1e-5", "num_experts=2", "boundary_ratio=0.5"], capsys)
  assert status == 2 and "num_layers=1: the weights in /weights fit only num_layers=2" in message
  assert "num_experts=2: /weights holds only 1" in message


def test_broken_folder(folder, capsys):
  status, message = run(["tests/tiny.yml", "load_parameters_path=/broken", "prompt=x"], capsys)
  assert (status, message) == (2, "error: load_parameters_path=/broken: /broken: transformer/config.json is missing\n")


@pytest.mark.parametrize("command, arguments, taken", [
  ("decode", [], {"load_parameters_path", "prompt"}),
  ("decode", ["prompt=mine"], {"load_parameters_path"}),
  ("decode", ["prompts_file=mine"], {"load_parameters_path"}),
  ("encode_dataset", ["video_directory=v", "dataset_path=d"], {"load_parameters_path"}),
  ("decode", [RANDOM], False),
  ("decode", ["load_parameters_path=/other"], False),
  ("decode", ["model_name=wan2.1-t2v-1.3b"], False),
  ("benchmark_attention", [], False),
])
def test_weights_that_come_with_the_project(folder, monkeypatch, tmp_path, command, arguments, taken):
  monkeypatch.setattr(pyconfig.config_reader, "WEIGHTS", tmp_path)
  (tmp_path / "wan-test").mkdir()
  (tmp_path / "wan-test" / "prompt.txt").write_text("a square\n")
  links = [pyconfig.Link("base.yml", {"load_parameters_path": None, "model_name": ""}),
           pyconfig.Link("video.yml", {"model_name": "wan-test"}), pyconfig.config_reader.read_command_line(arguments)]
  shipped = pyconfig._shipped_weights(links[:2], links[2:], command)
  values = {"load_parameters_path": str(tmp_path / "wan-test"), "prompt": "a square"}
  assert (shipped and shipped.values) == ({key: values[key] for key in taken} if taken else None)
  if command == "decode" and not arguments:
    config = pyconfig.initialize(["tests/tiny.yml", "model_name=wan-test", "override_model_config=true", "num_heads=3"],
                                 "decode", {})
    assert (config.prompt, config.folder) == ("a square", folder)
    assert config.sources["load_parameters_path"] == "shipped with the project"


# --- commands


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help(command, capsys):
  with pytest.raises(SystemExit) as stop:
    pyconfig.initialize(["tests/tiny.yml", "--help"], command, {})
  text = capsys.readouterr().out
  assert stop.value.code == 0 and f"python -m MaxText.{command} configs/" in text
  for group in COMMANDS[command][2]:
    for key in config_types.keys_of(group):
      assert f"  {key}=" in text and config_types.KEYS[key].description.split()[0] in text
  assert max(len(line) for line in text.splitlines() if "python -m" not in line) <= 122


@pytest.mark.parametrize("arguments, shown", [
  (["configs/train_video.yml", "--help"], ["  global_batch_size=8 ", "  num_layers=2 ", "of configs/train_video.yml"]),
  (["--help"], ["  global_batch_size=1 ", "  num_layers=40 ", "those of configs/base.yml"]),
  (["nowhere.yml", "--help"], ["  global_batch_size=1 ", "those of configs/base.yml"])], ids=len)
def test_help_shows_the_values_of_the_file(arguments, shown, capsys):
  with pytest.raises(SystemExit):
    pyconfig.initialize(arguments, "train", {})
  text = capsys.readouterr().out
  assert all(words in text for words in shown)


def test_exit_status(capsys):
  @pyconfig.run_main
  def main(argv):
    if argv:
      raise {"config": pyconfig.ConfigError("no"), "stop": KeyboardInterrupt(), "bug": ValueError("bug")}[argv[0]]

  assert main([]) == 0
  assert main(["config"]) == 2 and capsys.readouterr().err == "error: no\n"
  assert main(["stop"]) == 1
  with pytest.raises(ValueError, match="bug"):  # not the user's fault: Python prints its traceback and exits with 1
    main(["bug"])


def test_input_errors_name_the_key():
  with pytest.raises(pyconfig.ConfigError, match="^lora_path=a: too short$"), pyconfig.input_errors("lora_path=a"):
    raise ValueError("too short")
  with pytest.raises(pyconfig.ConfigError, match="^lora_path is bad$"), pyconfig.input_errors("lora_path=a"):
    raise OSError("lora_path is bad")
