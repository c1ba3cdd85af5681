"""The text of --help: what a command does, examples, how values are found, and every key in groups."""

from __future__ import annotations

import textwrap
import types
from collections.abc import Mapping
from typing import Any

from MaxText import config_types

WIDTH = 122

# command → what it does, examples, groups of keys that it reads
COMMANDS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "decode": (
        "Generates videos from prompts with a Wan model.",
        ("configs/video.yml attention=svg",
         'configs/video.yml attention=svg load_parameters_path=FOLDER prompt="a red ball rolls over the snow"',
         "configs/video.yml load_parameters_path=FOLDER prompts_file=prompts.txt attention=svg svg_schedule=conservative",
         'configs/video.yml init_random_weights=true num_frames=17 prompt="a test" dry_run=true'),
        ("run", "sampling", "attention", "memory", "mesh", "architecture")),
    "train": (
        "Fine-tunes a Wan model, or trains one from random weights.",
        ("configs/train_video.yml load_parameters_path=FOLDER run_name=mine steps=2000 learning_rate=1e-5",
         "configs/train_video.yml load_parameters_path=FOLDER run_name=mine lora_rank=32 learning_rate=1e-4",
         "configs/train_video.yml load_parameters_path=FOLDER train_target=vae dataset_type=video video_directory=VIDEOS",
         "configs/train_video.yml dataset_type=synthetic steps=10"),
        ("run", "training", "data", "sampling", "attention", "memory", "mesh", "architecture")),
    "train_compile": (
        "Compiles the step that train would run for a TPU slice, without a TPU: train's command and compile_topology. "
        "Nothing is loaded, run or written; printed are the memory of a device and whether it is enough, the kernels and "
        "the collectives, by the compiler's account. For choosing the mesh, global_batch_size and remat_policy. Exit "
        "status 1 where the step does not fit.",
        ("configs/train_video.yml compile_topology=v6e:4x4 model_name=wan2.1-t2v-1.3b dtype=bfloat16 remat_policy=full "
         "global_batch_size=16",
         "configs/train_video.yml compile_topology=v5p:4x4x4 load_parameters_path=FOLDER dtype=bfloat16 "
         "global_batch_size=64"),
        ("run", "training", "data", "sampling", "attention", "memory", "mesh", "architecture")),
    "encode_dataset": (
        "Encodes a folder of videos with captions into shards of latents and text embeddings, for training.",
        ("configs/train_video.yml load_parameters_path=FOLDER video_directory=VIDEOS dataset_path=SHARDS height=480 "
         "width=832",
         "configs/train_video.yml load_parameters_path=FOLDER video_directory=VIDEOS dataset_path=SHARDS "
         "size_buckets=[[480,832],[832,480]] num_data_workers=8 batch_size=8"),
        ("run", "data", "sampling", "memory", "mesh", "architecture")),
    "train_tokenizer": (
        "Learns a sentencepiece vocabulary from the captions of a folder of videos.",
        ("configs/train_video.yml video_directory=VIDEOS tokenizer_path=tokenizer tokenizer_vocab_size=4000",),
        ("run", "data")),
    "convert_checkpoint": (
        "Converts a Wan model to our Orbax checkpoint, or an Orbax or training checkpoint to a Diffusers folder; or "
        "writes a new model of random weights around the tokenizer in tokenizer_path.",
        ("configs/video.yml load_parameters_path=FOLDER convert_to=orbax converted_path=CHECKPOINT",
         "configs/video.yml load_parameters_path=CHECKPOINT convert_to=diffusers converted_path=FOLDER",
         "configs/video.yml model_name=wan-demo init_random_weights=true tokenizer_path=TOKENIZER convert_to=diffusers "
         "converted_path=FOLDER"),
        ("run", "conversion", "memory", "architecture")),
    "benchmark_attention": (
        "Times every attention kernel, routing and layout on one shape: measured on the TPU here, or with "
        "compile_topology, or without a TPU, an AOT estimate. One device's share is timed, num_heads / "
        "ici_context_parallelism heads. Writes "
        "{base_output_directory}/{run_name}/benchmark_attention.json, and keeps what it compiled in "
        "{base_output_directory}/aot_estimates for the next run. The keys that matter: compile_topology, height, width, "
        "num_frames, num_heads, svg_density or svg_band_width, svg_sink, svg_sink_frames, svg_num_sampled_queries, "
        "svg_block_q, svg_block_kv, flash_block_q, flash_block_kv, ici_context_parallelism.",
        ("configs/video.yml model_name=wan2.1-t2v-14b",
         "configs/video.yml model_name=wan2.1-t2v-14b compile_topology=v6e:2x4 svg_density=0.35",
         "configs/video.yml model_name=wan2.1-t2v-14b compile_topology=v6e:2x4 svg_block_q=3328 svg_block_kv=1536"),
        ("run", "sampling", "attention", "mesh", "architecture")),
}


def help_text(command: str, values: Mapping[str, Any] = types.MappingProxyType({}), file: str = "") -> str:
  """Returns the whole help of a command.

  Args:
    values: key → value to show as its default, in place of base.yml's.
    file: where these come from.
  """
  purpose, examples, groups = COMMANDS[command]
  program = f"python -m MaxText.{command}"
  lines = [f"usage: {program} CONFIG.yml [key=value ...]", "", *textwrap.wrap(purpose, WIDTH), "", "examples:"]
  lines += [f"  {program} {example}" for example in examples]
  lines += ["", *textwrap.wrap(
      "A value is found in this order, the last one wins: configs/base.yml, CONFIG.yml, configs/models/<model_name>.yml, "
      "the weights folder, the environment (M_HEIGHT=480 sets height), key=value. configs/base.yml explains each key's "
      "trade-off. Text is taken literally, other values are YAML: svg_density=[0.5,0.2]. Exit status: 0 on success, 2 on "
      "a bad config or input, 1 otherwise. "
      f"The values below are those of {file or 'configs/base.yml; give a CONFIG.yml to see its own'}.",
      WIDTH)]
  for group in groups:
    lines += ["", f"{group}: {config_types.GROUPS[group]}"]
    for key in config_types.keys_of(group):
      field = config_types.KEYS[key]
      default = config_types.as_yaml(values.get(key, field.default))
      head = f"  {key}={default}" if len(default) < 40 else f"  {key}=[…]"
      plain = isinstance(field.default, bool) or config_types.is_text(key) and not config_types.choices(key)
      text = field.description if plain else f"{field.description} ({config_types.expected(key)})"
      lines += textwrap.wrap(text, WIDTH, initial_indent=f"{head:<38}  ",
                             subsequent_indent=" " * 40, break_long_words=False)
  return "\n".join(lines)
