"""`stepgraph bench peers`: exchanges over the GPUs of a machine."""
