"""stepgraph: schedules of diffusion transformers, compiled to proven multi-GPU plans and replayed."""
