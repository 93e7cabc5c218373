"""Checkpoints on disk: any engine's state by the model's own names, for any layout, with nothing pickled.

[Note: A checkpoint's folder] `step-000020/` holds `manifest.json` and safetensors files, `rank-00003.safetensors` being
what rank 3 wrote. A tensor is a few *chunks*: rectangles given by their offsets and sizes, each under a name in one
file. The manifest says which chunks make up which tensor, every file's size and checksum, and all plain values; it
carries a SHA-256 of itself. A folder is written as `step-000020.tmp`, put on the disk, and renamed: with its final name
it is whole, unless the disk lies, and for that there are the sums. Ranks plan what each writes and reads with torch's
distributed checkpoint (DCP), which sees tensors as chunks too; only its files, which are pickles, are not used.

    tensor_file   one safetensors file, streamed and hashed as it is written
    manifest      manifest.json: its form, its own sum
    storage       DCP's storage interface over both
    snapshot      a copy of a state on the CPU, which training may leave behind
    folder        which checkpoints there are; publish, keep, verify
    foreign       DCP's own files and Hugging Face's, when they are asked for by name
"""
