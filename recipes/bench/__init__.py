"""Speed and memory of our operations and models compared with the usual alternatives, once they agree."""

import os

# torch reads these when it is imported. They keep the messages of its profiler, which counts memory, off the terminal.
os.environ.setdefault("KINETO_LOG_LEVEL", "10")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
