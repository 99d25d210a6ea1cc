"""Live DeepSpeed: the only package here that imports deepspeed, and it never imports ``commands``."""
