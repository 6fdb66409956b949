"""Folders of the `transformers` library: config.json and safetensors files, in and out, without running any code of theirs.

config.json ── settings ──┐
                          ├─> checkpoint: a reader of canonical tensors, with a manifest
*.safetensors ── folder ──┘   export: a reader of their tensors, with a config.json
families/     one table a family of models: names, fused tensors and settings, read in both directions
"""
