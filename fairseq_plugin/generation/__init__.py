"""Generation from prompts and streams: generators, prompt states and the states of streams."""
