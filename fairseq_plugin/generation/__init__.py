"""Generation from prompts and streams: generators, prompt states and the memory of streams."""
