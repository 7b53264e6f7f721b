"""Files of a checkpoint as they lie on disk: config, tokenizer, GGUF. Never reaches torch."""
