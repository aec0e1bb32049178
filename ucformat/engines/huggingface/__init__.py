"""Hugging Face: safetensors files, and folders of Trainer and Accelerate."""
