"""Learns a sentencepiece vocabulary from the captions of a folder of videos.

  python -m MaxText.train_tokenizer configs/train_video.yml video_directory=VIDEOS tokenizer_path=tokenizer

Writes {tokenizer_path}/spiece.model, numbered as T5's vocabularies: padding 0, end 1, unknown 2; and
tokenizer_config.json, which tells the length that prompts are padded to. Texts are cleaned as
prompts are, and every byte has a piece, so that no text is unknown. It belongs to a text encoder that is trained with it.
"""

from __future__ import annotations

import collections
import json
import pathlib
import re
import shutil
import sys
from collections.abc import Sequence

from MaxText import pyconfig
from MaxText.config_types import ConfigError
from MaxText.input_pipeline.video_files import find_videos
from MaxText.reporter import Reporter

MODEL = "spiece.model"
UNK_ID = 2
MAX_PIECE, MAX_SEEDS = 16, 1_000_000  # characters of a piece; pieces to choose from; both as sentencepiece has them
MAX_BYTES = 2**16  # of a caption; sentencepiece leaves longer ones out without a word


@pyconfig.run_main
def main(argv: list[str]) -> None:
  config = pyconfig.initialize(argv, "train_tokenizer")
  reporter = Reporter(config.log_format)
  output = pathlib.Path(config.tokenizer_path).expanduser()
  if output.exists() and (not output.is_dir() or any(output.iterdir())):
    raise ConfigError(f"tokenizer_path={config.tokenizer_path}: exists and is not empty; name a new folder")
  videos, _ = find_videos(config.video_directory)
  with reporter.stage("train"):
    size = train([video.caption for video in videos], output, config.tokenizer_vocab_size, config.tokenizer_max_length)
  if size < config.tokenizer_vocab_size:
    reporter.warn(f"tokenizer_vocab_size={config.tokenizer_vocab_size}: {len(videos)} captions give only {size} pieces")
  reporter.info(f"wrote {output / MODEL}: {size} pieces from {len(videos)} captions")


def train(captions: list[str], output: pathlib.Path, vocab_size: int, max_length: int) -> int:
  """Learns at most vocab_size pieces and writes them; the folder appears only when it is whole.

  Args:
    captions: what to learn from. output: the new folder. vocab_size: most pieces.
    max_length: tokens that prompts are padded to and cut at.

  Returns:
    The number of pieces.

  Raises:
    ConfigError: fewer pieces are asked for than bytes and letters need, or the folder cannot be written.
  """
  import sentencepiece

  from MaxText.models.tokenizer import EOS_ID, PAD_ID, Tokenizer, clean_prompt

  partial = output.with_name(output.name + ".partial")
  try:
    shutil.rmtree(partial, ignore_errors=True)  # of a killed run
    partial.mkdir(parents=True)
    captions, seeds = [clean_prompt(caption) for caption in captions], partial / "seeds.tsv"
    seeds.write_text("".join(f"{piece}\t{count}\n" for piece, count in seed_pieces(captions)), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter(captions), seed_sentencepieces_file=str(seeds),
      model_prefix=str(partial / pathlib.Path(MODEL).stem), model_type="unigram", vocab_size=vocab_size,
      hard_vocab_limit=False, character_coverage=1.0, byte_fallback=True, pad_id=PAD_ID, eos_id=EOS_ID, unk_id=UNK_ID,
      bos_id=-1, pad_piece="<pad>", eos_piece="</s>", unk_piece="<unk>", max_sentence_length=MAX_BYTES, minloglevel=2)
  except (RuntimeError, ValueError) as error:
    shutil.rmtree(partial, ignore_errors=True)
    needed = re.search(r"\d+ vs (\d+)", str(error))
    least = f"; at least {needed[1]} are needed" if needed else f" ({error})"
    raise ConfigError(f"tokenizer_vocab_size={vocab_size}: too small for these captions, whose letters and the 256 bytes "
                      f"have pieces of their own{least}") from None
  except OSError as error:
    raise ConfigError(f"tokenizer_path={output}: cannot be written ({error.strerror or error})") from None
  seeds.unlink()
  (partial / pathlib.Path(MODEL).with_suffix(".vocab").name).unlink()
  # Names and numbers that transformers' T5 tokenizer reads; without sentinels the pieces are the whole vocabulary.
  declared = {"tokenizer_class": "T5Tokenizer", "model_max_length": max_length, "extra_ids": 0, "pad_token": "<pad>",
              "eos_token": "</s>", "unk_token": "<unk>"}
  (partial / "tokenizer_config.json").write_text(json.dumps(declared, indent=2) + "\n")
  if output.is_dir():
    output.rmdir()  # empty, as checked
  partial.rename(output)
  Tokenizer(str(output))  # what was written passes the checks that decode will make
  return sentencepiece.SentencePieceProcessor(model_file=str(output / MODEL)).get_piece_size()


def seed_pieces(captions: Sequence[str]) -> list[tuple[str, int]]:
  """What the vocabulary is chosen from: parts of words that occur twice or more, with how often; the most text first.

  sentencepiece's own choice holds what different words share, and so no whole word that stands alone: of captions with
  few different words, however frequent, it makes "p u r pl e".
  """
  import sentencepiece

  normalizer = sentencepiece.SentencePieceNormalizer(rule_name="nmt_nfkc")
  texts = (normalizer.normalize(caption).replace("▁", " ") for caption in captions)
  words = collections.Counter(f"▁{word}" for text in texts for word in text.split())
  counts: collections.Counter[str] = collections.Counter()
  for word, count in words.items():
    for begin in range(len(word)):
      for end in range(begin + 1, min(len(word), begin + MAX_PIECE) + 1):
        counts[word[begin:end]] += count
  found = [(piece, count) for piece, count in counts.items() if count > 1 or len(piece) == 1]
  return sorted(found, key=lambda seed: (-seed[1] * len(seed[0]), seed[0]))[:MAX_SEEDS]


if __name__ == "__main__":
  sys.exit(main())
