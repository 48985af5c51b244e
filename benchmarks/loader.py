"""How fast batches come from a store: shards read, verified, packed and (with a GPU) copied to it.

    python benchmarks/loader.py                      # 3 aux layers of width 4096, as Llama-3.1-8B
    python benchmarks/loader.py --width 576 --tokens 200000

A training step must not wait for its data: the bar is three times what it eats (benchmarks/LOG.md). Passes:
``start`` also makes the pinned buffers, once a process; ``verifying`` opens the store anew, so every shard is
checked and every page mapped; ``open`` reads what is open and mapped. Prints JSON.
"""

import argparse
import json
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch

from eyas.data.pack import pack
from eyas.drafters.common.batch import PackedBatch, lay_out
from eyas.drafters.eagle3.ttt_rows import rows_of
from eyas.store.base import StateReader
from eyas.store.manifest import StoreManifest, plan_shards
from eyas.store.shards import ShardStore, ShardWriter
from eyas.train import prefetch as feed_module
from eyas.train.prefetch import feed
from eyas.types import HiddenStates, TargetSpec, TokenizedSample


def make_spec(width: int) -> TargetSpec:
    return TargetSpec(
        model="random",
        revision=None,
        architecture="LlamaForCausalLM",
        hidden_size=width,
        vocab_size=128256,
        num_layers=32,
        aux_layer_ids=(2, 16, 29),
        dtype="bfloat16",
        norm_kind="rms",
        norm_eps=1e-5,
        logit_softcap=None,
        logit_scale=1.0,
        tied_head=False,
        eos_token_ids=(128001,),
        tokenizer_fingerprint="",
        template_fingerprint="",
        weights_fingerprint="",
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=14336,
        max_position_embeddings=131072,
    )


def write_store(folder: Path, width: int, num_tokens: int, length: int, shard_bytes: int) -> ShardStore:
    """Fill a store with random documents, half of each supervised."""
    spec = make_spec(width)
    generator = np.random.default_rng(0)
    pool = torch.randn(4096, width).to(torch.bfloat16)
    lengths = [length] * (num_tokens // length)
    bounds = plan_shards(lengths, spec.bytes_per_token, shard_bytes)
    writer = ShardWriter(folder, StoreManifest(spec, "random", bounds))
    for shard in range(len(bounds) - 1):
        states = []
        for number in range(bounds[shard], bounds[shard + 1]):
            ids = generator.integers(0, spec.vocab_size, length).astype(np.int32)
            sample = TokenizedSample(f"d{number}", ids, np.arange(length) >= length // 2)
            aux = pool[torch.from_numpy(generator.integers(0, len(pool), (length, 3)))]
            states.append(HiddenStates.select(sample, aux, aux[:, -1]))
        writer.write(shard, states)
    return ShardStore(folder)


def load(states: StateReader, num_steps: int, pinned: bool, indices: list[int]) -> PackedBatch:
    return lay_out([states.read(i) for i in indices], rows_of(num_steps), torch.bfloat16, pinned)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--shard-mib", type=int, default=1024)
    parser.add_argument("--num-steps", type=int, default=7)
    parser.add_argument("--readers", type=int, default=feed_module._READERS, help="threads")
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        store = write_store(Path(folder), args.width, args.tokens, args.length, args.shard_mib << 20)
        feed_module._READERS = args.readers
        for name in ("start", "verifying", "verifying", "open", "open"):
            started = time.perf_counter()
            if name == "verifying":
                store = ShardStore(Path(folder))
            groups = pack(store.lengths, args.batch_tokens, seed=0)
            tokens = 0
            for batch in feed(partial(load, store, args.num_steps, device.type == "cuda"), [groups], device):
                tokens += len(batch.tokens)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - started
            out = {
                "pass": name,
                "device": device.type,
                "readers": args.readers,
                "tokens": tokens,
                "tokens_per_s": round(tokens / seconds),
                "gib_per_s": round(tokens * store.spec.bytes_per_token / seconds / 2**30, 2),
            }
            print(json.dumps(out), flush=True)


if __name__ == "__main__":
    main()
