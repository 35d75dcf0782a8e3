"""Models as Flax NNX modules: structure only. State, caches and masks are the caller's."""
