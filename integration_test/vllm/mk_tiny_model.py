#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write the config and tokenizer of a small model for vLLM's --load-format dummy.

Usage: mk_tiny_model.py DIR {tiny,small,mid,vision} MAX_LEN

There are no weights: vLLM makes random ones. The tokenizer is byte-level BPE
without merges, so one byte of text is exactly one token. All are Llamas but
vision, a BLIP-2: it sees one image a prompt, as 64 tokens before the text. A
Llama comes with a LoRA adapter in DIR/adapter. Standard library only.
"""
import json
import os
import random
import struct
import sys

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

CHAT_TEMPLATE = (
    "{% set sys = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}"
    "{% if tools %}{{ '<|im_start|>system\\n' + sys + '\\n\\n# Tools' }}"
    "{% for t in tools %}{{ '\\n' }}{{ t | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}"
    "{% elif sys %}{{ '<|im_start|>system\\n' + sys + '<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{% if not (loop.first and m['role'] == 'system') %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + (m['content'] or '') + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Shapes by the time they need for prefill on one core; see README.md.
SHAPES = {
    "tiny": dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
                 num_key_value_heads=2, head_dim=32, intermediate_size=128),
    "small": dict(hidden_size=256, num_hidden_layers=4, num_attention_heads=4,
                  num_key_value_heads=1, head_dim=64, intermediate_size=1024),
    "mid": dict(hidden_size=512, num_hidden_layers=8, num_attention_heads=8,
                num_key_value_heads=2, head_dim=64, intermediate_size=2048),
}

VISION = "vision"
IMAGE, IMAGE_TOKENS, IMAGE_SIZE = "<image>", 64, 28


def byte_alphabet():
    """The printable stand-in of each byte in byte-level BPE."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def added_token(content):
    return {"content": content, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": True}


def main(out, shape, max_len):
    os.makedirs(out, exist_ok=True)

    def write(name, value):
        with open(os.path.join(out, name), "w", encoding="utf-8") as f:
            json.dump(value, f, ensure_ascii=False, indent=1)

    alphabet = byte_alphabet()
    special = SPECIAL + [IMAGE] if shape == VISION else SPECIAL
    vocab = {s: i for i, s in enumerate(special)}
    vocab |= {alphabet[b]: len(special) + b for b in range(256)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    write("tokenizer.json", {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": i} | added_token(s) for i, s in enumerate(special)],
        "normalizer": None, "pre_tokenizer": byte_level, "post_processor": byte_level, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                  "ignore_merges": False, "vocab": vocab, "merges": []}})
    write("tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_len,
        "clean_up_tokenization_spaces": False, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
        "bos_token": None, "chat_template": CHAT_TEMPLATE,
        "added_tokens_decoder": {str(i): added_token(s) for i, s in enumerate(special)}})
    write("special_tokens_map.json", {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"})
    write("generation_config.json", {"eos_token_id": 2, "pad_token_id": 0})
    if shape == VISION:
        write_vision(write, len(vocab), max(4096, max_len))
        return
    write("config.json", {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": len(vocab),
        "max_position_embeddings": max(4096, max_len), "torch_dtype": "bfloat16", "bos_token_id": 0,
        "eos_token_id": 2, "pad_token_id": 0, "use_cache": True, "initializer_range": 0.02,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
        "attention_bias": False, "mlp_bias": False} | SHAPES[shape])
    write_adapter(os.path.join(out, "adapter"), **SHAPES[shape])


def write_vision(write, vocab_size, max_len):
    tower = dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128)
    write("config.json", {
        "architectures": ["Blip2ForConditionalGeneration"], "model_type": "blip-2", "torch_dtype": "bfloat16",
        "num_query_tokens": IMAGE_TOKENS, "image_token_index": len(SPECIAL),
        "text_config": {
            "model_type": "opt", "vocab_size": vocab_size, "hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 128,
            "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": max_len, "torch_dtype": "bfloat16",
            "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0},
        "vision_config": {"model_type": "blip_2_vision_model", "image_size": IMAGE_SIZE, "patch_size": 14} | tower,
        "qformer_config": {
            "model_type": "blip_2_qformer", "vocab_size": vocab_size, "encoder_hidden_size": 64,
            "cross_attention_frequency": 1} | tower})
    write("preprocessor_config.json", {
        "image_processor_type": "BlipImageProcessor", "size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE},
        "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True, "rescale_factor": 1 / 255,
        "resample": 3, "image_mean": [0.5] * 3, "image_std": [0.5] * 3})
    write("processor_config.json", {"processor_class": "Blip2Processor", "num_query_tokens": IMAGE_TOKENS})


def write_adapter(out, hidden_size, num_hidden_layers, num_attention_heads, head_dim, rank=4, **_):
    """A LoRA adapter with random weights for the query projections, as PEFT writes them."""
    os.makedirs(out, exist_ok=True)
    with open(os.path.join(out, "adapter_config.json"), "w", encoding="utf-8") as f:
        json.dump({"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 16 * rank, "lora_dropout": 0.0,
                   "bias": "none", "target_modules": ["q_proj"], "inference_mode": True}, f, indent=1)
    rng, header, data = random.Random(1), {}, bytearray()
    for layer in range(num_hidden_layers):
        for half, shape in ("A", (rank, hidden_size)), ("B", (num_attention_heads * head_dim, rank)):
            begin, size = len(data), shape[0] * shape[1]
            data += struct.pack(f"<{size}f", *(rng.gauss(0, 0.5) for _ in range(size)))
            header[f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{half}.weight"] = {
                "dtype": "F32", "shape": shape, "data_offsets": (begin, len(data))}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with open(os.path.join(out, "adapter_model.safetensors"), "wb") as f:
        f.write(struct.pack("<Q", len(head)) + head + data)


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[2] not in SHAPES | {VISION: None}:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
