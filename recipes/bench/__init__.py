"""Speed and memory beside what one would use instead; nothing is timed that was not first shown to be equal."""
