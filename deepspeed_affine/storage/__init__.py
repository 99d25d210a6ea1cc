"""Bytes on disk: .pt files, DeepSpeed folders, output folders.

This package knows files and not what a parameter means. Reading metadata needs no torch.
"""
