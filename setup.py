"""Packaging. Everything the tools need to know lives here and in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = {}
exec((HERE / "deepspeed_affine" / "_version.py").read_text(encoding="utf-8"), VERSION)

setup(
    name="deepspeed-affine",
    version=VERSION["__version__"],
    description="Convert, verify and move DeepSpeed checkpoints through an affine description of every shard.",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["deepspeed_affine", "deepspeed_affine.*"]),
    package_data={"deepspeed_affine": ["py.typed"]},
    install_requires=["deepspeed>=0.16", "numpy", "packaging", "torch>=2.4", "tqdm"],
    extras_require={
        "test": [
            "accelerate",
            "flask",
            "flask-cors",
            "hypothesis",
            "matplotlib",
            "moto[s3]",
            "mypy",
            "pytest",
            "pytest-xdist",
            "ruff",
            "s3fs",
            "transformers==4.57.6",
        ],
        "plot": ["matplotlib"],
        "hf": ["safetensors", "transformers"],
        "remote": ["fsspec"],
    },
    entry_points={
        "console_scripts": [
            "ds_to_universal = deepspeed_affine.cli:ds_to_universal",
            "ds_affine = deepspeed_affine.cli:ds_affine",
        ]
    },
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
    ],
)
