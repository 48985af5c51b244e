"""What a description of the released Kimi-K2.5 holds."""

# From the released config.json's text_config.
KIMI = {
    "architecture": "KimiK25ForConditionalGeneration",
    "hidden_size": 7168,
    "vocab_size": 163840,
    "num_layers": 61,
    "dtype": "bfloat16",
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 192,
    "intermediate_size": 18432,
    "max_position_embeddings": 262144,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 50000.0,
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "latent_attention": {
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
}
