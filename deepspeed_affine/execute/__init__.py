"""Execution: moving the bytes that a plan names."""
