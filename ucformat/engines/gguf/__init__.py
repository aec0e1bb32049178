"""GGUF files of llama.cpp: tensors, and blocks of quantized ones as they are."""
