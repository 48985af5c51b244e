"""A tiny Kimi-K2.5: its class and wrapper, experts in INT4, a slow tokenizer that is code in the folder, its
template's form. ``dequantised`` writes the experts as plain tensors, for engines without a kernel for them.
"""

import base64
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from eyas.targets.quantized import read_weight
from eyas.targets.weights import Weights
from families import make_family, quantise_experts
from pipeline import change_json

SPECIAL = [
    "[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<think>", "</think>", "<|media_pad|>", "[UNK]",
]  # fmt: skip
VOCAB_SIZE = 256 + len(SPECIAL)

TEMPLATE = """\
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{%- endif -%}
{%- for message in messages -%}
  {%- set role = message['role'] -%}
  {%- if role in ('user', 'assistant') -%}{{ '<|im_' + role + '|>' + role }}
  {%- else -%}{{ '<|im_system|>' + role }}{%- endif -%}<|im_middle|>
  {%- if role == 'assistant' -%}
    {%- if loop.last or loop.nextitem is not defined or message.get('tool_calls') -%}
      {{ '<think>' + (message.get('reasoning_content') or '') + '</think>' }}
    {%- else -%}<think></think>{%- endif -%}
  {%- endif -%}
  {%- if message['content'] -%}{{ message['content'] }}{%- endif -%}
  {%- if message.get('tool_calls') -%}<|tool_calls_section_begin|>
    {%- for call in message['tool_calls'] -%}
      <|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>
      {%- set arguments = call['function']['arguments'] -%}
      {{ arguments if arguments is string else arguments | tojson }}<|tool_call_end|>
    {%- endfor -%}<|tool_calls_section_end|>
  {%- endif -%}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>
  {%- if thinking is defined and not thinking -%}<think></think>{%- else -%}<think>{%- endif -%}
{%- endif -%}
"""

# What a published folder's own module holds, as far as loading and encoding need it.
TOKENIZER_CODE = r"""
import json
from pathlib import Path

import tiktoken
from tiktoken.load import load_tiktoken_bpe
from transformers import PreTrainedTokenizer


class TikTokenTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tiktoken.model"}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, vocab_file, bos_token="[BOS]", eos_token="[EOS]", unk_token="[UNK]", **kwargs):
        ranks = load_tiktoken_bpe(vocab_file)
        special = json.loads((Path(vocab_file).parent / "special_tokens.json").read_text())
        self.model = tiktoken.Encoding(
            "kimi", pat_str=r"\p{L}+|\s+|[^\s\p{L}]+", mergeable_ranks=ranks,
            special_tokens={token: len(ranks) + i for i, token in enumerate(special)},
        )
        self.decoder = {i: token for token, i in self._all().items()}
        super().__init__(bos_token=bos_token, eos_token=eos_token, unk_token=unk_token, **kwargs)

    def _all(self):
        plain = {"".join(map(chr, b)): i for b, i in self.model._mergeable_ranks.items()}
        return plain | self.model._special_tokens

    @property
    def vocab_size(self):
        return self.model.n_vocab

    def get_vocab(self):
        return self._all()

    def _tokenize(self, text, **kwargs):
        return [self.decoder[i] for i in self.model.encode(text, allowed_special="all")]

    def _convert_token_to_id(self, token):
        return self._all()[token]

    def _convert_id_to_token(self, index):
        return self.decoder[index]

    def convert_tokens_to_string(self, tokens):
        special = self.model._special_tokens
        parts = [t.encode() if t in special else bytes(map(ord, t)) for t in tokens]
        return b"".join(parts).decode("utf-8", errors="replace")

    def save_vocabulary(self, save_directory, filename_prefix=None):
        return ()
"""

# As the published folder has it: a configuration of its own, over DeepSeek-V3's.
CONFIG_CODE = """
from transformers import DeepseekV3Config, PretrainedConfig


class KimiK25VisionConfig(PretrainedConfig):
    model_type = "kimi_k25_vision"


class KimiK25Config(PretrainedConfig):
    model_type = "kimi_k25"

    def __init__(self, text_config=None, vision_config=None, ignore_index=-100,
                 media_placeholder_token_id=163605, pad_token_id=0, **kwargs):
        if isinstance(text_config, dict):
            text_config = DeepseekV3Config(**text_config)
        if isinstance(vision_config, dict):
            vision_config = KimiK25VisionConfig(**vision_config)
        self.text_config, self.vision_config = text_config, vision_config
        self.ignore_index = ignore_index
        self.media_placeholder_token_id = media_placeholder_token_id
        super().__init__(pad_token_id=pad_token_id, **kwargs)
"""


def make_kimi(folder: Path) -> Path:
    """Write the model with its experts in INT4, and return its folder."""
    make_family(folder, "kimi-k2.5", vocab_size=VOCAB_SIZE)
    for name in ("tokenizer.json", "special_tokens_map.json", "chat_template.jinja"):
        (folder / name).unlink(missing_ok=True)
    ranks = (f"{base64.b64encode(bytes([i])).decode()} {i}" for i in range(256))
    (folder / "tiktoken.model").write_text("\n".join(ranks) + "\n")
    (folder / "special_tokens.json").write_text(json.dumps(SPECIAL))
    (folder / "tokenization_kimi.py").write_text(TOKENIZER_CODE)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    added = {
        str(256 + i): {"content": token, "special": True, "normalized": False, "lstrip": False,
                       "rstrip": False, "single_word": False}
        for i, token in enumerate(SPECIAL)
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "TikTokenTokenizer",
                "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
                "added_tokens_decoder": added,
                "bos_token": "[BOS]",
                "eos_token": "<|im_end|>",
                "unk_token": "[UNK]",
                "pad_token": "[EOS]",
            }
        )
    )
    end = 256 + SPECIAL.index("<|im_end|>")
    text = json.loads((folder / "config.json").read_text())["text_config"]
    ids = {"bos_token_id": 256, "eos_token_id": end, "pad_token_id": 257}
    media = 256 + SPECIAL.index("<|media_pad|>")
    (folder / "configuration_kimi_k25.py").write_text(CONFIG_CODE)
    change_json(
        folder / "config.json",
        text_config=text | ids,
        media_placeholder_token_id=media,
        auto_map={"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end, "max_length": 262144}))
    return quantise_experts(folder)


def dequantised(folder: Path, out: Path) -> Path:
    """Copy a model with its experts as plain tensors."""
    out.mkdir(parents=True)
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            (out / path.name).write_bytes(path.read_bytes())
    weights, tensors = Weights(folder), load_file(folder / "model.safetensors")
    packed = [name.removesuffix("_packed") for name in tensors if name.endswith(".weight_packed")]
    plain = {n: t for n, t in tensors.items() if not n.endswith(("_packed", "_scale", "_shape"))}
    plain |= {n: read_weight(weights, n.removesuffix(".weight"), torch.float32) for n in packed}
    save_file(plain, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    del config["quantization_config"]
    (out / "config.json").write_text(json.dumps(config))
    return out
