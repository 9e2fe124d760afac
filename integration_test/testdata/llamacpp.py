# SPDX-License-Identifier: Apache-2.0
"""A real llama.cpp server on the CPU, with a made-up model of which one byte of text is one token.

usage: llamacpp.py DIR PORT

Needs the packages xllamacpp (llama.cpp's server, as prebuilt wheels) and gguf. It writes the model into DIR, listens
on 127.0.0.1:PORT with two slots of 4096 tokens, and ends when its standard input does.
"""

import os
import sys

import gguf
import numpy
import xllamacpp

WIDTH, LAYERS, HEADS, INNER, CONTEXT = 64, 2, 2, 128, 4096
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_alphabet():
    """The printable stand-in of each byte in byte-level BPE."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    stands = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    return [stands[b] for b in range(256)]


def write_model(path):
    random = numpy.random.default_rng(1)
    w = gguf.GGUFWriter(path, "llama")
    w.add_name("tiny")
    w.add_context_length(CONTEXT)
    w.add_embedding_length(WIDTH)
    w.add_block_count(LAYERS)
    w.add_feed_forward_length(INNER)
    w.add_head_count(HEADS)
    w.add_head_count_kv(HEADS)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_dimension_count(WIDTH // HEADS)
    w.add_rope_freq_base(10000.0)
    alphabet = byte_alphabet()
    w.add_vocab_size(len(SPECIAL) + len(alphabet))
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list(SPECIAL + alphabet)
    w.add_token_types([gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * len(alphabet))
    w.add_token_merges([alphabet[255] + " " + alphabet[255]])  # there must be one; its result is no token
    w.add_bos_token_id(0)
    w.add_eos_token_id(2)
    w.add_add_bos_token(False)
    w.add_chat_template(TEMPLATE)

    def tensor(name, *shape, scale=0.08):
        w.add_tensor(name, (random.standard_normal(shape) * scale).astype(numpy.float32))

    def ones(name):
        w.add_tensor(name, numpy.ones(WIDTH, numpy.float32))

    tensor("token_embd.weight", len(SPECIAL) + len(alphabet), WIDTH, scale=0.5)
    for i in range(LAYERS):
        ones(f"blk.{i}.attn_norm.weight")
        ones(f"blk.{i}.ffn_norm.weight")
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            tensor(f"blk.{i}.{part}.weight", WIDTH, WIDTH)
        tensor(f"blk.{i}.ffn_gate.weight", INNER, WIDTH)
        tensor(f"blk.{i}.ffn_up.weight", INNER, WIDTH)
        tensor(f"blk.{i}.ffn_down.weight", WIDTH, INNER)
    ones("output_norm.weight")
    tensor("output.weight", len(SPECIAL) + len(alphabet), WIDTH)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def main(folder, port):
    path = os.path.join(folder, "tiny.gguf")
    write_model(path)
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.hostnames = ["127.0.0.1"]
    params.port = int(port)
    params.n_ctx, params.n_parallel = 2 * CONTEXT, 2
    params.endpoint_metrics = True
    params.use_jinja = True
    params.warmup = False
    params.cpuparams.n_threads = 1
    server = xllamacpp.Server(params)
    print("listening on", server.listening_address, flush=True)
    sys.stdin.read()
    os._exit(0)


main(*sys.argv[1:])
