"""Writes the golden files of the text encoder, the tokenizer and the .pth reader (tests/golden/text/).

Run with an environment that has tests/golden/requirements.txt: python tests/golden/make_text.py
Everything is random but seeded; nothing is downloaded.
"""

import collections
import json
import os
import shutil

import numpy as np
import sentencepiece
import torch
from diffusers.pipelines.wan.pipeline_wan import WanPipeline, prompt_clean
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, UMT5Config, UMT5EncoderModel
from transformers.convert_slow_tokenizer import SentencePieceExtractor

OUT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "text")

# Widths that are no multiples of one another, inner width (heads × d_kv) other than d_model, lengths beyond max_distance.
ENCODERS = {
  "long": (
    dict(vocab_size=50, d_model=24, d_kv=12, d_ff=40, num_layers=3, num_heads=3),
    [200, 131, 1],
  ),
  "buckets": (
    dict(vocab_size=33, d_model=40, d_kv=4, d_ff=28, num_layers=2, num_heads=5,
         relative_attention_num_buckets=12, relative_attention_max_distance=20),
    [45, 60],
  ),
}

PROMPTS = [
  "a red ball moves slowly right over the snow",
  "",
  "  two   spaces\nand\r\na newline\t tab  ",
  "a cat 😀 and 🐱 dog 👩‍🚀",
  "雪の中の犬が走る猫 雪中犬",
  "a “quoted” ball, it's \"red\" don’t",
  "a red </s> ball",
  "<pad> a ball <pad>",
  "x <extra_id_0> y<extra_id_1>z",
  "</s></s>",
  "<unk> a </S> <EXTRA_ID_0> <extra_id_99>",
  "&amp;lt;b&amp;gt; &eacute; &#128512; &amp;amp;",
  "schÃ¶n cafÃ©",
  "ﬁ ½ Ⅳ ２ ÀÉ e\u0301",
  "a\u3000b\u00a0c\u2003d\u200be",
  "日本 語 日本",
  "http://x.y/z?a=b&c=d",
  " ".join(["red ball"] * 1000),
]


CLEANING = [
  " \t\n ",
  "  a \r\n\n b\t",
  "&amp;amp;lt;b",
  "<b> &amp;amp;lt;b &amp;lt;b",
  "&lt;/s&gt;",
  "a&nbsp;&nbsp;b\u3000c\u2028d\x85e",
  "schÃ¶n &eacute; &#128512; &#28; &#x1f;x &#x85;",
  "it’s “fine” — ‘ok’…",
  "\x1b[31mred\x07 \x1c\x1d\x1e\x1f\x0b\x0c end",
  "ﬁsh 😀 ｆｕｌｌ\ufeff \u200b\u200d",
]


def encoder(name, sizes, lengths):
  """A tiny encoder with every weight random, and its output for prompts of several lengths padded to the longest."""
  torch.manual_seed(0)
  model = UMT5EncoderModel(UMT5Config(feed_forward_proj="gated-gelu", **sizes)).eval()
  with torch.no_grad():
    for key, parameter in model.named_parameters():
      if "layer_norm" in key:
        parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
      elif "relative_attention_bias" in key:
        parameter.copy_(2 * torch.randn_like(parameter))
    mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    ids = torch.where(mask, torch.randint(1, sizes["vocab_size"], mask.shape), 0)
    output = model(ids, mask.long()).last_hidden_state
  weights = {key: value.numpy() for key, value in model.state_dict().items() if key != "encoder.embed_tokens.weight"}
  np.savez_compressed(f"{OUT}/encoder_{name}.npz", ids=ids.numpy(), mask=mask.numpy(), output=output.numpy(), **weights)
  with open(f"{OUT}/encoder_{name}.json", "w") as stream:
    json.dump(sizes, stream, indent=1)


def buckets():
  """Relative-position buckets of distances −700 … 700 for several settings."""
  arrays = {}
  for num, distance in ((32, 128), (12, 20), (8, 50), (64, 1000), (32, 100)):
    config = UMT5Config(relative_attention_num_buckets=num, relative_attention_max_distance=distance, num_layers=1)
    attention = UMT5EncoderModel(config).encoder.block[0].layer[0].SelfAttention
    arrays[f"{num}_{distance}"] = attention._relative_position_bucket(torch.arange(-700, 701)).numpy().astype(np.int8)
  np.savez_compressed(f"{OUT}/buckets.npz", **arrays)


def full_size_shapes():
  """Names and shapes of UMT5-XXL on the meta device; the layers are alike, so that only the first is written."""
  config = UMT5Config(vocab_size=256384, d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64)
  with torch.device("meta"):
    model = UMT5EncoderModel(config)
  shapes = {key: list(value.shape) for key, value in model.named_parameters()}
  for layer in range(1, 24):
    for key in [key for key in shapes if f".block.{layer}." in key]:
      assert shapes.pop(key) == shapes[key.replace(f".block.{layer}.", ".block.0.")]
  sizes = [p.numel() for p in model.parameters()]
  record = {"parameters": sum(sizes), "tensors": len(sizes), "shapes": shapes}
  with open(f"{OUT}/umt5_xxl_shapes.json", "w") as stream:
    json.dump(record, stream, indent=1)


def train_vocabulary(folder, **kwargs):
  shutil.rmtree(folder, ignore_errors=True)
  os.makedirs(folder)
  words = "a red blue green ball square moves slowly left right over the snow and rises cat dog don't it’s fi é 2"
  words += " 雪 中 の 犬 が 走 猫"
  rng = np.random.default_rng(0)
  lines = [" ".join(rng.choice(words.split(), 9)) for _ in range(600)]
  # From memory to memory: a trainer given files writes their paths into the model.
  with open(f"{folder}/spiece.model", "wb") as stream:
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=stream, hard_vocab_limit=False,
                                             pad_id=0, eos_id=1, minloglevel=2, **kwargs)


def plain_tokenizer():
  """Vocabulary without byte fallback, read as T5Tokenizer reads it. Returns ids of the prompts."""
  folder = f"{OUT}/tokenizer_plain"
  train_vocabulary(folder, vocab_size=90, unk_id=2, bos_id=-1)
  config = dict(tokenizer_class="T5Tokenizer", extra_ids=10, model_max_length=512, eos_token="</s>", unk_token="<unk>",
                pad_token="<pad>")
  with open(f"{folder}/tokenizer_config.json", "w") as stream:
    json.dump(config, stream, indent=1)
  tokenizer = AutoTokenizer.from_pretrained(folder)
  return [tokenizer(prompt_clean(p), truncation=True, max_length=512).input_ids for p in PROMPTS]


def byte_tokenizer():
  """Vocabulary with byte fallback and UMT5's special ids, as a published tokenizer.json sets up the library `tokenizers`.

  Not through T5Tokenizer: since transformers 5 it rebuilds the tokenizer without byte fallback and with <unk> at 2.
  """
  folder = f"{OUT}/tokenizer_bytes"
  train_vocabulary(folder, vocab_size=400, unk_id=3, bos_id=2, byte_fallback=True)
  proto = SentencePieceExtractor(f"{folder}/spiece.model").proto
  tokenizer = Tokenizer(models.Unigram([(p.piece, p.score) for p in proto.pieces], unk_id=3, byte_fallback=True))
  charsmap = normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap)
  tokenizer.normalizer = normalizers.Sequence(
    [charsmap, normalizers.Strip(left=False, right=True), normalizers.Replace(Regex(" {2,}"), "▁")]
  )
  tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
  tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
  specials = ["<pad>", "</s>", "<s>", "<unk>"] + [f"<extra_id_{i}>" for i in range(9, -1, -1)]
  tokenizer.add_special_tokens([AddedToken(s, normalized=False, special=True) for s in specials])
  added = {str(tokenizer.token_to_id(s)): {"content": s, "normalized": False, "special": True} for s in specials}
  with open(f"{folder}/tokenizer_config.json", "w") as stream:
    json.dump(dict(tokenizer_class="T5Tokenizer", added_tokens_decoder=added), stream, indent=1)
  tokenizer.enable_truncation(512)
  return [tokenizer.encode(prompt_clean(p)).ids for p in PROMPTS]


def prompt_embeddings():
  """What WanPipeline makes of prompts: cleaned, tokenized, encoded, zeros past each prompt's end. Uses encoder "long"."""
  sizes, _ = ENCODERS["long"]
  model = UMT5EncoderModel(UMT5Config(feed_forward_proj="gated-gelu", **(sizes | {"vocab_size": 100}))).eval()
  saved = np.load(f"{OUT}/encoder_long.npz")
  state = {key: torch.from_numpy(saved[key]) for key in saved.files if key not in ("ids", "mask", "output")}
  table = torch.randn(100, sizes["d_model"], generator=torch.Generator().manual_seed(1))
  state["shared.weight"] = state["encoder.embed_tokens.weight"] = table
  model.load_state_dict(state)
  tokenizer = AutoTokenizer.from_pretrained(f"{OUT}/tokenizer_plain")
  pipeline = WanPipeline(tokenizer=tokenizer, text_encoder=model, vae=None, scheduler=None)
  prompts = [PROMPTS[0], "", PROMPTS[2], PROMPTS[-1]]
  with torch.no_grad():
    embeddings = pipeline._get_t5_prompt_embeds(prompts, max_sequence_length=512, device="cpu")
  # The last prompt fills all 512 positions; every 8th of its rows keeps the file small.
  np.savez_compressed(f"{OUT}/prompt_embeddings.npz", table=table.numpy(), short=embeddings[:3, :64].numpy(),
                      short_tail=embeddings[:3, 64:].abs().max().numpy(), long=embeddings[3, ::8].numpy())


def torch_files():
  """Small files of torch.save, and the values they hold."""
  torch.manual_seed(0)
  base = torch.randn(6, 5)
  tensors = collections.OrderedDict(
    bf16=torch.randn(3, 4).to(torch.bfloat16),
    half=torch.randn(2, 3).half(),
    float64=torch.randn(2, 2).double(),
    transposed=base.T,
    window=base[2:5, 1:4],
    shared_storage=base,
    scalar=torch.tensor(3.5),
    empty=torch.zeros(0, 4),
    int64=torch.arange(5),
    flags=torch.tensor([True, False]),
    parameter=torch.nn.Parameter(torch.randn(4)),
  )
  torch.save(tensors, f"{OUT}/state_dict.pth")
  torch.save({"a": {"b": base, "steps": 3}, "list": [base, 1.5, None, "text"]}, f"{OUT}/nested.pth")
  torch.save(dict(weight=base), f"{OUT}/legacy.pth", _use_new_zipfile_serialization=False)
  torch.save(torch.nn.Linear(2, 3), f"{OUT}/whole_module.pth")
  values = {key: value.detach() for key, value in tensors.items()}
  values["bf16"] = values["bf16"].float()
  np.savez_compressed(f"{OUT}/state_dict_values.npz", **{key: value.numpy() for key, value in values.items()})


def main():
  os.makedirs(OUT, exist_ok=True)
  for name, (sizes, lengths) in ENCODERS.items():
    encoder(name, sizes, lengths)
  buckets()
  full_size_shapes()
  with open(f"{OUT}/tokens.json", "w") as stream:
    cleaned = [[text, prompt_clean(text)] for text in PROMPTS + CLEANING]
    json.dump({"cleaned": cleaned, "prompts": PROMPTS, "plain": plain_tokenizer(), "bytes": byte_tokenizer()}, stream)
  prompt_embeddings()
  torch_files()


if __name__ == "__main__":
  main()
