"""Checkpoints on disk: any engine's state by the model's own names, for any layout, without pickle.

[Note: A checkpoint's folder] `step-000020/` holds `manifest.json` and safetensors files, one a rank
(`rank-00003.safetensors`). A tensor is a few *chunks*: rectangles given by their offsets and sizes, each under a name
in one file. The manifest lists the chunks of each tensor, every file's size and checksum, all plain values, and a
SHA-256 of itself. A folder is written as `step-000020.tmp`, flushed, and renamed: under its final name it is complete.
Ranks tell each other which chunks they hold, in JSON.
"""
