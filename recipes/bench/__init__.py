"""Speed and memory beside what one would use instead; nothing is timed that was not first shown to be equal."""

import os

# Read when torch is imported. Its profiler, which counts memory, otherwise says so in the middle of a progress bar.
os.environ.setdefault("KINETO_LOG_LEVEL", "10")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
